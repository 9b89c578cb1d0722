"""Advantage actor-critic with tables: what agents reach that are taught by hand, to judge rules by.

Mnih et al., "Asynchronous Methods for Deep Reinforcement Learning", 2016,
https://arxiv.org/abs/1602.01783. Its agents live as those of a rule do: the same tables of logits,
environments, chunks of transitions, and one step of stochastic gradient descent after each.

Axis legend: `B` lifetimes of one device, `E` environments of each, `T` transitions of an update,
`S` states, `A` actions, `H` combinations of hyper-parameters.
"""

import dataclasses
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agents import options, returns
from agents.meta.lpg import acting, tabular
from podracers import environment, tasks, types


class Agent(NamedTuple):
    """What one agent has learnt; zeros at birth."""

    policy: jax.Array  # [S, A] logits
    values: jax.Array  # [S]


@dataclasses.dataclass(frozen=True, eq=False)
class TabularA2C:
    """Agents of lifetimes that learn by A2C; there is nothing to learn beyond them.

    What acts is `arm_logits`, `[tasks, H]`: by what the hyper-parameters of an agent are drawn.

    Attributes:
      spec: specification of `environments.meta.lifetimes.Lifetimes`.
      chunk_length: `T`, agent steps of each environment between updates.
      gamma: discount.
      gae_lambda: trace parameter of the advantages.
      critic_step_size: step size of the values, 1 for the mean of the latest returns.
      learning_rates: candidates of the learning rate of the policy, on the mean over a chunk.
      entropy_costs: candidates of the weight of the policy's entropy, a bonus.
    """

    spec: environment.EnvironmentSpec
    chunk_length: int = options.count(20)
    gamma: float = options.fraction(0.995)
    gae_lambda: float = options.fraction(0.95)
    critic_step_size: float = options.fraction(0.5)
    learning_rates: tuple[float, ...] = (5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
    entropy_costs: tuple[float, ...] = (0.0, 0.01)

    def __post_init__(self):
        """Refuses impossible options."""
        options.check(self)

    @property
    def arms(self) -> np.ndarray:
        """Learning rates and entropy costs of all combinations, `[H, 2]` float32."""
        return np.array(
            list(itertools.product(self.learning_rates, self.entropy_costs)), np.float32
        )

    def init_actor(
        self, env_id: jax.Array, num_envs: int, evaluation: bool = False
    ) -> acting.Lifetime:
        """Returns agents that have learnt nothing."""
        num_states = int(self.spec.observation[tasks.ROWS].maximum)
        num_actions = self.spec.observation[environment.ACTION_MASK].shape[-1]
        newborn = Agent(jnp.zeros((num_states, num_actions)), jnp.zeros((num_states,)))
        return acting.init(self.spec, newborn, self.chunk_length, env_id.shape[0])

    def act(
        self,
        params: jax.Array,
        actor_state: acting.Lifetime,
        timestep: types.TimeStep,
        key: jax.Array,
        evaluation: bool = False,
    ) -> tuple[jax.Array, acting.Lifetime, tuple[()]]:
        """Learns where a chunk is full, then samples an action for each environment."""
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
            gain = tabular.log_prob(log_policy, chunk.action) * advantage
            return -tabular.mean(gain + entropy_cost * tabular.entropy(log_policy), weight)

        return Agent(agent.policy - learning_rate * jax.grad(loss)(agent.policy), values)
