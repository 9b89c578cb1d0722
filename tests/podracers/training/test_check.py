"""`check_environment` finds each fault, and reports it in one line."""

import dataclasses
import functools
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from podracers import environment, errors, types
from podracers.training import check

_noise = np.random.default_rng(0)


class State(NamedTuple):
    """A clock, and a key: states may hold typed keys."""

    time: Any
    key: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Good:
    """Five steps of nothing, masked; each subclass spoils one thing."""

    @property
    def spec(self):
        return environment.EnvironmentSpec("Good", self.observation_spec(), self.action_spec(), 5)

    def observation_spec(self):
        mask = specs.Array((3,), np.bool_)
        return {"x": specs.BoundedArray((4,), np.float32, -1.0, 1.0), "action_mask": mask}

    def action_spec(self):
        return specs.DiscreteArray(3)

    def observe(self, time):
        del time
        return {"x": jnp.zeros((4,)), "action_mask": jnp.array([True, False, True])}

    def reset(self, key):
        state = State(jnp.int32(0), key)
        return state, types.restart(self.observe(state.time))

    def step(self, state, action):
        del action
        state = State(state.time + 1, jax.random.fold_in(state.key, 1))
        terminated = state.time >= 5
        return state, types.transition(self.observe(state.time), 1.0, terminated)


def _spoil(method, **fields):
    """Returns a class whose `reset` or `step` returns a time step with other fields."""

    def spoilt(self, *arguments):
        state, timestep = getattr(Good, method)(self, *arguments)
        return state, timestep._replace(**{k: f(timestep) for k, f in fields.items()})

    return _with(**{method: spoilt})


_spoil_reset = functools.partial(_spoil, "reset")
_spoil_step = functools.partial(_spoil, "step")


def _with(**members):
    """Returns a class with some members replaced."""
    return type("Spoilt", (Good,), members)


def _raise(message):
    raise RuntimeError(message)


def _grow(self, state, action):
    state, timestep = Good.step(self, state, action)
    return {"time": state.time}, timestep


def _widen(self, state, action):
    state, timestep = Good.step(self, state, action)
    return state._replace(time=state.time.astype(jnp.float32)), timestep


def _branch(self, state, action):
    return Good.step(self, state, action) if action > 1 else Good.step(self, state, 0)


def _masked(mask):
    return lambda self, time: {"x": jnp.zeros((4,)), "action_mask": jnp.array(mask)}


def _multi_discrete(mask):
    return {
        "observation_spec": lambda self: {"action_mask": specs.Array((2, 3), np.bool_)},
        "action_spec": lambda self: specs.BoundedArray((2,), np.int32, 0, np.array([1, 2])),
        "observe": lambda self, time: {"action_mask": jnp.array(mask)},
    }


def _host_noise(self, time):
    noise = jax.ShapeDtypeStruct((4,), np.float32)
    x = jax.pure_callback(lambda: _noise.uniform(size=4).astype(np.float32), noise)
    return {"x": x, "action_mask": jnp.array([True, False, True])}


FAULTS = {
    "spec raises": (
        _with(spec=property(lambda self: _raise("no spec today"))),
        "spec raises RuntimeError: no spec today",
    ),
    "spec of another type": (_with(spec=3), "spec is a int, not a podracers EnvironmentSpec"),
    "observation spec": (
        _with(observation_spec=lambda self: {"x": (4,)}),
        "spec.observation['x'] is a tuple, not a dm_env.specs.Array",
    ),
    "float64": (
        _with(observation_spec=lambda self: specs.Array((4,), np.float64)),
        "spec.observation has dtype float64",
    ),
    "action kind": (
        _with(action_spec=lambda self: specs.Array((), np.int32)),
        "spec.action is a Array; supported are",
    ),
    "action bounds": (
        _with(action_spec=lambda self: specs.BoundedArray((2,), np.float32, -1.0, np.inf)),
        "spec.action has infinite bounds",
    ),
    "action minimum": (
        _with(action_spec=lambda self: specs.BoundedArray((2,), np.int32, 1, 3)),
        "spec.action has minimum 1: parts count from 0",
    ),
    "mask spec": (
        _with(action_spec=lambda self: specs.DiscreteArray(4)),
        "spec.observation['action_mask'] must be (4,) bool, not (3,) bool",
    ),
    "reset raises": (
        _with(reset=lambda self, key: _raise("boom\nand more")),
        "reset cannot be traced by JAX: RuntimeError: boom",
    ),
    "reset returns one thing": (
        _with(reset=lambda self, key: types.restart(jnp.zeros((4,)))),
        "reset returns a TimeStep, not a pair (state, TimeStep)",
    ),
    "step returns something else": (
        _with(step=lambda self, state, action: (state, jnp.zeros((4,)))),
        "where a podracers TimeStep belongs",
    ),
    "step branches": (_with(step=_branch), "step cannot be traced by JAX: TracerBoolConversion"),
    "observation shape": (
        _spoil_step(observation=lambda t: {**t.observation, "x": jnp.zeros((5,))}),
        "observation['x']: expected (4,) float32, step returned (5,) float32",
    ),
    "observation dtype": (
        _spoil_reset(observation=lambda t: {**t.observation, "x": jnp.zeros((4,), jnp.int32)}),
        "observation['x']: expected (4,) float32, reset returned (4,) int32",
    ),
    "observation structure": (
        _spoil_step(observation=lambda t: t.observation["x"]),
        "observation: expected the structure {'action_mask': *, 'x': *}, step returned *",
    ),
    "reward dtype": (
        _spoil_step(reward=lambda t: t.reward.astype(jnp.int32)),
        "reward: expected () float32, step returned () int32",
    ),
    "step type dtype": (
        _spoil_reset(step_type=lambda t: t.step_type.astype(jnp.int32)),
        "step_type: expected () int8, reset returned () int32",
    ),
    "state structure": (_with(step=_grow), "state: reset returned the structure"),
    "state dtype": (
        _with(step=_widen),
        "state.time: reset returned () int32, step returned () float32",
    ),
    "host randomness": (
        _with(observe=_host_noise),
        "the same keys and actions gave two different rollouts",
    ),
    "reset is not FIRST": (
        _spoil_reset(step_type=lambda t: jnp.int8(types.MID)),
        "reset returned a step_type other than FIRST",
    ),
    "reward at FIRST": (
        _spoil_reset(reward=lambda t: jnp.float32(1.0)),
        "reset returned a reward other than 0",
    ),
    "step returns FIRST": (
        _spoil_step(
            step_type=lambda t: jnp.where(t.last(), t.step_type, types.FIRST).astype(jnp.int8)
        ),
        "step returned a step_type other than MID or LAST",
    ),
    "discount at LAST": (
        _spoil_step(discount=lambda t: jnp.where(t.last(), 0.9, 1.0)),
        "a LAST time step has a discount other than 0 (terminated) or 1 (truncated)",
    ),
    "discount at MID": (
        _spoil_step(discount=lambda t: t.discount * 0.99),
        "a time step other than LAST has a discount other than 1",
    ),
    "NaN reward": (_spoil_step(reward=lambda t: t.reward * jnp.nan), "reward is NaN or infinite"),
    "NaN observation": (
        _spoil_step(observation=lambda t: {**t.observation, "x": jnp.full((4,), jnp.nan)}),
        "observation['x'] is NaN or infinite",
    ),
    "observation bounds": (
        _spoil_step(observation=lambda t: {**t.observation, "x": jnp.full((4,), 2.0)}),
        "observation['x'] leaves the bounds of its spec",
    ),
    "no legal action": (
        _with(observe=_masked([False, False, False])),
        "an action_mask has no legal action",
    ),
    "mask beyond the action": (
        _with(**_multi_discrete([[True, True, True], [True, True, True]])),
        "an action_mask allows a value beyond spec.action",
    ),
    "never ends": (
        _spoil_step(step_type=lambda t: jnp.int8(types.MID), discount=lambda t: jnp.float32(1.0)),
        "an episode goes on after spec.max_episode_steps = 5",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_alone_and_in_one_line(fault):
    spoilt, expected = FAULTS[fault]
    with pytest.raises(errors.UserError) as caught:
        check.check_environment(spoilt(), num_steps=20)
    message = str(caught.value)
    assert message.startswith("environment Spoilt has 1 fault: "), message
    assert expected in message
    assert "\n" not in message


def test_several_faults_are_listed_together():
    spoilt = _spoil_reset(
        reward=lambda t: jnp.float32(1.0), step_type=lambda t: jnp.int8(types.MID)
    )
    with pytest.raises(errors.UserError, match=r"2 faults: .*reward .*; .*FIRST"):
        check.check_environment(spoilt, num_steps=1)


def test_good_environments_pass():
    check.check_environment(Good(), num_steps=20)
    check.check_environment(Good, num_steps=20)
    good = _with(**_multi_discrete([[True, True, False], [True, True, True]]))
    check.check_environment(good, num_steps=20)
    # The action at LAST is ignored: a mask may be empty there.
    empty_at_last = _with(
        observe=lambda self, time: {
            "x": jnp.zeros((4,)),
            "action_mask": jnp.broadcast_to(time < 5, (3,)),
        }
    )
    check.check_environment(empty_at_last, num_steps=20)


class Needy(Good):
    def __init__(self, level):
        self.level = level


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        (3, "int is not an environment: it has no spec, no"),
        (None, "NoneType is not an environment"),
        (gymnasium.make("CartPole-v1"), "looks like a Gym environment"),
        (Needy, "Needy cannot be made without arguments.*level"),
    ],
)
def test_refuses_other_objects(candidate, message):
    with pytest.raises(errors.UserError, match=message):
        check.check_environment(candidate)


@pytest.mark.parametrize(
    ("action", "observation", "expected"),
    [
        (specs.DiscreteArray(3), {"action_mask": np.array([True, False, True])}, {0, 2}),
        (specs.DiscreteArray(3), np.zeros((2,)), {0, 1, 2}),
        (
            specs.BoundedArray((2,), np.int32, 0, np.array([1, 2])),
            {"action_mask": np.array([[True, True, False], [False, True, True]])},
            {(0, 1), (0, 2), (1, 1), (1, 2)},
        ),
    ],
)
def test_random_actions_cover_what_is_legal(action, observation, expected):
    keys = jax.random.split(jax.random.key(0), 400)
    drawn = jax.vmap(lambda key: check.random_action(action, observation, key))(keys)
    assert drawn.dtype == action.dtype
    values, counts = np.unique(np.asarray(drawn), axis=0, return_counts=True)
    assert {tuple(v) if action.shape else int(v) for v in values} == expected
    assert counts.min() > 0.7 * 400 / len(expected)


def test_random_continuous_actions_fill_the_bounds():
    low, high = np.array([-1.0, 2.0], np.float32), np.array([0.0, 6.0], np.float32)
    action = specs.BoundedArray((2,), np.float32, low, high)
    keys = jax.random.split(jax.random.key(0), 1000)
    drawn = np.asarray(jax.vmap(lambda key: check.random_action(action, None, key))(keys))
    np.testing.assert_allclose(drawn.min(0), low, atol=0.05)
    np.testing.assert_allclose(drawn.max(0), high, atol=0.05)
