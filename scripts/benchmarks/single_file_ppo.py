"""PPO in one file in the common pure-JAX form: the straightforward version that we measure against.

The same arithmetic as `agents.ppo` on `environments.cartpole`: two tanh layers of 64 for the policy
and as many for the value, GAE, a shuffle of the whole batch for each epoch, Adam. It is written as
such files usually are: Flax layers, one scan inside another, every lane reset at every step, one
device. It is no part of the library; nothing imports it but `scripts/benchmark.py`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


class Settings(NamedTuple):
    """Of the run; the defaults are those of the benchmark."""

    num_envs: int = 64
    rollout_length: int = 128
    epochs: int = 4
    num_minibatches: int = 4
    learning_rate: float = 2.5e-4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_epsilon: float = 0.2
    value_cost: float = 0.5
    entropy_cost: float = 0.01
    max_grad_norm: float = 0.5


class _ActorCritic(nn.Module):
    num_actions: int

    @nn.compact
    def __call__(self, x):
        def tower(outputs, scale):
            hidden = x.reshape(x.shape[0], -1)
            for _ in range(2):
                layer = nn.Dense(64, kernel_init=nn.initializers.orthogonal(2**0.5))
                hidden = nn.tanh(layer(hidden))
            return nn.Dense(outputs, kernel_init=nn.initializers.orthogonal(scale))(hidden)

        return tower(self.num_actions, 0.01), tower(1, 1.0)[..., 0]


class _Transition(NamedTuple):
    observation: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array
    done: jax.Array


class State(NamedTuple):
    """Of the whole run."""

    params: Any
    optimizer_state: Any
    environment: Any
    observation: jax.Array
    key: jax.Array


class SingleFilePPO:
    """The whole algorithm, on one device.

    Args:
      environment: with a discrete action and an array observation.
    """

    settings = Settings()

    def __init__(self, environment):
        self._environment = environment
        self._network = _ActorCritic(int(environment.spec.action.num_values))
        self._apply: Callable[..., Any] = self._network.apply
        self._optimizer = optax.chain(
            optax.clip_by_global_norm(self.settings.max_grad_norm),
            optax.adam(self.settings.learning_rate, eps=1e-5),
        )
        self._run = jax.jit(self._updates, donate_argnums=0)

    @property
    def steps_per_update(self) -> int:
        """Agent steps of one update."""
        return self.settings.num_envs * self.settings.rollout_length

    def init(self, seed: int) -> State:
        """Returns the state before the first update."""
        key, reset_key, init_key = jax.random.split(jax.random.key(seed), 3)
        reset_keys = jax.random.split(reset_key, self.settings.num_envs)
        environment, timestep = jax.vmap(self._environment.reset)(reset_keys)
        params = self._network.init(init_key, timestep.observation)
        return State(params, self._optimizer.init(params), environment, timestep.observation, key)

    def step(self, state: State, num_updates: int):
        """Takes `num_updates` updates in one dispatch; `state` is donated."""
        return self._run(state, jnp.asarray(num_updates))

    def _updates(self, state: State, num_updates):
        def body(_, carry):
            return self._update(carry[0])

        return jax.lax.fori_loop(0, num_updates, body, (state, jnp.zeros(())))

    def _act(self, state: State, _):
        key, action_key, reset_key = jax.random.split(state.key, 3)
        logits, value = self._apply(state.params, state.observation)
        action = jax.random.categorical(action_key, logits)
        log_prob = self._log_prob(logits, action)
        stepped = jax.vmap(self._environment.step)(state.environment, action)
        reset_keys = jax.random.split(reset_key, self.settings.num_envs)
        fresh = jax.vmap(self._environment.reset)(reset_keys)
        done = stepped[1].last()

        def select(x, y):
            return jnp.where(done.reshape(done.shape + (1,) * (x.ndim - 1)), x, y)

        environment = jax.tree.map(select, fresh[0], stepped[0])
        observation = select(fresh[1].observation, stepped[1].observation)
        transition = _Transition(
            state.observation, action, log_prob, value, stepped[1].reward, done
        )
        return state._replace(environment=environment, observation=observation, key=key), transition

    def _log_prob(self, logits, action):
        return jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], -1)[..., 0]

    def _advantages(self, batch: _Transition, last_value):
        s = self.settings

        def accumulate(carry, transition):
            advantage, next_value = carry
            alive = 1.0 - transition.done
            error = transition.reward + s.gamma * next_value * alive - transition.value
            advantage = error + s.gamma * s.gae_lambda * alive * advantage
            return (advantage, transition.value), advantage

        start = (jnp.zeros_like(last_value), last_value)
        return jax.lax.scan(accumulate, start, batch, reverse=True, unroll=16)[1]

    def _loss(self, params, minibatch):
        s = self.settings
        transition, advantage, target = minibatch
        logits, value = self._apply(params, transition.observation)
        log_probs = jax.nn.log_softmax(logits)
        ratio = jnp.exp(self._log_prob(logits, transition.action) - transition.log_prob)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        clipped = jnp.clip(ratio, 1.0 - s.clip_epsilon, 1.0 + s.clip_epsilon)
        policy_loss = -jnp.minimum(ratio * advantage, clipped * advantage).mean()
        value_loss = 0.5 * jnp.square(value - target).mean()
        entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1).mean()
        return policy_loss + s.value_cost * value_loss - s.entropy_cost * entropy

    def _update(self, state: State):
        s = self.settings
        state, batch = jax.lax.scan(self._act, state, None, length=s.rollout_length)
        _, last_value = self._apply(state.params, state.observation)
        advantage = self._advantages(batch, last_value)
        data = (batch, advantage, advantage + batch.value)
        data = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), data)

        def minibatch_step(carry, minibatch):
            params, optimizer_state = carry
            loss, gradient = jax.value_and_grad(self._loss)(params, minibatch)
            updates, optimizer_state = self._optimizer.update(gradient, optimizer_state)
            return (optax.apply_updates(params, updates), optimizer_state), loss

        def epoch(carry, key):
            permutation = jax.random.permutation(key, self.steps_per_update)
            minibatches = jax.tree.map(
                lambda x: x[permutation].reshape(s.num_minibatches, -1, *x.shape[1:]), data
            )
            return jax.lax.scan(minibatch_step, carry, minibatches)

        key, shuffle_key = jax.random.split(state.key)
        (params, optimizer_state), loss = jax.lax.scan(
            epoch, (state.params, state.optimizer_state), jax.random.split(shuffle_key, s.epochs)
        )
        state = state._replace(params=params, optimizer_state=optimizer_state, key=key)
        return state, loss.mean()
