"""Deep Q-learning: a complete agent with replay, and the one to begin a new one from.

Mnih et al., "Human-level control through deep reinforcement learning", 2015,
https://doi.org/10.1038/nature14236, with the target of van Hasselt et al., "Deep Reinforcement
Learning with Double Q-learning", 2015, https://arxiv.org/abs/1509.06461, as an option. So are the
rest of Hessel et al., "Rainbow: Combining Improvements in Deep Reinforcement Learning", 2017,
https://arxiv.org/abs/1710.02298: n-step returns, prioritised replay, distributions of returns and
noisy networks here, dueling in the network.

Axis legend: `T` time, `B` streams, `N` drawn sequences, `A` actions.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import rlax

from agents import exploration, networks, optimization, options, preprocessing, replay, returns
from agents.networks import heads
from podracers import environment, types


class ActorParams(NamedTuple):
    """The part of the learner that acting needs."""

    params: types.PyTree
    normalizer: types.PyTree
    epsilon: jax.Array  # float32, probability of a random action


class Extras(NamedTuple):
    """The data of each step that acting reports."""

    value: jax.Array  # [T, B] of the best legal action


@dataclasses.dataclass(frozen=True, eq=False)
class DQN:
    """Deep Q-network; `replay.Replay` says how many gradient steps follow each rollout.

    Attributes:
      spec: environment specification.
      network: `network(spec, num_actions)` returns a network that puts out `[..., A]`.
      distribution: the distribution of returns that is learnt instead of their means, for which
        `network(..., num_atoms=Z)` puts out `[..., A, Z]`; None for the means.
      noisy: whether `network(..., noisy=True)` explores, by the noise of its weights, which
        evaluations do without; bind `epsilon` to 0 beside it.
      double: whether the online parameters choose the action whose value the target takes.
      huber: error from which the loss grows linearly; of no account to distributions.
      n_step: rewards that a target adds up before it bootstraps.
      gamma: discount.
      epsilon: final probability of a random action.
      epsilon_steps: agent steps, over all streams, in which it falls linearly from 1 to that.
      evaluation_epsilon: probability of a random action in evaluation.
      learning_rate: Adam learning rate.
      anneal_steps: agent steps, over all streams, until the learning rate is 0; None if constant.
      adam_epsilon: Adam epsilon.
      max_grad_norm: norm that the gradient of the global batch is clipped to; None for none.
      batch_size: sequences of each gradient step, over all devices.
      replay_capacity: transitions over all streams of all devices.
      min_replay: transitions over all streams before anything is learnt from them.
      replay_ratio: number of times that a state is learnt from, on average.
      priority_exponent: exponent of prioritised replay; 0 for uniform draws.
      importance_exponent: exponent of the importance weights, in `[0, 1]`.
      importance_steps: agent steps, over all streams, in which it rises linearly to 1; None for a
        constant one.
      target_period: gradient steps between updates of the target parameters.
      target_rate: step size of an update of the target parameters, in `[0, 1]`; 1 copies.
      normalize_observations: whether observations are normalised by running statistics.
      reward_scale: factor of the rewards that are learnt from.
      reward_clip: bound of the absolute value of scaled rewards; None for no bound.
    """

    spec: environment.EnvironmentSpec
    network: Callable[..., networks.Network] = networks.q_network
    distribution: heads.CategoricalReturn | None = None
    noisy: bool = False
    double: bool = True
    huber: float = options.positive(1.0)
    n_step: int = options.count(1)
    gamma: float = options.fraction(0.99)
    epsilon: float = options.fraction(0.05)
    epsilon_steps: int = options.count(10_000)
    evaluation_epsilon: float = options.fraction(0.0)
    learning_rate: float = options.positive(1e-3)
    anneal_steps: float | None = options.optional_positive(None)
    adam_epsilon: float = options.positive(1e-8)
    max_grad_norm: float | None = options.optional_positive(None)
    batch_size: int = options.count(64)
    replay_capacity: int = options.count(100_000)
    min_replay: int = options.count(1_000)
    replay_ratio: float = options.positive(8.0)
    priority_exponent: float = options.fraction(0.0)
    importance_exponent: float = options.fraction(0.0)
    importance_steps: float | None = options.optional_positive(None)
    target_period: int = options.count(1)
    target_rate: float = options.fraction(1.0)
    normalize_observations: bool = False
    reward_scale: float = options.number(1.0)
    reward_clip: float | None = options.optional_positive(None)

    def __post_init__(self):
        """Checks the options."""
        options.check(self)
        options.require_discrete(self)
        options.require_feedforward(self, self._network)

    @functools.cached_property
    def _network(self) -> networks.Network:
        wanted = {}
        if self.distribution is not None:
            wanted["num_atoms"] = self.distribution.num_atoms
        if self.noisy:
            wanted["noisy"] = True
        return self.network(self.spec, self.spec.action.num_values, **wanted)

    _preprocess = functools.cached_property(preprocessing.Preprocess.of)

    @functools.cached_property
    def _optimizer(self) -> optimization.Optimizer:
        schedule = self.learning_rate, self.anneal_steps
        return optimization.adam(*schedule, self.adam_epsilon, self.max_grad_norm)

    @functools.cached_property
    def _replay(self) -> replay.Replay:
        return replay.Replay(
            capacity=self.replay_capacity,
            sequence_length=self._network.memory_length + self.n_step,
            batch_size=self.batch_size,
            priority_exponent=self.priority_exponent,
            importance_exponent=self.importance_exponent,
            min_size=self.min_replay,
            replay_ratio=self.replay_ratio,
        )

    def init_learner(self, key):
        """Returns fresh parameters, their target and the optimizer's state."""
        params = self._network.init(key, networks.zero_timestep(self.spec))
        normalizer = self._preprocess.init(self.spec.observation)
        return optimization.ReplayLearner.create(self._optimizer.init(params), params, normalizer)

    def init_memory(self, rollout):
        """Returns an empty replay of this device's streams."""
        return self._replay.init(rollout._replace(extras=(), actor_state=()))

    def init_actor(self, env_id, num_envs, evaluation=False):
        """Returns the cores of `B` streams: their latest frames, where the network stacks them."""
        return self._network.initial_core(env_id.shape[0])

    def actor_params(self, learner):
        """Returns the parameters, the statistics of the observations, and epsilon."""
        epsilon = optax.linear_schedule(1.0, self.epsilon, self.epsilon_steps)
        return ActorParams(learner.params, learner.normalizer, epsilon(learner.agent_steps))

    def act(self, params, actor_state, timestep, key, evaluation=False):
        """Takes the best action, or at times a random one."""
        timestep = self._preprocess.apply(params.normalizer, timestep)
        noise = ()
        if self.noisy and not evaluation:
            key, *noise = jax.vmap(jax.random.split, out_axes=1)(key)
        output, actor_state = self._network.step(params.params, actor_state, timestep, *noise)
        q_values = self._mean(output)
        epsilon = self.evaluation_epsilon if evaluation else params.epsilon
        action = exploration.epsilon_greedy(q_values, timestep.observation, epsilon, key)
        best = jnp.max(exploration.legal_q_values(q_values, timestep.observation), axis=-1)
        return action, actor_state, Extras(best)

    def update(self, state, rollout, key):
        """Stores one rollout, and takes the gradient steps that the replay ratio allows."""
        learner, memory = state
        memory = self._replay.add(memory, rollout._replace(extras=(), actor_state=()))
        num_steps = self._replay.num_gradient_steps(memory, rollout, learner.update)
        learner = learner.observe(rollout, self._preprocess)
        learning_rate = self._optimizer.learning_rate_at(learner.agent_steps)
        exponent = None
        if self.importance_steps is not None:
            exponent = optimization.annealed(
                self.importance_exponent, 1.0, self.importance_steps, learner.agent_steps
            )

        def step(learner, memory, step_key):
            sample = self._replay.sample(memory, step_key, exponent)
            timestep = self._preprocess.apply(learner.normalizer, sample.rollout.timestep)
            sample = sample.with_timestep(timestep)
            loss = functools.partial(self._loss, target=learner.target)
            train_state, output = self._optimizer.gradient_step(
                loss, learner.train_state, sample, learning_rate
            )
            memory = self._replay.update_priorities(memory, sample.item, output.priority)
            target = learner.next_target(train_state.params, self.target_period, self.target_rate)
            learner = learner.step(train_state, target)
            return learner, memory, output.metrics

        learner, memory, metrics = self._replay.repeat(step, num_steps, learner, memory, key)
        return types.AgentState(learner, memory), metrics

    def _mean(self, output):
        """Returns the values `[..., A]` of what the network puts out."""
        return output if self.distribution is None else self.distribution.mean(output)

    def _loss(self, params, sample, target):
        """Returns the losses `[N]` of single states, with targets of `n_step` rewards and fewer."""
        timestep, action, _, _ = sample.rollout
        burn_in = self._network.memory_length  # time steps before them, for the stack of frames
        later, action = jax.tree.map(lambda x: x[burn_in:], (timestep, action))
        arrival, reward, discount = self._returns(later)
        time = burn_in + jnp.stack([jnp.zeros_like(arrival), arrival])  # [2, N]
        outputs, targets = self._outputs((params, target), timestep, time, sample.key)
        q_values, q_target = self._mean(outputs), self._mean(targets)  # [2, N, A]
        observation = jax.tree.map(
            lambda x: x[time[1], jnp.arange(arrival.size)], timestep.observation
        )
        selector = q_values if self.double else q_target
        selector = exploration.legal_q_values(selector[1], observation)
        td_error = jax.vmap(rlax.double_q_learning)(
            q_values[0], action[0], reward, discount, q_target[1], selector
        )
        if self.distribution is None:
            loss, priority = rlax.huber_loss(td_error, self.huber), jnp.abs(td_error)
        else:
            loss = priority = self.distribution.loss(
                outputs[0], action[0], reward, discount, targets[1], selector
            )
        taken = rlax.batched_index(q_values[0], action[0])
        weight = returns.weights(later)[0]  # [N] 0 where the action was ignored
        metrics = {
            "loss/total": types.Mean.of(sample.weight * loss, weight),
            "value/mean": types.Mean.of(taken, weight),
            "value/target": types.Mean.of(taken + td_error, weight),
        }
        return optimization.LossOutput(metrics, jnp.where(weight > 0.0, priority, -1.0))

    def _returns(self, timestep):
        """Returns when a target bootstraps, the return until then, and the discount of the rest.

        Args:
          timestep: `[n + 1, N]`.

        Returns:
          `[N]` each; the first, int32, from 1 to `n`.
        """
        last = timestep.last()[1:].at[-1].set(True)
        zeros = jnp.zeros_like(timestep.reward)
        reward = returns.n_step(timestep, zeros, self.gamma, self.n_step)[0]
        # What a value of 1 then adds to rewards of 0.
        unrewarded = timestep._replace(reward=zeros)
        discount = returns.n_step(unrewarded, zeros + 1.0, self.gamma, self.n_step)[0]
        return jnp.argmax(last, axis=0) + 1, reward, discount

    def _outputs(self, params, timestep, time, key):
        """Returns what networks put out at some time steps, `[2, N, ...]` by each parameters.

        Args:
          params: parameters, a tuple.
          timestep: `[T + 1, N]`.
          time: `[2, N]` int32.
          key: `[N]` typed keys of the noise, of which each parameters have their own.
        """
        stream = jnp.broadcast_to(jnp.arange(time.shape[1]), time.shape)
        core = self._network.initial_core(time.shape[1])
        core = self._network.core_before(core, timestep, time.ravel(), stream.ravel())
        timestep = jax.tree.map(lambda x: x[time.ravel(), stream.ravel()], timestep)
        noise = [()] * len(params)
        if self.noisy:
            keys = jax.vmap(lambda k: jax.random.split(k, len(params)), out_axes=1)(key)
            noise = [(jnp.tile(each, 2),) for each in keys]
        return [
            jax.tree.map(
                lambda x: x.reshape(*time.shape, *x.shape[1:]),
                self._network.step(each, core, timestep, *some)[0],
            )
            for each, some in zip(params, noise)
        ]
