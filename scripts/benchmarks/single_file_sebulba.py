"""Sebulba in one file in its published form: the straightforward version that we measure against.

What Cleanba (Huang et al., "Cleanba: A Reproducible and Efficient Distributed Reinforcement
Learning Platform", https://arxiv.org/abs/2310.00036) does, on one device and written anew: an
actor thread with one EnvPool that stacks the frames, whole stacks sent at every step, lists of
arrays that are stacked at the end of a rollout, a queue to the learner, and parameters that are one
update old. The algorithm is IMPALA, the network Flax's, with XLA's own convolutions. It is no part
of the library; nothing imports it but `scripts/benchmarks`.

Axis legend: `T` time, `B` streams.
"""

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import envpool
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import rlax

_WAIT = 600.0  # seconds; compilation included


class Settings(NamedTuple):
    """Of the run; the numbers are Cleanba's for Atari."""

    num_envs: int
    rollout_length: int
    gamma: float = 0.99
    value_cost: float = 0.5
    entropy_cost: float = 0.01


class _ActorCritic(nn.Module):
    """The network of Mnih et al. 2015, with a policy and a value on top."""

    num_actions: int

    @nn.compact
    def __call__(self, x):
        """Returns logits `[N, A]` and values `[N]` of bytes `[N, frames, H, W]`."""
        x = jnp.transpose(x, (0, 2, 3, 1)) / 255.0

        def init(scale):
            return {"kernel_init": nn.initializers.orthogonal(scale)}

        for features, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            shape, strides = (kernel, kernel), (stride, stride)
            x = nn.relu(nn.Conv(features, shape, strides, "VALID", **init(2**0.5))(x))
        x = nn.relu(nn.Dense(512, **init(2**0.5))(x.reshape(x.shape[0], -1)))
        return nn.Dense(self.num_actions, **init(0.01))(x), nn.Dense(1, **init(1.0))(x)[..., 0]


class _Rollout(NamedTuple):
    """`[T, B, ...]`, but for the observations, of which there is one more."""

    observation: jax.Array  # [T + 1, B, frames, H, W]
    action: jax.Array
    logits: jax.Array
    value: jax.Array
    reward: jax.Array
    done: jax.Array
    reset: jax.Array  # EnvPool takes a step to reset, which the loss excludes


class State(NamedTuple):
    """What the learner changes."""

    params: Any
    optimizer_state: Any


class SingleFileSebulba:
    """The whole program, on one device.

    Args:
      task_id: one of EnvPool's with frames, such as `Pong-v5`.
      options: EnvPool's own; four frames are stacked.
      settings: of the algorithm.
    """

    def __init__(self, task_id: str, options: dict[str, Any], settings: Settings):
        self.settings = settings
        options = {**options, "stack_num": 4}
        self._make = lambda seed: envpool.make_gymnasium(
            task_id, num_envs=settings.num_envs, seed=seed, **options
        )
        spec = envpool.make_spec(task_id, **options)
        self._network = _ActorCritic(int(spec.gymnasium_action_space.n))
        self._apply: Callable[..., Any] = self._network.apply
        self._frames = spec.gymnasium_observation_space.shape
        self._optimizer = optax.chain(
            optax.clip_by_global_norm(0.0625), optax.rmsprop(6e-4, decay=0.99, eps=1.6e-5)
        )
        self._update = jax.jit(self._learn)
        self._act = jax.jit(self._acts)
        self._stack = jax.jit(lambda rollout: _Rollout(*map(jnp.stack, rollout)))
        self._rollouts: queue.Queue[Any] = queue.Queue(1)
        self._params: queue.Queue[Any] = queue.Queue(1)
        self._ended = threading.Event()

    @property
    def steps_per_update(self) -> int:
        """Agent steps of one update."""
        return self.settings.num_envs * self.settings.rollout_length

    def init(self, seed: int) -> State:
        """Starts the actor, and returns the state before the first update."""
        init_key, act_key = jax.random.split(jax.random.key(seed))
        params = self._network.init(init_key, jnp.zeros((1, *self._frames), jnp.uint8))
        self._params.put(params)
        self._thread = threading.Thread(target=self._actor, args=(seed, act_key), daemon=True)
        self._thread.start()
        return State(params, self._optimizer.init(params))

    def step(self, state: State, num_updates: int):
        """Takes `num_updates` updates; returns the state and the last loss."""
        for _ in range(num_updates):
            rollout = self._rollouts.get(timeout=_WAIT)
            if isinstance(rollout, Exception):
                raise rollout
            state, loss = self._update(state, rollout)
            jax.block_until_ready(state)
            self._params.put(state.params)
        return state, loss

    def close(self) -> None:
        """Ends the actor."""
        self._ended.set()
        while self._thread.is_alive():  # it may wait for either queue
            with contextlib.suppress(queue.Empty):
                self._rollouts.get_nowait()
            with contextlib.suppress(queue.Full):
                self._params.put_nowait(None)
            self._thread.join(0.05)

    def _actor(self, seed: int, key: jax.Array) -> None:
        try:
            self._collect(self._make(seed), key)
        except Exception as error:  # the learner raises it
            self._rollouts.put(error)

    def _collect(self, envs, key) -> None:
        observation, _ = envs.reset()
        update, params = 0, None
        while not self._ended.is_set():
            update += 1
            # The second rollout does not wait: from then on the actor is one update ahead.
            if update != 2:
                params = self._params.get(timeout=_WAIT)
            if self._ended.is_set():
                return
            steps: list[list[Any]] = [[] for _ in _Rollout._fields]
            for _ in range(self.settings.rollout_length):
                on_device, action, logits, value, key = self._act(params, observation, key)
                observation, reward, terminated, truncated, info = envs.step(np.asarray(action))
                done, reset = terminated | truncated, info["elapsed_step"] == 0
                arrays = (on_device, action, logits, value, np.clip(reward, -1, 1), done, reset)
                for values, array in zip(steps, arrays):
                    values.append(array)
                if self._ended.is_set():
                    return
            steps[0].append(observation)
            self._rollouts.put(self._stack(steps), timeout=_WAIT)

    def _acts(self, params, observation, key):
        key, act_key = jax.random.split(key)
        logits, value = self._apply(params, observation)
        return observation, jax.random.categorical(act_key, logits), logits, value, key

    def _learn(self, state: State, rollout: _Rollout):
        loss, gradient = jax.value_and_grad(self._loss)(state.params, rollout)
        updates, optimizer_state = self._optimizer.update(gradient, state.optimizer_state)
        return State(optax.apply_updates(state.params, updates), optimizer_state), loss

    def _loss(self, params, rollout: _Rollout):
        s = self.settings
        frames = rollout.observation.reshape(-1, *self._frames)
        logits, values = self._apply(params, frames)
        shape = rollout.observation.shape[:2]
        logits, values = logits.reshape(*shape, -1)[:-1], values.reshape(shape)
        log_prob = _log_prob(logits, rollout.action)
        ratio = jnp.exp(log_prob - _log_prob(rollout.logits, rollout.action))
        returns = jax.vmap(rlax.vtrace_td_error_and_advantage, 1, 1)(
            jax.lax.stop_gradient(values[:-1]),
            jax.lax.stop_gradient(values[1:]),
            rollout.reward.astype(jnp.float32),
            s.gamma * (1.0 - rollout.done),
            jax.lax.stop_gradient(ratio),
        )
        target = jax.lax.stop_gradient(values[:-1]) + returns.errors
        log_probs = jax.nn.log_softmax(logits)
        entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
        total = s.value_cost * 0.5 * jnp.square(values[:-1] - target) - s.entropy_cost * entropy
        total -= log_prob * returns.pg_advantage
        return jnp.sum(total * ~rollout.reset) / jnp.maximum(jnp.sum(~rollout.reset), 1)


def _log_prob(logits, action):
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], -1)[..., 0]
