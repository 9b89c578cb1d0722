"""Wrappers: what they change, and that they change nothing else."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from environments import catch, envpool, gridworld, pendulum, probes, wrappers
from podracers import environment, errors, types
from podracers.training import check
from tests import streams


@dataclasses.dataclass(frozen=True, eq=False)
class Endless:
    """Counts for ever; ends at `end` if there is one. The observation has parts of every kind."""

    end: int = -1

    @property
    def spec(self):
        parts = {"count": specs.Array((), np.int32), "plane": specs.Array((2, 2), np.uint8)}
        mask = specs.Array((2, 3), np.bool_)
        return environment.EnvironmentSpec(
            name="Endless",
            observation={"b": parts, "a": specs.Array((3,), np.float32), "action_mask": mask},
            action=specs.BoundedArray((2,), np.int32, 0, np.array([1, 2], np.int32)),
        )

    def reset(self, key):
        del key
        return jnp.int32(0), types.restart(self._observe(jnp.int32(0)))

    def step(self, state, action):
        state = state + 1
        reward = (3 * action[0] + action[1]).astype(jnp.float32)
        return state, types.transition(self._observe(state), reward, terminated=state == self.end)

    def _observe(self, count):
        parts = {"count": count, "plane": jnp.full((2, 2), 7, jnp.uint8)}
        mask = jnp.array([[True, False, False], [True, False, True]])
        return {"b": parts, "a": jnp.arange(3.0), "action_mask": mask}


def _play(candidate, num_steps, action):
    """Returns the time steps of one episode, `[num_steps + 1]`."""

    def step(carry, _):
        carry = candidate.step(carry[0], action)
        return carry, carry[1]

    state, first = candidate.reset(jax.random.key(0))
    _, later = jax.jit(lambda carry: jax.lax.scan(step, carry, length=num_steps))((state, first))
    return jax.tree.map(lambda x, y: np.concatenate([x[None], y]), first, later)


def test_environment_is_an_instance_a_class_or_a_callable():
    instance = catch.Catch(rows=4)
    assert wrappers.RewardScale(instance).environment is instance
    assert isinstance(wrappers.RewardScale(catch.Catch).environment, catch.Catch)
    partial = functools.partial(catch.Catch, rows=6)
    assert wrappers.RewardScale(partial).environment.rows == 6
    nested = wrappers.RewardScale(functools.partial(wrappers.TimeLimit, catch.Catch))
    assert isinstance(nested.environment.environment, catch.Catch)
    with pytest.raises(ValueError, match=r"RewardScale\.environment: expected"):
        wrappers.RewardScale("catch")


def test_time_limit_truncates_and_keeps_discount_one():
    wrapped = wrappers.TimeLimit(Endless(), max_episode_steps=3)
    timestep = _play(wrapped, 3, jnp.array([0, 0]))
    np.testing.assert_array_equal(
        timestep.step_type, [types.FIRST, types.MID, types.MID, types.LAST]
    )
    np.testing.assert_array_equal(timestep.discount, [1.0, 1.0, 1.0, 1.0])
    # The last observation is the true one, not that of a reset.
    np.testing.assert_array_equal(timestep.observation["b"]["count"], [0, 1, 2, 3])


@pytest.mark.parametrize(("end", "discounts"), [(3, [1, 1, 1, 0]), (2, [1, 1, 0])])
def test_termination_wins_over_the_limit(end, discounts):
    wrapped = wrappers.TimeLimit(Endless(end=end), max_episode_steps=3)
    timestep = _play(wrapped, end, jnp.array([0, 0]))
    assert timestep.step_type[-1] == types.LAST
    np.testing.assert_array_equal(timestep.discount, discounts)


def test_time_limit_spec_has_the_lower_limit():
    assert wrappers.TimeLimit(Endless(), max_episode_steps=3).spec.max_episode_steps == 3
    assert wrappers.TimeLimit(pendulum.Pendulum, max_episode_steps=3).spec.max_episode_steps == 3
    limit = wrappers.TimeLimit(pendulum.Pendulum, max_episode_steps=300).spec.max_episode_steps
    assert limit == 200
    with pytest.raises(ValueError, match="positive"):
        wrappers.TimeLimit(pendulum.Pendulum, max_episode_steps=0)


def test_reward_scale():
    timestep = _play(wrappers.RewardScale(Endless(), scale=0.5), 2, jnp.array([1, 2]))
    np.testing.assert_array_equal(timestep.reward, [0.0, 2.5, 2.5])


def test_flat_observation_keeps_the_mask():
    wrapped = wrappers.FlattenObservation(Endless())
    timestep = _play(wrapped, 1, jnp.array([0, 0]))
    expected = [[0, 1, 2, 0, 7, 7, 7, 7], [0, 1, 2, 1, 7, 7, 7, 7]]
    np.testing.assert_array_equal(timestep.observation["observation"], expected)
    assert timestep.observation["observation"].dtype == np.float32
    assert timestep.observation["action_mask"].shape == (2, 2, 3)
    assert wrapped.spec.observation["observation"] == specs.Array((8,), np.float32)
    assert wrapped.spec.observation["action_mask"] == specs.Array((2, 3), np.bool_)


def test_flat_action_enumerates_all_pairs():
    wrapped = wrappers.FlattenAction(Endless())
    assert wrapped.spec.action == specs.DiscreteArray(6)
    state, timestep = wrapped.reset(jax.random.key(0))
    _, after = jax.vmap(wrapped.step, (None, 0))(state, jnp.arange(6))
    np.testing.assert_array_equal(after.reward, np.arange(6.0))  # 3 * first + second
    # Legal are the first part's 0, and the second part's 0 and 2.
    expected = [True, False, True, False, False, False]
    np.testing.assert_array_equal(timestep.observation["action_mask"], expected)
    assert wrapped.spec.observation["action_mask"] == specs.Array((6,), np.bool_)


@pytest.mark.parametrize("other", [catch.Catch, pendulum.Pendulum])
def test_flat_action_wants_a_multi_discrete_one(other):
    with pytest.raises(ValueError, match="multi-discrete"):
        wrappers.FlattenAction(other)


def test_render_passes_through():
    wrapped = wrappers.TimeLimit(functools.partial(wrappers.RewardScale, gridworld.GridWorld))
    state, _ = wrapped.reset(jax.random.key(0))
    inner_state, _ = gridworld.GridWorld().reset(jax.random.key(0))
    np.testing.assert_array_equal(wrapped.render(state), gridworld.GridWorld().render(inner_state))
    assert not hasattr(wrappers.RewardScale(probes.ActionReward), "render")


class TwoParts(Endless):
    """`Endless` with a part that a network should not see."""

    @property
    def spec(self):
        spec = super().spec
        clock = specs.Array((), np.int32)
        return dataclasses.replace(spec, observation={**spec.observation, "clock": clock})

    def _with_clock(self, state, timestep):
        observation = {**timestep.observation, "clock": jnp.int32(9)}
        return state, timestep._replace(observation=observation)

    def reset(self, key):
        return self._with_clock(*super().reset(key))

    def step(self, state, action):
        return self._with_clock(*super().step(state, action))


def test_select_observation_drops_parts_and_keeps_the_mask():
    kept = tuple(key for key in Endless().spec.observation if key != "action_mask")
    wrapped = wrappers.SelectObservation(TwoParts, keys=kept)
    expected = set(Endless().spec.observation)
    assert set(wrapped.spec.observation) == expected
    state, timestep = wrapped.reset(jax.random.key(0))
    assert set(timestep.observation) == expected
    _, timestep = wrapped.step(state, jnp.array([0, 0]))
    assert set(timestep.observation) == expected


def test_select_observation_refuses_unknown_parts():
    with pytest.raises(errors.UserError, match=r"clok.*clock"):
        wrappers.SelectObservation(TwoParts, keys=("clok",))
    with pytest.raises(errors.UserError, match="one array"):
        wrappers.SelectObservation(catch.Catch, keys=("image",))


@pytest.mark.parametrize(
    "game", [catch.Catch(), streams.RandomEpisodes(masked=True)], ids=["array", "dict, with keys"]
)
def test_stepping_from_a_shown_state_is_stepping(game):
    candidate = wrappers.Searchable(game)
    assert candidate.spec.model is candidate
    state, timestep = candidate.reset(jax.random.key(0))
    inner, plain = game.reset(jax.random.key(0))
    for action in (0, 2, 1):
        packed = timestep.observation[environment.STATE]
        state, timestep = candidate.step(state, action)
        inner, plain = game.step(inner, action)
        stepped, after = candidate.step_from(packed, action)
        streams.assert_same(after, timestep.observation[environment.STATE])
        seen = environment.without_state(timestep.observation)
        streams.assert_same(stepped, timestep._replace(observation=seen))
        expected = plain.observation
        streams.assert_same(
            seen, expected if isinstance(expected, dict) else {"observation": expected}
        )
        streams.assert_same(timestep[1:], plain[1:])


def test_a_searchable_environment_keeps_the_contract():
    check.check_environment(wrappers.Searchable(catch.Catch(rows=4)), num_steps=50)


@pytest.mark.parametrize("host", [envpool.EnvPool])
def test_searching_what_runs_on_the_host_is_refused(host):
    with pytest.raises(errors.UserError, match=r"expected a JAX environment.*EnvPool"):
        wrappers.Searchable(host)
