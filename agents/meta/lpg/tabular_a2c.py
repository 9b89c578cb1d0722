"""Tabular advantage actor-critic: a hand-written baseline for learned rules.

Mnih et al., "Asynchronous Methods for Deep Reinforcement Learning", 2016,
https://arxiv.org/abs/1602.01783. Its agents have the same tables of logits, environments and
chunks of transitions as those of a rule, and take one gradient step after each chunk.

Axis legend: `B` lifetimes of one device, `E` environments of each, `T` transitions of an update,
`S` states, `A` actions, `H` combinations of hyper-parameters.
"""

import dataclasses
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agents.meta.lpg import acting, rule, tabular
from agents.parts import options, returns
from podracers import environment


class Agent(NamedTuple):
    """Parameters of one agent; initially zero."""

    policy: jax.Array  # [S, A] logits
    values: jax.Array  # [S]


@dataclasses.dataclass(frozen=True, eq=False)
class TabularA2C:
    """Agents of lifetimes that learn by A2C; nothing is learned across lifetimes.

    The parameters of `act` are `[tasks, H]` logits by which agents' hyper-parameters are drawn.

    Attributes:
      spec: specification of `environments.meta.lifetimes.Lifetimes`.
      chunk_length: `T`, agent steps of each environment between updates.
      gamma: discount.
      gae_lambda: trace parameter of the advantages.
      critic_step_size: step size of the values; 1 replaces a value by the mean return.
      learning_rates: candidate learning rates of the policy, for the mean loss of a chunk.
      entropy_costs: candidate weights of the policy's entropy bonus.
    """

    spec: environment.EnvironmentSpec
    chunk_length: int = options.count(20)
    gamma: float = options.fraction(0.995)
    gae_lambda: float = options.fraction(0.95)
    critic_step_size: float = options.fraction(0.5)
    learning_rates: tuple[float, ...] = (5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
    entropy_costs: tuple[float, ...] = (0.0, 0.01)

    def __post_init__(self):
        options.check(self)

    @property
    def arms(self) -> np.ndarray:
        """Learning rates and entropy costs of all combinations, `[H, 2]` float32."""
        pairs = itertools.product(self.learning_rates, self.entropy_costs)
        return np.array([*pairs], np.float32)

    def init_actor(self, env_id, num_envs, evaluation=False):
        """Returns initial agents, an `acting.Lifetime`."""
        tables = tabular.init_agent(self.spec, prediction_size=1)
        agent = Agent(tables.policy, tables.prediction[:, 0])
        return acting.init(self.spec, agent, self.chunk_length, env_id.shape[0])

    def act(self, params, actor_state, timestep, key, evaluation=False):
        """Updates agents whose chunk is full, then samples an action for each environment."""
        action, state = acting.act(self._learn, params, actor_state, timestep, key)
        return action, state, ()

    def _learn(self, agent: Agent, chunk: tabular.Chunk, arm: jax.Array) -> Agent:
        """Takes one update of one agent."""
        learning_rate, entropy_cost = jnp.asarray(self.arms)[arm]
        values, advantage = tabular.learn_values(
            agent.values, chunk.timestep, self.gamma, self.gae_lambda, self.critic_step_size
        )
        weight = returns.weights(chunk.timestep)
        observation = jax.tree.map(lambda x: x[:-1], chunk.timestep.observation)

        def loss(logits: jax.Array) -> jax.Array:
            log_policy = tabular.log_policy(logits, observation)
            gain = rule.log_prob(log_policy, chunk.action) * advantage
            return -tabular.mean(gain + entropy_cost * tabular.entropy(log_policy), weight)

        return Agent(agent.policy - learning_rate * jax.grad(loss)(agent.policy), values)
