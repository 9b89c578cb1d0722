"""Gymnax under the contract: true last observations, and time limits that truncate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from environments import gymnax, wrappers
from podracers import contract, environment, types, unroll
from tests import streams

registration = pytest.importorskip("gymnax.registration")

QUICK = ["Breakout-MinAtar", "Pendulum-v1"]
GAMES = ("Asterix", "Freeway", "SpaceInvaders")
SLOW = set(registration.registered_envs) - {*QUICK, "MNISTBandit-bsuite"}  # it downloads images


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(SLOW))]
)
def test_keeps_the_contract(name):
    contract.check_environment(gymnax.Gymnax(name), num_steps=150)


def test_ends_are_those_of_gymnax_with_true_last_observations():
    env = gymnax.Gymnax("Breakout-MinAtar", {"max_steps_in_episode": 9})
    inner, params = env._built

    def body(carry, key):
        state, alive = carry
        action_key, step_key = jax.random.split(key)
        action = environment.random_action(env.spec.action, None, action_key)
        after, timestep = env.step(state, action)
        theirs = inner.step(step_key, state.inner, action, params)
        return (after, alive & ~timestep.last()), (alive, timestep, theirs)

    def stream(key):
        reset_key, key = jax.random.split(key)
        state, _ = env.reset(reset_key)
        return jax.lax.scan(body, (state, jnp.array(True)), jax.random.split(key, 12))[1]

    keys = jax.random.split(jax.random.key(0), 32)
    alive, timestep, theirs = jax.tree.map(np.asarray, jax.jit(jax.vmap(stream))(keys))
    reset_observation, _, reward, terminated, truncated, info = theirs
    final = info["final_observation"]
    assert set(np.unique(final)) == {0.0, 1.0}  # MinAtar's observations are bool without loss
    np.testing.assert_array_equal(timestep.observation[alive], final[alive].astype(bool))
    last = timestep.step_type == types.LAST
    np.testing.assert_array_equal(last[alive], (terminated | truncated)[alive])
    np.testing.assert_array_equal(timestep.discount[alive], 1.0 - terminated[alive])
    np.testing.assert_array_equal(timestep.reward[alive], reward[alive])
    ends = alive & last
    # Gymnax's own observation of these steps is already of the next episode.
    assert (reset_observation[ends].astype(bool) != timestep.observation[ends]).any()
    # The ball falls past the paddle in some streams, and the clock runs out in others.
    assert set(timestep.discount[ends].tolist()) == {0.0, 1.0}
    assert (np.argmax(ends, axis=1)[(ends & (timestep.discount == 1.0)).any(axis=1)] == 8).all()


@pytest.mark.parametrize(
    "name", ["Breakout", *(pytest.param(name, marks=pytest.mark.slow) for name in GAMES)]
)
def test_the_observation_of_the_selected_state_is_the_selected_observation(name):
    sticky = wrappers.StickyActions(gymnax.Gymnax(f"{name}-MinAtar", {"max_steps_in_episode": 9}))
    action = np.arange(8, dtype=np.int32) % sticky.spec.num_actions

    def timesteps(reset_batch):  # with a chunk, observations themselves are selected
        batched = unroll.BatchedEnvironment(sticky, reset_batch)
        state, _ = batched.init(jax.random.split(jax.random.key(0), 8))
        return jax.lax.scan(lambda state, _: batched.step(state, action), state, length=25)[1]

    run = jax.jit(timesteps, static_argnums=0)
    streams.assert_same(run(None), run(8))
    assert not hasattr(gymnax.Gymnax("Pendulum-v1"), "observation_of")


def test_dynamics_draw_new_noise_at_every_step():
    """In FrozenLake the same move from the same place has random results."""
    env = gymnax.Gymnax("FrozenLake-misc")

    @jax.jit
    def slide(key):
        state, _ = env.reset(key)

        @jax.vmap
        def move(time):
            return env.step(state._replace(inner=state.inner.replace(time=time)), jnp.int32(1))

        return move(jnp.arange(12))[1].observation

    assert len(np.unique(slide(jax.random.key(0)))) > 1


def test_specs():
    spec = gymnax.Gymnax("Breakout-MinAtar").spec
    assert (spec.observation.shape, spec.observation.dtype) == ((10, 10, 4), np.bool_)
    assert (spec.action.num_values, spec.max_episode_steps) == (3, 1000)
    assert gymnax.Gymnax("DeepSea-bsuite", {"size": 5}).spec.max_episode_steps == 5
    pendulum = gymnax.Gymnax("Pendulum-v1").spec.action
    assert isinstance(pendulum, specs.BoundedArray)
    assert (pendulum.shape, pendulum.minimum.tolist()) == ((1,), [-2.0])
