"""LPG in one file with one-hot observations: the straightforward version that we measure against.

The arithmetic of `agents.meta.lpg` on the same lifetimes, written as
https://github.com/EmptyJackson/groove writes it: observations are vectors with ones, policy,
prediction and critic are dense layers without bias, and the meta-gradient is taken through acting
and learning at once. There is no bandit. Nothing imports it but `scripts/benchmark.py`.
Axes: `L` lifetimes, `E` environments of each, `T` steps of each of `K` updates, `S` states.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import rlax

_T, _K, _GAMMA, _LAMBDA = 20, 5, 0.995, 0.95
_LEARNING_RATE, _PREDICTION_COST, _CRITIC_STEP_SIZE = 40.0, 0.5, 0.5  # of an agent
_COSTS = (-0.01, -0.001, 0.001, 0.001)  # entropies of policy and prediction, squares of targets


class _Rule(nn.Module):
    hidden_size: int
    prediction_size: int

    @nn.compact
    def __call__(self, reward, discount, last, action_prob, now, later):
        embed = nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(1)])
        now, later = embed(now)[..., 0], embed(later)[..., 0] * discount
        gamma = jnp.full_like(now, _GAMMA)
        features = jnp.stack([reward, last, gamma, action_prob, now, later], axis=-1)
        cell = nn.OptimizedLSTMCell(self.hidden_size)

        def step(cell, carry, x):
            features, last = x
            carry = jax.tree.map(lambda c: jnp.where(last[:, None] > 0, 0.0, c), carry)
            return cell(carry, features)

        carry = cell.initialize_carry(jax.random.key(0), features[0].shape)
        scan = nn.scan(
            step, variable_broadcast="params", split_rngs={"params": False}, reverse=True
        )
        hidden = nn.relu(scan(cell, carry, (features, last))[1])
        log_target = jax.nn.log_softmax(nn.Dense(self.prediction_size)(hidden))
        return nn.Dense(1)(hidden)[..., 0], log_target


class _Lifetime(NamedTuple):
    kernels: tuple[jax.Array, jax.Array]  # [S, A] of the policy, [S, m] of the prediction
    critic: jax.Array  # [S]
    environment: Any
    timestep: Any


class _State(NamedTuple):
    params: Any  # of the rule
    optimizer_state: Any
    lifetimes: _Lifetime  # [L, ...]
    key: jax.Array


class SingleFileLPG:
    """The whole algorithm on one device, for `L` lifetimes of `environments.meta.lifetimes`."""

    def __init__(self, environment, num_lifetimes, hidden_size=256, prediction_size=30):
        self._environment, self._rule = environment, _Rule(hidden_size, prediction_size)
        self._optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-4))
        self._num_lifetimes, self._prediction_size = num_lifetimes, prediction_size
        self._num_states = int(environment.spec.observation["rows"].maximum)
        self.steps_per_update = num_lifetimes * _T * (_K + 1)
        self.run = jax.jit(self._updates, donate_argnums=0)

    def init(self, seed: int) -> _State:
        """Returns the state before the first update."""
        key, rule_key, birth_key = jax.random.split(jax.random.key(seed), 3)
        zeros, y = jnp.zeros((1, 1)), jnp.zeros((1, 1, self._prediction_size))
        params = self._rule.init(rule_key, zeros, zeros, zeros, zeros, y, y)
        lifetimes = jax.vmap(self._birth)(jax.random.split(birth_key, self._num_lifetimes))
        return _State(params, self._optimizer.init(params), lifetimes, key)

    def step(self, state: _State, num_updates: int):
        """Takes `num_updates` updates in one dispatch; `state` is donated."""
        return self.run(state, jnp.asarray(num_updates))

    def _updates(self, state: _State, num_updates):
        return jax.lax.fori_loop(
            0, num_updates, lambda _, carry: self._update(carry[0]), (state, jnp.zeros(()))
        )

    def _birth(self, key) -> _Lifetime:
        environment, timestep = self._environment.reset(key)
        sizes = (timestep.observation["action_mask"].shape[-1], self._prediction_size)
        kernels = tuple(jnp.zeros((self._num_states, size)) for size in sizes)
        return _Lifetime(kernels, jnp.zeros(self._num_states), environment, timestep)

    def _moment(self, timestep) -> dict[str, jax.Array]:
        shown = timestep.observation
        zeros = jnp.zeros(self._num_states)
        vectors = jax.vmap(lambda rows: zeros.at[rows].set(1.0, mode="drop"))(shown["rows"])
        last = (shown["step_type"] == 2).astype(jnp.float32)
        names = ("action_mask", "reward", "discount")
        return {name: shown[name] for name in names} | {"vector": vectors, "last": last}

    def _say(self, kernels, moment):
        """Returns the logarithms of policy and prediction."""
        policy, prediction = (moment["vector"] @ kernel for kernel in kernels)
        policy = jnp.where(moment["action_mask"], policy, -1e9)
        return jax.nn.log_softmax(policy), jax.nn.log_softmax(prediction)

    def _act(self, lifetime: _Lifetime, key):
        """Acts `T` steps; learns values. Returns moments `[T + 1, E]`, actions and advantages."""

        def step(carry, key):
            moment = self._moment(carry[1])
            log_policy, _ = self._say(jax.lax.stop_gradient(lifetime.kernels), moment)
            action = jax.random.categorical(key, log_policy)
            return self._environment.step(carry[0], action), (moment, action)

        start = (lifetime.environment, lifetime.timestep)
        end, (moments, action) = jax.lax.scan(step, start, jax.random.split(key, _T))
        after = self._moment(end[1])
        moments = jax.tree.map(lambda xs, x: jnp.concatenate([xs, x[None]]), moments, after)
        now, later, weight = _split(moments)
        values = moments["vector"] @ lifetime.critic

        advantage = jax.vmap(rlax.truncated_generalized_advantage_estimation, 1, 1)(
            later["reward"], _GAMMA * later["discount"], _LAMBDA * (1.0 - later["last"]), values
        )
        share = weight * advantage / jnp.maximum(now["vector"].sum(-1), 1.0)
        error, count = (jnp.einsum("tes,te->s", now["vector"], x) for x in (share, weight))
        critic = lifetime.critic + _CRITIC_STEP_SIZE * error / jnp.maximum(count, 1.0)
        return _Lifetime(lifetime.kernels, critic, *end), moments, action, advantage

    def _learn(self, params, kernels, moments, action):
        """Returns the kernels after an update, and the means that the meta-loss weighs."""
        now, later, weight = _split(moments)
        weight /= jnp.maximum(jnp.sum(weight), 1.0)
        log_policy, log_y = self._say(kernels, moments)
        arrival = (later["reward"], later["discount"], later["last"])
        prob, y = jnp.exp(_chosen(log_policy[:-1], action)), jnp.exp(log_y)
        target, log_target = self._rule.apply(params, *arrival, prob, y[:-1], y[1:])

        def loss(kernels):
            log_policy, log_y = self._say(kernels, now)
            divergence = jnp.sum(jnp.exp(log_y) * (log_y - log_target), axis=-1)
            each = _PREDICTION_COST * divergence - _chosen(log_policy, action) * target
            return jnp.sum(weight * each)

        gradient = jax.grad(loss)(kernels)
        squares = (jnp.square(target), jnp.sum(jnp.exp(2.0 * log_target), axis=-1))
        entropies = (_entropy(log_policy[:-1]), _entropy(log_y[:-1]))
        means = [jnp.sum(weight * x) for x in (*entropies, *squares)]
        return jax.tree.map(lambda x, g: x - _LEARNING_RATE * g, kernels, gradient), means

    def _lifetime_loss(self, params, lifetime: _Lifetime, key):
        """Returns the meta-loss of one lifetime, and the lifetime after it."""

        def update(lifetime, key):
            lifetime, moments, action, _ = self._act(lifetime, key)
            kernels, means = self._learn(params, lifetime.kernels, moments, action)
            return lifetime._replace(kernels=kernels), means

        keys = jax.random.split(key, _K + 1)
        lifetime, means = jax.lax.scan(update, lifetime, keys[1:])
        lifetime, moments, action, advantage = self._act(lifetime, keys[0])
        now, _, weight = _split(moments)
        weight /= jnp.maximum(jnp.sum(weight), 1.0)
        said = self._say(lifetime.kernels, now)
        final = [jnp.sum(weight * _entropy(log_probs)) for log_probs in said]
        means[:2] = [jnp.append(x, y) for x, y in zip(means, final)]
        loss = -jnp.sum(weight * _chosen(said[0], action) * advantage)
        return loss + sum(cost * jnp.mean(x) for cost, x in zip(_COSTS, means)), lifetime

    def _update(self, state: _State):
        key, *keys = jax.random.split(state.key, 3)
        act_keys, birth_keys = (jax.random.split(k, self._num_lifetimes) for k in keys)

        def meta_loss(params):
            each = jax.vmap(self._lifetime_loss, (None, 0, 0))
            losses, lifetimes = each(params, state.lifetimes, act_keys)
            return jnp.mean(losses), lifetimes

        (loss, old), gradient = jax.value_and_grad(meta_loss, has_aux=True)(state.params)
        updates, optimizer_state = self._optimizer.update(gradient, state.optimizer_state)
        params = optax.apply_updates(state.params, updates)
        newborn, ended = jax.vmap(self._birth)(birth_keys), old.timestep.last()

        def select(x, y):
            return jnp.where(ended.reshape(ended.shape + (1,) * (x.ndim - 1)), x, y)

        return _State(params, optimizer_state, jax.tree.map(select, newborn, old), key), loss


def _split(moments):
    """Returns where actions were chosen, where they led, and 0 where they were ignored."""
    now, later = (jax.tree.map(lambda x: x[:-1], moments), jax.tree.map(lambda x: x[1:], moments))
    return now, later, 1.0 - now["last"]


def _chosen(log_probs, action):
    return jnp.take_along_axis(log_probs, action[..., None], axis=-1)[..., 0]


def _entropy(log_probs):
    return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
