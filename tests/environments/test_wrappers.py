"""Wrappers change one thing each."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from environments import catch, gridworld, jumanji, pendulum, probes, randomized, wrappers
from podracers import contract, environment, types
from tests import streams

ECHO = environment.EnvironmentSpec(
    "Echo", specs.Array((), np.int32), specs.DiscreteArray(9, np.int8)
)


@dataclasses.dataclass(frozen=True, eq=False)
class Echo:
    """Observes the executed action."""

    spec: environment.EnvironmentSpec = ECHO

    def reset(self, key):
        del key
        return (), types.restart(jnp.int32(-1))

    def step(self, state, action):
        return state, types.transition(action.astype(jnp.int32), 0.0, terminated=False)


@pytest.mark.parametrize(
    ("rows", "discounts"),
    [(9, [1, 1, 1, 1]), (4, [1, 1, 1, 0]), (3, [1, 1, 0])],
    ids=["truncation", "termination at the limit", "termination before it"],
)
def test_time_limit_truncates_unless_the_episode_terminates(rows, discounts):
    wrapped = wrappers.TimeLimit(catch.Catch(rows), max_episode_steps=3)
    state, timestep = jax.jit(wrapped.reset)(jax.random.key(0))
    timesteps, step = [timestep], jax.jit(wrapped.step)
    while not timesteps[-1].last():
        state, timestep = step(state, jnp.int32(0))
        timesteps.append(timestep)
    assert [int(x.discount) for x in timesteps] == discounts
    # The last observation is the true one, not that of a reset.
    balls = [int(np.argmax(np.any(x.observation, (1, 2)))) for x in timesteps]  # rows
    assert balls == list(range(len(discounts)))


@pytest.mark.parametrize(
    ("inner", "limit", "expected"),
    [(Echo, 3, 3), (pendulum.Pendulum, 3, 3), (pendulum.Pendulum, 300, 200)],
)
def test_time_limit_spec_has_the_lower_limit(inner, limit, expected):
    wrapped = wrappers.TimeLimit(inner, max_episode_steps=limit)
    assert wrapped.spec.max_episode_steps == expected


def test_render_passes_through():
    wrapped = wrappers.Searchable(functools.partial(wrappers.TimeLimit, gridworld.GridWorld))
    state, _ = jax.jit(wrapped.reset)(jax.random.key(0))
    inner_state, _ = jax.jit(gridworld.GridWorld().reset)(jax.random.key(0))
    np.testing.assert_array_equal(wrapped.render(state), gridworld.GridWorld().render(inner_state))
    sticky = wrappers.StickyActions(gridworld.GridWorld)
    sticky_state, _ = jax.jit(sticky.reset)(jax.random.key(0))
    assert sticky.render(sticky_state).shape == wrapped.render(state).shape
    assert not hasattr(wrappers.TimeLimit(probes.ActionReward), "render")


def test_sticky_actions_repeat_the_executed_action():
    wrapped = wrappers.StickyActions(Echo, repeat_probability=0.25)
    chosen = jnp.arange(1, 9)  # no two alike, so that a repetition shows

    @jax.vmap
    def play(key):
        state, _ = wrapped.reset(key)
        _, timesteps = jax.lax.scan(wrapped.step, state, chosen)
        return timesteps.observation

    executed = np.asarray(play(jax.random.split(jax.random.key(0), 5000)))  # [B, T]
    previous = np.pad(executed, ((0, 0), (1, 0)))[:, :-1]  # 0 before the first step
    repeated = executed != chosen
    np.testing.assert_array_equal(executed[repeated], previous[repeated])
    np.testing.assert_allclose(repeated.mean(axis=0), 0.25, atol=0.025)  # four standard errors
    both = (repeated[:, 1:] & repeated[:, :-1]).mean()  # steps are independent
    assert both == pytest.approx(0.0625, abs=0.01)


@pytest.mark.parametrize(("low", "first"), [(-2.0, 0.0), (1.0, 1.0)])
def test_sticky_actions_begin_with_the_action_nearest_to_zero(low, first):
    action = specs.BoundedArray((1,), np.float32, low, 2.0)
    echo = dataclasses.replace(Echo(), spec=dataclasses.replace(ECHO, action=action))
    state, _ = jax.jit(wrappers.StickyActions(echo).reset)(jax.random.key(0))
    np.testing.assert_array_equal(state.action, [first])


def test_select_observation_drops_parts_and_keeps_the_mask():
    wrapped = wrappers.SelectObservation(lambda: jumanji.Jumanji("Snake-v1"), keys=("grid",))
    state, timestep = jax.eval_shape(wrapped.reset, jax.random.key(0))
    _, after = jax.eval_shape(wrapped.step, state, jnp.int32(0))
    for observation in (wrapped.spec.observation, timestep.observation, after.observation):
        assert set(observation) == {"grid", "action_mask"}


@pytest.mark.parametrize(
    "game",
    [catch.Catch(), streams.RandomEpisodes(masked=True, reports=True)],
    ids=["array", "dict, with keys"],
)
def test_stepping_from_a_packed_state_is_stepping(game):
    candidate = wrappers.Searchable(game)
    assert candidate.spec.model is candidate
    state, timestep = jax.jit(candidate.reset)(jax.random.key(0))
    inner, plain = jax.jit(game.reset)(jax.random.key(0))
    step, plain_step, step_from = map(jax.jit, (candidate.step, game.step, candidate.step_from))
    for action in (0, 2, 1):
        packed = timestep.observation[environment.STATE]
        state, timestep = step(state, action)
        inner, plain = plain_step(inner, action)
        stepped, after = step_from(packed, action)
        streams.assert_same(after, timestep.observation[environment.STATE])
        seen = environment.without_state(timestep.observation)
        streams.assert_same(stepped, timestep._replace(observation=seen, metrics={}))
        expected = plain.observation
        streams.assert_same(
            seen, expected if isinstance(expected, dict) else {"observation": expected}
        )
        streams.assert_same(timestep[1:], plain[1:])


def test_redrawn_states_differ_in_their_keys_alone():
    state = {
        "key": jnp.zeros(2, jnp.uint32),
        "hash": jnp.zeros(2, jnp.uint32),
        "time": jnp.ones(()),
    }
    state |= {"typed": jax.random.key(1), "several": jax.random.split(jax.random.key(2), 3)}
    after = wrappers.redrawn(state, jax.random.key(0))
    data = jax.device_get(jax.tree.map(jax.random.key_data, (state["typed"], state["several"])))
    changed = {name for name, leaf in state.items() if not np.all(leaf == after[name])}
    assert changed == {"key", "typed", "several"}
    assert after["several"].shape == (3,) and data[0].shape == (2,)
    again = wrappers.redrawn(state, jax.random.key(1))
    assert after["typed"] != again["typed"]


@pytest.mark.parametrize(
    ("wrapper", "options"),
    [
        (wrappers.TimeLimit, {}),
        (wrappers.StickyActions, {}),
        (wrappers.SelectObservation, {"masked": True, "keys": ("features",)}),
        (wrappers.FlattenAction, {"masked": True, "actions": "multi_discrete"}),
        (wrappers.Searchable, {}),
        (randomized.Randomized, {"ranges": {"end": (0.5, 1.0)}, "observe": True}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_wrappers_report_the_metrics_of_the_environment(wrapper, options):
    of_game = {name: options[name] for name in options if name in ("masked", "actions")}
    game = streams.RandomEpisodes(reports=True, **of_game)
    wrapped = wrapper(game, **{name: options[name] for name in options.keys() - of_game.keys()})
    assert wrapped.spec.metrics == ("total", "steps")
    assert contract.environment_faults(wrapped, num_steps=0) == []


def test_flat_actions_enumerate_all_pairs():
    inner = probes.MultiDiscreteReward(masked=True)
    wrapped = wrappers.FlattenAction(inner)
    sizes = np.asarray(inner.spec.action.maximum) + 1
    pairs = np.stack(np.unravel_index(np.arange(np.prod(sizes)), sizes), axis=-1)
    state, timestep = streams.evaluate(wrapped.reset, jax.random.key(0))
    every = functools.partial(jax.vmap, in_axes=(None, 0))
    _, joint = streams.evaluate(every(wrapped.step), state, np.arange(len(pairs), dtype=np.int32))
    _, parts = streams.evaluate(every(inner.step), state, pairs.astype(np.int32))
    np.testing.assert_array_equal(joint.reward, parts.reward)
    assert timestep.observation["action_mask"].all()
    mask = jnp.array([[True, False, False], [True, False, True]])
    masked = timestep._replace(observation=timestep.observation | {"action_mask": mask})
    expected = [True, False, True, False, False, False]
    observed = wrapped._convert(state, masked).observation["action_mask"]
    np.testing.assert_array_equal(observed, expected)
