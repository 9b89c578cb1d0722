"""Values and returns of probes are those of the best of all plans."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from environments import probes
from podracers import types
from tests import streams

GAMMA = 0.9
DISCRETE = (
    probes.ConstantReward,
    probes.ObservationReward,
    probes.ActionReward,
    probes.ObservationActionReward,
    probes.DelayedReward,
    probes.MaskedAction,
    probes.MultiDiscreteReward,
    probes.Memory,
    probes.Reporting,
)


def _actions(spec, observation):
    """Returns every legal action at an observation, as a list of arrays."""
    sizes = np.broadcast_to(np.asarray(spec.action.maximum) + 1, spec.action.shape)
    actions = [np.array(a, np.int32) for a in itertools.product(*map(range, np.atleast_1d(sizes)))]
    if not spec.action.shape:
        actions = [action[0] for action in actions]
        if isinstance(observation, dict):
            actions = [action for action in actions if observation["action_mask"][action]]
    return actions


def _best(step, spec, state, observation):
    """Returns the best discounted and undiscounted returns from a state, over all plans."""
    discounted, plain = [], []
    for action in _actions(spec, observation):
        following, timestep = step(state, action)
        one = two = 0.0
        if not timestep.last():
            one, two = _best(step, spec, following, timestep.observation)
        discounted.append(float(timestep.reward) + GAMMA * one)
        plain.append(float(timestep.reward) + two)
    return max(discounted), max(plain)


@pytest.mark.parametrize("probe", DISCRETE)
def test_values_and_returns_are_those_of_the_best_plan(probe):
    candidate = probe()
    reset, step = jax.jit(candidate.reset), jax.jit(candidate.step)
    known = jax.tree.leaves(candidate.observations())[0]
    value = candidate.value(GAMMA)
    assert value.shape == (len(known),)
    returns = {}
    for seed in range(40):
        state, timestep = reset(jax.random.key(seed))
        seen = np.asarray(jax.tree.leaves(timestep.observation)[0])
        (row,) = np.flatnonzero([np.array_equal(seen, one) for one in known])
        if row in returns:
            continue
        best, returns[row] = _best(step, candidate.spec, state, timestep.observation)
        np.testing.assert_allclose(value[row], best, rtol=1e-6)
    np.testing.assert_allclose(np.mean(list(returns.values())), candidate.optimal_return)


def test_the_illegal_action_has_the_highest_reward():
    probe = probes.MaskedAction()
    for cue in range(3):
        state = probes.State(jnp.int32(cue), jnp.int32(0))
        _, timestep = streams.evaluate(jax.vmap(probe.step, (None, 0)), state, np.arange(3))
        assert np.argmax(timestep.reward) == cue
        assert timestep.reward[cue] == probe.illegal_reward > 5 * probe.value(0.9).max()
        mask = probe.observations()["action_mask"][cue]
        np.testing.assert_array_equal(mask, np.arange(3) != cue)


def test_memory_shows_its_cue_once():
    probe = probes.Memory(length=3)
    start = probes.State(jnp.arange(2), jnp.zeros(2, jnp.int32))
    _, timestep = jax.lax.scan(jax.vmap(probe.step), start, jnp.zeros((3, 2), jnp.int32))
    for cue in range(2):
        np.testing.assert_array_equal(timestep.observation[:, cue], [[0, 0], [0, 1], [0, 0]])
    assert np.all(timestep.step_type[-1] == types.LAST)
    np.testing.assert_array_equal(timestep.reward[-1], [1.0, -1.0])
    with pytest.raises(ValueError, match="length"):
        probes.Memory(length=1)


@pytest.mark.parametrize("length", [2, 4])
def test_a_bandit_pays_only_with_the_previous_reward(length):
    probe = probes.Bandit(length)

    def total(cue, plan):
        _, timestep = jax.lax.scan(probe.step, probes.State(cue, jnp.int32(0)), plan)
        return jnp.sum(timestep.reward), timestep.observation

    plans = np.array(list(itertools.product(range(2), repeat=length)))
    totals = jax.vmap(jax.vmap(total, (None, 0)), (0, None))
    returns, seen = streams.evaluate(totals, np.arange(2, dtype=np.int32), plans)
    # Observations are constant, so that a policy without the reward is a mixture of plans.
    np.testing.assert_array_equal(seen, 1.0)
    np.testing.assert_array_equal(np.mean(returns, axis=0), probe.return_without_inputs)
    # The reward of the first action shows which plan is the best.
    best = np.asarray(returns)[:, plans[:, 0] == 0].max(axis=1)
    assert np.mean(best) == probe.optimal_return == length - 1
