"""`check_environment` finds each fault, and reports it in one line."""

import dataclasses
import random
import types as python_types
from typing import Any, ClassVar, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from environments import probes, wrappers
from podracers import contract, environment, errors, types


class State(NamedTuple):
    """A clock, and a key: states may hold typed keys."""

    time: Any
    key: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Good:
    """Five steps of nothing, masked; each subclass spoils one thing."""

    observed: ClassVar = {
        "x": specs.BoundedArray((4,), np.float32, -1.0, 1.0),
        "action_mask": specs.Array((3,), np.bool_),
    }
    action = specs.DiscreteArray(3)
    metrics = ()

    @property
    def spec(self):
        return environment.EnvironmentSpec(
            "Good", self.observed, self.action, 5, metrics=self.metrics
        )

    def observe(self, time):
        del time
        return {"x": jnp.zeros((4,)), "action_mask": jnp.array([True, False, True])}

    def reset(self, key):
        state = State(jnp.int32(0), key)
        return state, types.restart(self.observe(state.time))

    def step(self, state, action):
        del action
        state = State(state.time + 1, jax.random.fold_in(state.key, 1))
        return state, types.transition(self.observe(state.time), 1.0, state.time >= 5)


def _with(**members):
    """Returns an environment with some members replaced."""
    return type("Spoilt", (Good,), members)()


def _spoil(method, **fields):
    """Returns an environment whose `reset` or `step` returns other fields of the time step."""

    def spoilt(self, *arguments):
        state, timestep = getattr(Good, method)(self, *arguments)
        return state, timestep._replace(**{k: f(timestep) for k, f in fields.items()})

    return _with(**{method: spoilt})


def _widen(self, state, action):
    state, timestep = Good.step(self, state, action)
    return state._replace(time=state.time.astype(jnp.float32)), timestep


def _drawing(draw):
    """Returns an environment with a number of `draw()`, which knows no key, in its observation."""
    return _spoil("step", observation=lambda t: {**t.observation, "x": jnp.full((4,), draw())})


def _draw_in_callback():
    shape = jax.ShapeDtypeStruct((), np.float32)
    return jax.pure_callback(
        lambda: np.float32(np.random.random()), shape, vmap_method="sequential"
    )


def _jitted(good):
    """Returns a step that draws when it is compiled, which is once for each instance."""

    def step(state, action):
        state, timestep = Good.step(good, state, action)
        return state, timestep._replace(reward=timestep.reward * np.random.random())

    return jax.jit(step)


def _multi_discrete(mask):
    return _with(
        observed={"action_mask": specs.Array((2, 3), np.bool_)},
        action=specs.BoundedArray((2,), np.int32, 0, np.array([1, 2])),
        observe=lambda self, time: {"action_mask": jnp.array(mask)},
    )


def _with_x(x):
    return _spoil("step", observation=lambda t: {**t.observation, "x": x})


def _acting(low, high, shape=(2,), dtype=np.float32):
    return _with(action=specs.BoundedArray(shape, dtype, low, high))


def _stepping(result):
    return _with(step=lambda self, state, action: result(state))


def _reporting(**numbers):
    """Returns an environment of which `step` returns a number that `reset` returns as 0."""

    def reset(self, key):
        state, timestep = Good.reset(self, key)
        return state, timestep._replace(metrics=dict.fromkeys(numbers, jnp.float32(0.0)))

    def step(self, state, action):
        state, timestep = Good.step(self, state, action)
        metrics = {name: number(timestep) for name, number in numbers.items()}
        return state, timestep._replace(metrics=metrics)

    return _with(metrics=("success",), reset=reset, step=step)


def _agents(**fields):
    """Returns two agents whose `step` returns other fields of the time step."""

    def step(self, state, action):
        state, timestep = probes.TwoAgents.step(self, state, action)
        return state, timestep._replace(**{k: f(timestep) for k, f in fields.items()})

    return type("Spoilt", (probes.TwoAgents,), {"step": step, "__module__": __name__})()


_PLAIN = jnp.zeros((4,))


FAULTS = {
    "spec is a int": _with(spec=3),
    "spec.observation['x'] is a tuple": _with(observed={"x": (4,)}),
    "spec.observation has dtype float64": _with(observed=specs.Array((4,), np.float64)),
    "spec.action is a Array, supported are": _with(action=specs.Array((), np.int32)),
    "spec.action has dtype int64": _with(action=specs.DiscreteArray(3, np.int64)),
    "has bounds from -1 to inf in component [0]: expected finite ones": _acting(-1.0, np.inf),
    "from -3e+38 to 3e+38 in component [1]: their difference exceeds the range of float32": (
        _acting([-1.0, -3e38], [1.0, 3e38])
    ),
    "from 0.5 to 0.5 in component [0, 2]: leave it out": (
        _acting([[0.0, 0.0, 0.5]], [[1.0, 1.0, 0.5]], (1, 3))
    ),
    "spec.action has shape (2, 2)": _acting(0, 3, (2, 2), np.int32),
    "spec.action has minimum 1": _acting(1, 3, dtype=np.int32),
    "spec.observation['action_mask'] must be bool[4]": _with(action=specs.DiscreteArray(4)),
    "but the action is continuous": _acting(-1.0, 1.0),
    "spec.metrics is 'success', not a tuple of names": _with(metrics="success"),
    "spec.metrics has the empty name ' '": _with(metrics=("success", " ")),
    "spec.metrics has the name 'success' twice": _with(metrics=("success", "success")),
    "spec.metrics has the name 'length', which runners use": _with(metrics=("length",)),
    "spec.metrics has the name 'return/std', which runners use": _with(metrics=("return/std",)),
    "spec.metrics has the name 'greedy_x', which runners use": _with(metrics=("greedy_x",)),
    "step: leaf 'metrics/success': expected float32[], got int32[]": _reporting(
        success=lambda t: jnp.int32(1)
    ),
    "step: leaf 'metrics/x': expected none, got float32[]": _spoil(
        "step", metrics=lambda t: {"x": jnp.float32(1.0)}
    ),
    "the metric 'success' of a LAST time step is infinite": _reporting(
        success=lambda t: jnp.where(t.last(), jnp.inf, 1.0)
    ),
    "reset returned TimeStep, expected (state, TimeStep)": _with(
        reset=lambda self, key: types.restart(jnp.zeros((4,)))
    ),
    "step returned (State, ShapeDtypeStruct), expected (state, TimeStep)": _stepping(
        lambda state: (state, _PLAIN)
    ),
    "step returned NoneType, expected (state, TimeStep)": _stepping(lambda state: None),
    "dict), as Gymnasium's step does, expected": _stepping(
        lambda _: (_PLAIN, 1.0, False, False, {})
    ),
    "dict), as Gym's step does, expected (state": _stepping(lambda _: (_PLAIN, 1.0, False, {})),
    "(ShapeDtypeStruct, ShapeDtypeStruct, dict), expected": _stepping(lambda _: (_PLAIN, 1.0, {})),
    "the environment has no step": python_types.SimpleNamespace(spec=None, reset=None),
    "render: expected uint8[height, width, 3], got float32[4, 4]": _with(
        render=lambda self, state: jnp.zeros((4, 4))
    ),
    "step: leaf 'observation/x': expected float32[4], got float32[5]": _with_x(jnp.zeros((5,))),
    "step: leaf 'observation/action_mask': expected bool[3], got none": _spoil(
        "step", observation=lambda t: {"x": t.observation["x"]}
    ),
    "leaf 'step_type': expected int8[], got int32[]": _spoil(
        "reset", step_type=lambda t: t.step_type.astype(jnp.int32)
    ),
    "the state of step differs from that of reset: leaf 'time'": _with(step=_widen),
    "reset returned a step_type other than FIRST": _spoil(
        "reset", step_type=lambda t: jnp.int8(types.MID)
    ),
    "reset returned a reward other than 0": _spoil("reset", reward=lambda t: jnp.float32(1.0)),
    "step returned a step_type other than MID or LAST": _spoil(
        "step", step_type=lambda t: jnp.where(t.last(), t.step_type, types.FIRST).astype(jnp.int8)
    ),
    "a LAST time step has a discount other than 0 (terminated) or 1 (truncated)": _spoil(
        "step", discount=lambda t: jnp.where(t.last(), 0.9, 1.0)
    ),
    "a time step other than LAST has a discount other than 1": _spoil(
        "step", discount=lambda t: t.discount * 0.99
    ),
    "a discount is -1, which needs EnvironmentSpec.players = 2": _spoil(
        "step", discount=lambda t: -t.discount
    ),
    "spec.players is 3, supported are 1, and 2": _with(
        spec=environment.EnvironmentSpec("Good", Good.observed, Good.action, players=3)
    ),
    "spec.num_agents is 0, expected 1, or more": _with(
        spec=environment.EnvironmentSpec("Good", Good.observed, Good.action, num_agents=0)
    ),
    "the key 'active', reserved for one of several agents that may be out": _with(
        observed={**Good.observed, "active": specs.Array((), np.bool_)}
    ),
    "leaf 'reward': expected float32[2], got float32[] (the first axis is that of 2 agents)": (
        _agents(reward=lambda t: jnp.sum(t.reward))
    ),
    "the agents of one environment have different step_types": _agents(
        step_type=lambda t: jnp.where(t.active(), t.step_type, types.LAST).astype(jnp.int8)
    ),
    "an agent goes out with a discount other than 0": _agents(
        discount=lambda t: jnp.where(t.last(), t.discount, 1.0)
    ),
    "an agent that was out has a reward other than 0": _agents(
        reward=lambda t: jnp.where(t.active(), t.reward, 1.0)
    ),
    "an agent that is out has more than one legal action": _agents(
        observation=lambda t: {**t.observation, "action_mask": jnp.ones((2, 3), bool)}
    ),
    "reward is NaN, infinite or missing": _spoil("step", reward=lambda t: t.reward * jnp.nan),
    "observation['x'] is NaN or infinite": _with_x(_PLAIN + jnp.nan),
    "observation['x'] leaves the bounds of its spec": _with_x(_PLAIN + 2.0),
    "observation_of returned another observation": _with(
        observation_of=lambda self, state: {**self.observe(0), "x": jnp.ones((4,))}
    ),
    "one seed gives different episodes: it draws from NumPy's global generator": _drawing(
        lambda: jnp.asarray(np.random.random(4), jnp.float32)
    ),
    "it draws from Python's module `random`, not from its seed or key": _drawing(random.random),
    "draws from NumPy's global generator, not from its seed": _drawing(_draw_in_callback),
    "it draws from a generator without a seed": _drawing(np.random.default_rng().random),
    "one seed gives different episodes: it draws from NumPy's": type(
        "Spoilt", (Good,), {"__init__": lambda self: self.__dict__.update(step=_jitted(self))}
    ),
    "an action_mask has no legal action": _spoil(
        "step", observation=lambda t: {**t.observation, "action_mask": jnp.zeros(3, bool)}
    ),
    "an action_mask allows a value beyond spec.action": _multi_discrete([[True] * 3] * 2),
    "an episode goes on after spec.max_episode_steps = 5": _spoil(
        "step",
        step_type=lambda t: jnp.int8(types.MID),
        discount=lambda t: jnp.float32(1.0),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_alone_and_in_one_line(fault):
    with pytest.raises(errors.UserError) as caught:
        contract.check_environment(FAULTS[fault], num_steps=20)
    message = str(caught.value)
    path = "types.SimpleNamespace" if "no step" in fault else f"{__name__}.Spoilt"
    names = path, f"Good ({path})", f"TwoAgents ({path})"
    assert message.startswith(tuple(f"environment {name}: " for name in names)), message
    assert fault in message
    assert ";" not in message
    assert "\n" not in message


def test_several_faults_are_listed_together():
    spoilt = _spoil(
        "reset", reward=lambda t: jnp.float32(1.0), step_type=lambda t: jnp.int8(types.MID)
    )
    message = r"environment Good \(tests\..*\.Spoilt\): reset .*reward .*; reset .*FIRST"
    with pytest.raises(errors.UserError, match=message):
        contract.check_environment(spoilt, num_steps=1)
    spoilt = _spoil("step", reward=lambda t: jnp.int32(1), discount=lambda t: jnp.int32(1))
    assert len(contract.environment_faults(spoilt)) == 2
    with pytest.raises(errors.UserError, match="a Gym environment needs an adaptor"):
        contract.check_environment(gymnasium.make("CartPole-v1"))


def test_good_environments_pass():
    contract.check_environment(Good, num_steps=20)
    limited = wrappers.TimeLimit(probes.TwoAgents, max_episode_steps=3)
    contract.check_environment(limited, num_steps=20)
    good = _multi_discrete([[True, True, False], [True, True, True]])
    contract.check_environment(good, num_steps=20)
    # Metrics are ignored except at LAST.
    contract.check_environment(
        _reporting(success=lambda t: jnp.where(t.last(), 1.0, jnp.nan)), num_steps=20
    )
    # The action at LAST is ignored: a mask may be empty there.
    empty_at_last = _with(
        observe=lambda self, time: {
            "x": jnp.zeros((4,)),
            "action_mask": jnp.broadcast_to(time < 5, (3,)),
        }
    )
    contract.check_environment(empty_at_last, num_steps=20)


def test_the_environment_in_a_wrapper_is_named():
    inner = FAULTS["step returned NoneType, expected (state, TimeStep)"]
    limited = wrappers.TimeLimit(lambda: inner, max_episode_steps=3)
    with pytest.raises(errors.UserError, match=r"Spoilt.: step returned NoneType"):
        contract.check_environment(limited)


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
    drawn = jax.vmap(lambda key: environment.random_action(action, observation, key))(keys)
    assert drawn.dtype == action.dtype
    values, counts = np.unique(np.asarray(drawn), axis=0, return_counts=True)
    assert {tuple(v) if action.shape else int(v) for v in values} == expected
    assert counts.min() > 0.7 * 400 / len(expected)


def test_random_continuous_actions_fill_the_bounds():
    low, high = np.array([-1.0, 2.0], np.float32), np.array([0.0, 6.0], np.float32)
    action = specs.BoundedArray((2,), np.float32, low, high)
    keys = jax.random.split(jax.random.key(0), 1000)
    drawn = np.asarray(jax.vmap(lambda key: environment.random_action(action, None, key))(keys))
    np.testing.assert_allclose(drawn.min(0), low, atol=0.05)
    np.testing.assert_allclose(drawn.max(0), high, atol=0.05)
