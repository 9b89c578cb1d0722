"""Delayed chains: the first action decides, and each variant is observed as documented."""

import functools

import jax
import numpy as np
import pytest

from environments.meta import delayed_chains
from podracers import tasks
from tests import streams


@functools.cache
def _compiled(variant):
    """Returns the parameters of a chain, its reset and its step."""
    family = delayed_chains.DelayedChains((variant,))
    return jax.jit(family.sample)(jax.random.key(0)), jax.jit(family.reset), jax.jit(family.step)


def _episode(variant, actions, key=0, **params):
    """Returns the last state and the time steps of one episode in a chain of `params`."""
    sampled, reset, step = _compiled(variant)
    params = sampled._replace(length=np.int32(len(actions)), **jax.tree.map(np.int32, params))
    state, timestep = reset(params, jax.random.key(key))
    timesteps = [timestep]
    for action in actions:
        state, timestep = step(params, state, np.int32(action))
        timesteps.append(timestep)
    return jax.device_get((state, timesteps))


@pytest.mark.parametrize("right", [0, 1])
@pytest.mark.parametrize("first", [0, 1])
def test_the_first_action_decides(right, first):
    for others in ([0, 0, 0, 0], [1, 0, 1, 1]):
        _, timesteps = _episode("short", [first, *others], right=right)
        rewards = [float(t.reward) for t in timesteps]
        assert rewards == [0, 0, 0, 0, 0, 1.0 if first == right else -1.0]
        assert [bool(t.last()) for t in timesteps] == 5 * [False] + [True]
        assert timesteps[-1].terminated()
        rows = [t.observation[tasks.ROWS].tolist() for t in timesteps]
        assert rows == [[0]] + [[2 * t - 1 + first] for t in range(1, 6)]


def test_intermediate_rewards_of_noisy_chains_are_one_or_minus_one():
    episodes = [_episode("short_noisy", [0] * 30, key, right=0)[1] for key in range(4)]
    rewards = np.array([[t.reward for t in timesteps] for timesteps in episodes])
    assert set(rewards[:, 1:-1].ravel()) == {-1.0, 1.0}
    assert abs(rewards[:, 1:-1].mean()) < 0.4
    assert set(rewards[:, -1]) == {1.0} and set(rewards[:, 0]) == {0.0}


def test_a_distractor_chain_shows_the_correct_action():
    rights, noise = set(), []
    for key in range(12):
        state, timesteps = _episode("distractor", [0] * 6, key)
        rows = np.array([t.observation[tasks.ROWS] for t in timesteps])  # [7, 22]
        bits = rows - 2 * np.arange(22)
        assert set(bits.ravel()) <= {0, 1}
        is_zero = int(state.right) == 0
        assert (bits[:, 0] == is_zero).all()
        assert bits[:, 1].tolist() == [0] + 6 * [int(is_zero)]
        assert float(timesteps[-1].reward) == (1.0 if is_zero else -1.0)
        rights.add(is_zero)
        noise.append(bits[:, 2:])
    assert rights == {True, False}
    assert 0.4 < np.mean(noise) < 0.6


def test_lengths_and_right_actions_vary_with_the_task():
    family = delayed_chains.DelayedChains()
    keys = jax.random.split(jax.random.key(0), 2000)
    params = streams.evaluate(jax.vmap(family.sample), keys)
    assert set(params.right) == {0, 1}
    for task, name in enumerate(family.variants):
        lengths = params.length[params.task == task]
        assert (lengths.min(), lengths.max()) == ((5, 50) if name[:4] == "long" else (5, 30))
