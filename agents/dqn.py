"""Deep Q-learning: a complete agent with replay, and the template for new ones.

Mnih et al., "Human-level control through deep reinforcement learning", 2015,
https://doi.org/10.1038/nature14236, with options for the target of van Hasselt et al., "Deep
Reinforcement Learning with Double Q-learning", 2015, https://arxiv.org/abs/1509.06461, and for the
rest of Hessel et al., "Rainbow: Combining Improvements in Deep Reinforcement Learning", 2017,
https://arxiv.org/abs/1710.02298: n-step returns, prioritised replay, distributions of returns and
noisy networks; dueling is an option of the network.

The loss of a transition, with the importance weight `w` of its draw, the parameters `θ` and those
of the target, `θ'`; `n` is smaller where the episode ends earlier, and `d_n` is 0 if it terminated:

    G = r_1 + γ r_2 + ... + γ^{n-1} r_n + γ^n d_n q(s_n, argmax_a q(s_n, a; θ); θ')
    w huber(G - q(s_0, a_0; θ))

Axis legend: `T` time, `B` streams, `N` drawn sequences, `A` actions. `_tm1` is the state whose
value is trained, `_t` the one that its target bootstraps from, up to `n_step` steps later.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from agents import networks
from agents.networks import heads, layers
from agents.parts import exploration, optimization, options, returns
from agents.replay import replay
from podracers import environment, types


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class DQN(replay.ReplayAgent, exploration.EpsilonGreedy):
    """Deep Q-network with gradient steps after each rollout as `replay.Replay` counts them.

    `replay.ReplayAgent` describes the options that are not listed here.

    Attributes:
      network: `network(spec, num_actions)` returns a network with output `[..., A]`.
      distribution: distribution of returns to learn instead of their means, for which
        `network(..., num_atoms=Z)` has output `[..., A, Z]`; None for the means.
      noisy: whether `network(..., noisy=True)` explores by the noise of its weights, in training
        only; bind `epsilon` to 0 with it.
      double: whether the online parameters choose the action of the target, not the target's own.
      huber: error from which the loss grows linearly; ignored by distributions.
      n_step: rewards that a target adds up before it bootstraps.
      importance_steps: agent steps, over all streams, in which `importance_exponent` rises linearly
        to 1; None if constant.
    """

    network: Callable[..., networks.Network] = networks.q_network
    distribution: heads.CategoricalReturn | None = None
    noisy: bool = False
    double: bool = True
    huber: float = options.positive(1.0)
    n_step: int = options.count(1)
    importance_steps: float | None = options.positive(None)
    target_period: int = options.count(2_000)
    target_rate: float = options.fraction(1.0)

    def __post_init__(self):
        super().__post_init__()
        options.require_discrete(self)
        options.require_feedforward(self, self.net)
        if (atoms := self.distribution) is not None and self.spec.players == 2:
            expected = "minimum = -maximum, because the return of one player is minus the other's"
            options.expect(self, "distribution", atoms.minimum == -atoms.maximum, expected)

    @functools.cached_property
    def net(self) -> networks.Network:
        outputs = {}
        if self.distribution is not None:
            outputs["num_atoms"] = self.distribution.num_atoms
        if self.noisy:
            outputs["noisy"] = True
        return options.make(self, "network", self.spec, self.spec.num_actions, **outputs)

    @functools.cached_property
    def buffer(self) -> replay.Replay:
        return replay.Replay.of(self, self.n_step, burn_in=self.net.memory_length or 0)

    def init_actor(self, env_id, num_envs, evaluation=False):
        """Returns the cores of `B` streams: their latest frames if the network stacks frames."""
        return self.net.initial_core(env_id.shape[0])

    def act(self, params, actor_state, timestep, key, evaluation=False):
        """Takes the best legal action, or with probability epsilon a random one."""
        timestep = self.preprocess.apply(params.normalizer, timestep)
        noise = ()
        if self.noisy and not evaluation:
            key, *noise = jax.vmap(jax.random.split, out_axes=1)(key)
        output, actor_state = self.net.step(params.params, actor_state, timestep, *noise)
        q_values, observation = self._mean(output), timestep.observation
        action, extras = self._explore(params, q_values, observation, key, evaluation)
        return action, actor_state, extras

    def importance_exponent_at(self, agent_steps):
        schedule = self.importance_exponent, 1.0, self.importance_steps
        return optimization.annealed(*schedule, agent_steps)

    def _mean(self, output):
        """Returns the values `[..., A]` of a network's output."""
        return output if self.distribution is None else self.distribution.mean(output)

    def targets(self, timestep):
        """Returns the parts `[N]` of targets of up to `n_step` rewards of one episode.

        Args:
          timestep: `[T + 1, N]`, with rewards to learn from.

        Returns:
          `(r_t, discount_t, t)`: the target is `r_t` plus `discount_t` times the value of the time
          step with the index `t`.
        """
        tm1 = self.buffer.burn_in  # earlier time steps fill the stack of frames
        r_t = jnp.zeros_like(timestep.reward[0])
        discount_t, t = jnp.ones_like(r_t), jnp.full(r_t.shape, tm1 + self.n_step)
        # Backwards from the last step; the return starts afresh at each end of an episode.
        for time in reversed(range(tm1 + 1, tm1 + self.n_step + 1)):
            last, discount = timestep.last()[time], self.gamma * timestep.discount[time]
            r_t = timestep.reward[time] + discount * jnp.where(last, 0.0, r_t)
            discount_t = discount * jnp.where(last, 1.0, discount_t)
            t = jnp.where(last, time, t)
        return r_t, discount_t, t

    def loss(self, params, sample, context):
        """Returns the losses of the values of the chosen actions."""
        timestep, action, *_ = sample.rollout
        tm1 = self.buffer.burn_in
        weight = returns.weights(timestep)[tm1]  # [N]
        a_tm1 = action[tm1]
        r_t, discount_t, t = self.targets(timestep)
        online_key, target_key = jax.vmap(jax.random.split, out_axes=1)(sample.key)
        time = jnp.stack([jnp.full_like(t, tm1), t])
        output_tm1, output_t = self._outputs(params, timestep, time, online_key)
        _, target_output_t = self._outputs(context.target, timestep, time, target_key)
        q_tm1, q_t = self._mean(output_tm1), self._mean(output_t)  # [N, A]
        target_q_t = self._mean(target_output_t)
        observation_t = jax.tree.map(lambda x: x[t, jnp.arange(t.size)], timestep.observation)
        selector = q_t if self.double else target_q_t
        selector = heads.legal_values(selector, environment.action_mask(observation_t))
        qa_tm1 = layers.take(q_tm1, a_tm1)
        value_t = layers.take(target_q_t, jnp.argmax(selector, axis=-1))
        td_error = jax.lax.stop_gradient(r_t + discount_t * value_t) - qa_tm1
        if self.distribution is None:
            loss, priority = optax.losses.huber_loss(td_error, delta=self.huber), jnp.abs(td_error)
        else:
            loss = self.distribution.loss(
                output_tm1, a_tm1, r_t, discount_t, target_output_t, selector
            )
            priority = jnp.maximum(loss, 0.0)  # rounding makes some divergences negative
        metrics = {
            "value/mean": types.Mean.of(qa_tm1, weight),
            "value/target": types.Mean.of(qa_tm1 + td_error, weight),
        }
        loss = types.Mean.of(sample.weight * loss, weight)
        priority = jnp.where(weight > 0.0, priority, -1.0)
        return optimization.LossOutput(loss, metrics, priority, output_tm1)

    def _outputs(self, params, timestep, time, key):
        """Returns the network's outputs at times `[K, N]` of time steps `[T + 1, N]`.

        `key` `[N]` is that of the noise, one for all time steps of a sequence.
        """
        time, shape = time.ravel(), time.shape
        stream = jnp.tile(jnp.arange(shape[1]), shape[0])
        core, timestep = self.net.prepare(self.net.initial_core(shape[1]), timestep)
        timestep = jax.tree.map(lambda x: x[time, stream], timestep)
        noise = (jnp.tile(key, shape[0]),) if self.noisy else ()
        output, _ = self.net.step(params, core, timestep, *noise)
        return output.reshape(*shape, *output.shape[1:])
