"""Targets of agents that search, against a slow loop.

Axis legend: `T` time, `N` sequences, `K` imagined steps, `A` actions.
"""

import jax
import numpy as np
import pytest

from agents import planning
from podracers import types
from tests.agents import experience

GAMMA = 0.9
LENGTH, SEQUENCES, ACTIONS = 40, 64, 3


def _stream(seed):
    """Returns time steps and extras, `[T, N]`."""
    random = np.random.default_rng(seed)
    shape = (LENGTH, SEQUENCES)
    policy = random.dirichlet(np.ones(ACTIONS), shape).astype(np.float32)
    value = random.normal(size=shape).astype(np.float32)
    return experience.random_episodes(seed, shape), planning.Extras(policy, value)


def _slow(timestep, extras, row, k_steps, n_steps):
    """Returns lists of `(weight, value)` for values, rewards and policies of one sequence."""
    reward, discount, kind = (x[:, row] for x in timestep[1:])
    end = next((t for t in range(len(kind)) if kind[t] == types.LAST), None)
    values, rewards, policies = [], [], []
    for k in range(k_steps + 1):
        over = end is not None and k >= end
        absorbed = over and discount[end] == 0 and end > 0
        policies.append((0.0 if over else 1.0, extras.policy[k, row]))
        if k:  # the reward on arriving at k
            arrived = end is None or (k <= end and end > 0)
            after = not arrived and discount[end] == 0 and end > 0
            rewards.append((float(arrived or after), reward[k] if arrived else 0.0))
        if over:
            values.append((float(absorbed), 0.0))
            continue
        total, factor = 0.0, 1.0
        for t in range(k + 1, k + n_steps + 1):
            total += factor * reward[t]
            factor *= GAMMA * discount[t]
            if kind[t] == types.LAST:
                break
        values.append((1.0, total + factor * extras.value[t, row]))
    return values, rewards, policies


@pytest.mark.parametrize(("k_steps", "n_steps"), [(5, 3), (2, 8), (0, 4)])
def test_targets_are_those_of_a_slow_loop(k_steps, n_steps):
    timestep, extras = _stream(seed=k_steps)
    cut = slice(0, k_steps + n_steps + 1)
    timestep, extras = jax.tree.map(lambda x: x[cut], (timestep, extras))
    targets = jax.jit(planning.targets, static_argnums=(3, 4))
    found = jax.device_get(targets(timestep, extras, GAMMA, k_steps, n_steps))
    counted = 0
    for row in range(SEQUENCES):
        values, rewards, policies = _slow(timestep, extras, row, k_steps, n_steps)
        for k, (weight, value) in enumerate(values):
            assert found.value_weight[k, row] == weight, (row, k)
            if weight:
                np.testing.assert_allclose(found.value[k, row], value, rtol=1e-4, atol=1e-5)
        for k, (weight, reward) in enumerate(rewards):
            assert found.reward_weight[k, row] == weight, (row, k)
            if weight:
                np.testing.assert_allclose(found.reward[k, row], reward, rtol=1e-6)
        for k, (weight, policy) in enumerate(policies):
            assert found.policy_weight[k, row] == weight, (row, k)
            np.testing.assert_array_equal(found.policy[k, row], policy)
        counted += sum(weight for weight, _ in values)
    assert 0.3 * SEQUENCES * (k_steps + 1) < counted
