"""Craftax under the contract: the time limit truncates, and death terminates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from environments import craftax
from podracers import contract, types

pytest.importorskip("craftax")

LIMIT = 40  # agent steps
NOOP, PLACE_TABLE = 0, 8  # actions

CLASSIC = "Craftax-Classic-Symbolic-v1"
SYMBOLIC = {  # shapes of the map and of the vector, number of actions, time limit
    CLASSIC: ((7, 9, 21), (22,), 17, 10_000),
    "Craftax-Symbolic-v1": ((9, 11, 83), (51,), 43, 100_000),
}
PIXELS = {"Craftax-Classic-Pixels-v1": (63, 63, 3), "Craftax-Pixels-v1": (130, 110, 3)}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbolic_specs(name):
    spec = craftax.Craftax(name).spec
    shape, size, num_actions, limit = SYMBOLIC[name]
    parts = {key: (part.shape, part.dtype) for key, part in spec.observation.items()}
    assert parts == {"map": (shape, np.bool_), "vector": (size, np.float32)}
    assert (spec.num_actions, spec.max_episode_steps) == (num_actions, limit)
    assert craftax.Craftax(name, {"max_timesteps": 7}).spec.max_episode_steps == 7


@pytest.mark.slow  # textures
@pytest.mark.parametrize("name", PIXELS)
def test_pixel_specs(name):
    observation = craftax.Craftax(name).spec.observation
    assert (observation.shape, observation.dtype) == (PIXELS[name], np.uint8)


@pytest.mark.slow
@pytest.mark.parametrize("name", craftax.NAMES)
def test_keeps_the_contract(name):
    env = craftax.Craftax(name, {"max_timesteps": LIMIT})
    contract.check_environment(env, num_steps=2 * LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize("name", SYMBOLIC)
def test_ends_and_final_observations(name):
    """One step from edited states: a quiet one, the last one, a death, and a death in the last."""
    env = craftax.Craftax(name, {"max_timesteps": LIMIT})
    state, timestep = jax.jit(env.reset)(jax.random.key(0))
    assert timestep.step_type == types.FIRST
    time, health = jnp.array([7, LIMIT - 1, 7, LIMIT - 1]), jnp.array([9, 9, -9, -9])

    def step(time, health):
        inner = state.inner.replace(timestep=time, player_health=health)
        stepped, timestep = env.step(state._replace(inner=inner), jnp.int32(NOOP))
        theirs = env._built[0].get_obs(stepped.inner)
        return timestep, theirs

    timestep, theirs = jax.jit(jax.vmap(step))(time.astype(jnp.int32), health)
    assert timestep.step_type.tolist() == [types.MID, *[types.LAST] * 3]
    assert timestep.discount.tolist() == [1.0, 1.0, 0.0, 0.0]
    # The observation is that of the state before any reset, without a loss.
    cells, vector = timestep.observation["map"], timestep.observation["vector"]
    ours = np.concatenate([np.reshape(cells, (4, -1)).astype(np.float32), vector], axis=1)
    np.testing.assert_array_equal(ours, theirs)
