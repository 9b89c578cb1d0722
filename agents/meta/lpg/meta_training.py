"""Meta-training of LPG's rule: many lifetimes at once, each of an agent that the rule trains.

Oh et al., "Discovering Reinforcement Learning Algorithms", 2020, https://arxiv.org/abs/2007.08794,
as run on Anakin by Hessel et al., "Podracer architectures for scalable Reinforcement Learning",
2021, https://arxiv.org/abs/2104.06272.

To runners it is an ordinary agent. A stream is a lifetime (`environments.meta.lifetimes`), whose
agent's parameters are the actor state, which FIRST resets. The rule is trained on rollouts.

Axis legend: `B` lifetimes of one device, `E` environments of each, `T` transitions of an update,
`K` updates, `R = (K + 1) * T` transitions of a rollout, `H` combinations of hyper-parameters.
"""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from agents.meta.lpg import acting, tabular
from agents.meta.lpg import bandit as bandit_lib
from agents.meta.lpg import rule as rule_lib
from agents.parts import optimization, options, returns
from podracers import environment, errors, tasks, types, unroll


class Learner(NamedTuple):
    """Learner state; identical on every device."""

    train_state: optimization.TrainState  # parameters and optimizer state of the rule
    bandit: bandit_lib.Bandit


class Memory(NamedTuple):
    """Statistics of the lifetimes of one device."""

    critic: jax.Array  # [B, S] state values of their agents; no input of the rule
    reward: jax.Array  # [B] sum so far, mean over environments
    steps: jax.Array  # [B] float32, agent steps so far


class ActorParams(NamedTuple):
    """Parameters of `act`."""

    rule: types.PyTree
    arm_logits: jax.Array  # [tasks, H]


class _Batch(NamedTuple):
    """Batch of the meta-loss."""

    agent: tabular.Agent  # [B, ...] before the rollout
    chunk: tabular.Chunk  # [B, K + 1, T, E]; time steps are T + 1
    arm: jax.Array  # [B]
    advantage: jax.Array  # [B, T, E] of the last chunk


@dataclasses.dataclass(frozen=True, eq=False)
class LPG:
    """Meta-learner of the rule of learned policy gradient.

    A rollout of a lifetime has `updates + 1` chunks. The rule updates the agent after each chunk
    except the last. The last chunk, collected by the updated agent, is the validation data: the
    rule ascends the policy gradient of that chunk, differentiated through all updates.
    `agents.parts.options` describes the options that are not listed here.

    Attributes:
      spec: specification of `environments.meta.lifetimes.Lifetimes`.
      chunk_length: `T`, agent steps of each environment between updates of an agent.
      updates: `K`, updates of an agent that the meta-gradient flows through.
      hidden_size: units of the rule's LSTM.
      prediction_size: `m`, categories of the agents' predictions.
      sees_predictions: whether predictions are inputs of the rule.
      exact_meta_gradient: whether the meta-gradient also flows through the rule's inputs.
      recompute: whether the backward pass computes each update again, which takes less memory and
        more time.
      gamma: discount, also an input of the rule.
      gae_lambda: trace parameter of the advantages.
      critic_step_size: step size of the values; 1 replaces a value by the mean return.
      policy_entropy_cost: weight of the agents' entropy bonus.
      prediction_entropy_cost: weight of the predictions' entropy bonus.
      policy_target_cost: weight of the mean square of policy targets.
      prediction_target_cost: weight of the mean square norm of prediction targets.
      agent_learning_rates: candidate learning rates of agents, for the mean loss of a chunk; a
        bandit chooses among all combinations with `prediction_costs`, for each kind of task.
      prediction_costs: candidate weights of the agents' predictions in their loss.
    """

    spec: environment.EnvironmentSpec
    chunk_length: int = options.count(20)
    updates: int = options.count(5)
    hidden_size: int = options.count(256)
    prediction_size: int = options.count(30)
    sees_predictions: bool = True
    exact_meta_gradient: bool = True
    recompute: bool = False
    learning_rate: float = options.positive(1e-4, most=1e3)
    adam_epsilon: float = options.positive(1e-8, most=1e3)
    max_grad_norm: float | None = options.positive(0.5)
    gamma: float = options.fraction(0.995)
    gae_lambda: float = options.fraction(0.95)
    critic_step_size: float = options.fraction(0.5)
    policy_entropy_cost: float = options.number(0.01)
    prediction_entropy_cost: float = options.number(0.001)
    policy_target_cost: float = options.number(0.001)
    prediction_target_cost: float = options.number(0.001)
    agent_learning_rates: tuple[float, ...] = (20.0, 40.0, 80.0)
    prediction_costs: tuple[float, ...] = (0.1, 0.5, 1.0)

    def __post_init__(self):
        options.check(self)
        for name in ("agent_learning_rates", "prediction_costs"):
            numbers = getattr(self, name)
            is_valid = isinstance(numbers, tuple) and len(numbers) > 0 and min(numbers) >= 0
            options.expect(self, name, is_valid, "a tuple of non-negative numbers")
        can_learn = any(self.agent_learning_rates)
        options.expect(self, "agent_learning_rates", can_learn, "a learning rate above 0 in it")
        observation = self.spec.observation
        if not isinstance(observation, dict) or tasks.TASK not in observation:
            raise errors.UserError(
                f"LPG: expected environments.meta.lifetimes.Lifetimes, got {self.spec.name}"
            )
        longest = (self.spec.max_episode_steps or 0) + 1
        if longest % self.rollout_length:
            raise errors.UserError(
                f"lifetimes of {longest} steps are not a multiple of a rollout of "
                f"{self.rollout_length} (chunk_length * (updates + 1)): bind Lifetimes.period"
            )

    @property
    def rollout_length(self) -> int:
        """`R`, agent steps of a rollout."""
        return self.chunk_length * (self.updates + 1)

    @property
    def arms(self) -> np.ndarray:
        """Learning rates and prediction costs of the bandit's arms, `[H, 2]` float32."""
        pairs = itertools.product(self.agent_learning_rates, self.prediction_costs)
        return np.array([*pairs], np.float32)

    @functools.cached_property
    def rule(self) -> rule_lib.Rule:
        """The rule, without its parameters."""
        sizes = self.hidden_size, self.prediction_size
        return rule_lib.Rule(*sizes, gamma=self.gamma, sees_predictions=self.sees_predictions)

    @functools.cached_property
    def _optimizer(self) -> optimization.Optimizer:
        adam = optax.scale_by_adam(eps=self.adam_epsilon)
        return optimization.Optimizer(adam, self.learning_rate, max_grad_norm=self.max_grad_norm)

    def init_learner(self, key: jax.Array) -> Learner:
        """Returns an initial rule, and a bandit without trials."""
        train_state = self._optimizer.init(self.rule.init(key))
        return Learner(train_state, bandit_lib.Bandit.init(self._num_tasks, len(self.arms)))

    def restart(self, learner: Learner) -> Learner:
        """Returns a fresh learner whose optimizer begins with its rule; see `agent.Agent`."""
        return learner._replace(train_state=self._optimizer.init(learner.train_state.params))

    def init_memory(self, rollout: types.Rollout) -> Memory:
        """Returns the statistics before the first rollout."""
        length, count = rollout.extras.shape
        if length != self.rollout_length:
            raise errors.UserError(
                f"LPG needs rollouts of {self.rollout_length} agent steps (chunk_length * (updates "
                f"+ 1)), got {length}: bind ROLLOUT_LENGTH"
            )
        num_states = int(self.spec.observation[tasks.ROWS].maximum)
        return Memory(jnp.zeros((count, num_states)), jnp.zeros((count,)), jnp.zeros((count,)))

    def init_actor(self, env_id, num_envs, evaluation=False):
        """Returns initial agents, an `acting.Lifetime`."""
        agent = tabular.init_agent(self.spec, self.prediction_size)
        return acting.init(self.spec, agent, self.chunk_length, env_id.shape[0])

    def actor_params(self, learner: Learner) -> ActorParams:
        """Returns the rule and the logits by which arms are drawn."""
        return ActorParams(learner.train_state.params, learner.bandit.logits())

    def act(self, params, actor_state, timestep, key, evaluation=False):
        """Updates agents whose chunk is full, then samples an action for each environment.

        In evaluations every chunk causes an update. In training the last chunk of a rollout is the
        validation data of the rule and causes none.
        """

        def learn(agent: tabular.Agent, chunk: tabular.Chunk, arm: jax.Array) -> tabular.Agent:
            return self._learn(params.rule, agent, chunk, arm)[0]

        length = None if evaluation else self.rollout_length
        action, state = acting.act(learn, params.arm_logits, actor_state, timestep, key, length)
        return action, state, state.arm

    def update(self, state: types.AgentState, rollout: types.Rollout, key: jax.Array):
        """Takes one gradient step of the rule."""
        learner, memory = state
        timestep, arm = rollout.timestep, rollout.extras[0]
        before = rollout.actor_state.agent, memory
        initial = jax.tree.map(jnp.zeros_like, before)
        agent, memory = unroll.select(timestep.first()[0], initial, before)
        chunk = self._chunks(rollout)
        critic, advantage = jax.vmap(self._values)(memory.critic, chunk.timestep)
        batch = _Batch(agent, chunk, arm, advantage[:, -1])
        train_state, output = self._optimizer.gradient_step(
            self._loss, learner.train_state, batch, jnp.float32(self.learning_rate)
        )
        reward = jnp.sum(timestep.reward[1:], axis=0, where=~timestep.first()[1:])
        memory = Memory(critic, memory.reward + reward, memory.steps + self.rollout_length)
        task, ended = timestep.observation[tasks.TASK][0], timestep.last()[-2]
        bandit = learner.bandit.add(task, arm, memory.reward / memory.steps, ended)
        metrics = output.metrics | self._progress(rollout, chunk, advantage)
        return types.AgentState(Learner(train_state, bandit), memory), metrics

    @property
    def _num_tasks(self) -> int:
        return int(self.spec.observation[tasks.TASK].maximum) + 1

    def _learn(
        self, rule_params: types.PyTree, agent: tabular.Agent, chunk: tabular.Chunk, arm: jax.Array
    ) -> tuple[tabular.Agent, tabular.Update]:
        """Takes one update of one agent."""
        learning_rate, prediction_cost = jnp.asarray(self.arms)[arm]
        exact = self.exact_meta_gradient
        return tabular.learn(
            self.rule, rule_params, agent, chunk, learning_rate, prediction_cost, exact
        )

    def _chunks(self, rollout: types.Rollout) -> tabular.Chunk:
        """Returns rollouts in chunks, `[B, K + 1, T, E]`; neighbours share a time step."""
        timestep = tabular.merged(rollout.timestep)
        begin = self.chunk_length * np.arange(self.updates + 1)[:, None]

        def cut(x: jax.Array, length: int) -> jax.Array:
            return jnp.moveaxis(x[begin + np.arange(length)], 2, 0)

        return tabular.Chunk(
            jax.tree.map(lambda x: cut(x, self.chunk_length + 1), timestep),
            cut(rollout.action, self.chunk_length),
        )

    def _values(self, critic: jax.Array, timestep: types.TimeStep) -> tuple[jax.Array, jax.Array]:
        """Returns the values of one lifetime after all chunks, and advantages `[K + 1, T, E]`."""
        settings = self.gamma, self.gae_lambda, self.critic_step_size
        return jax.lax.scan(lambda c, x: tabular.learn_values(c, x, *settings), critic, timestep)

    def _loss(self, rule_params: types.PyTree, batch: _Batch) -> optimization.LossOutput:
        """Returns the meta-loss, a mean over lifetimes."""
        terms = jax.vmap(functools.partial(self._lifetime_loss, rule_params))(batch)
        chex.assert_shape(list(terms.values()), batch.arm.shape)
        total = (
            terms["loss/policy"]
            - self.policy_entropy_cost * terms["policy/entropy"]
            - self.prediction_entropy_cost * terms["prediction/entropy"]
            + self.policy_target_cost * terms["rule/policy_target"]
            + self.prediction_target_cost * terms["rule/prediction_target"]
        )
        means = {name: types.Mean.of(values) for name, values in terms.items()}
        return optimization.LossOutput(types.Mean.of(total), means)

    def _lifetime_loss(self, rule_params: types.PyTree, batch: _Batch) -> dict[str, jax.Array]:
        """Returns the terms of one lifetime's meta-loss; entropies are means over all chunks."""
        training = jax.tree.map(lambda x: x[:-1], batch.chunk)
        validation = jax.tree.map(lambda x: x[-1], batch.chunk)

        def entropies(outputs: tabular.Outputs, weight: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(tabular.mean(tabular.entropy(log_probs), weight) for log_probs in outputs)

        def step(agent: tabular.Agent, chunk: tabular.Chunk):
            agent, update = self._learn(rule_params, agent, chunk, batch.arm)
            weight = returns.weights(chunk.timestep)
            outputs = jax.tree.map(lambda x: x[:-1], update.outputs)
            square = jnp.sum(jnp.exp(2.0 * update.targets.log_prediction), axis=-1)
            return agent, (
                entropies(outputs, weight),
                tabular.mean(jnp.square(update.targets.policy), weight),
                tabular.mean(square, weight),
            )

        if self.recompute:
            step = jax.checkpoint(step)
        agent, (before, policy_target, prediction_target) = jax.lax.scan(
            step, batch.agent, training
        )
        weight = returns.weights(validation.timestep)
        observation = jax.tree.map(lambda x: x[:-1], validation.timestep.observation)
        outputs = tabular.outputs(agent, observation)
        log_prob = rule_lib.log_prob(outputs.log_policy, validation.action)
        chex.assert_equal_shape([log_prob, batch.advantage, weight])
        policy_entropy, prediction_entropy = (
            jnp.mean(jnp.append(x, y)) for x, y in zip(before, entropies(outputs, weight))
        )
        return {
            "loss/policy": -tabular.mean(log_prob * batch.advantage, weight),
            "policy/entropy": policy_entropy,
            "prediction/entropy": prediction_entropy,
            "rule/policy_target": jnp.mean(policy_target),
            "rule/prediction_target": jnp.mean(prediction_target),
        }

    def _progress(
        self, rollout: types.Rollout, chunk: tabular.Chunk, advantage: jax.Array
    ) -> dict[str, types.Mean]:
        """Returns metrics of lifetimes, with episode returns of each task in their second half."""
        timestep = rollout.timestep
        age = jnp.where(timestep.first()[0], 0, rollout.actor_state.time)
        is_second_half = age >= (self.spec.max_episode_steps or 0) // 2
        task = timestep.observation[tasks.TASK][0]
        arrival = jax.tree.map(lambda x: x[:, :, 1:], chunk.timestep)
        total_return = jnp.sum(arrival.reward, axis=(1, 2, 3))  # [B]
        episodes = jnp.sum(arrival.last().astype(jnp.float32), axis=(1, 2, 3))
        metrics = {
            "critic/error": types.Mean.of(jnp.square(advantage)),
            "lifetime/reward": types.Mean.of(timestep.reward[1:]),
            "lifetime/age": types.Mean.of(age),
        }
        for number in range(self._num_tasks):
            counts = (is_second_half & (task == number)).astype(jnp.float32)
            metrics[f"lifetime/return/task_{number}"] = types.Mean(
                jnp.sum(counts * total_return), jnp.sum(counts * episodes)
            )
        return metrics
