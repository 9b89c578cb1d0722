"""Craftax under the contract: the time limit truncates, death terminates, achievements count."""

import fcntl
import functools
import os
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from environments import craftax
from podracers import contract, errors, types

pytest.importorskip("craftax")

LIMIT = 40  # agent steps
NOOP, MAKE_WOOD_PICKAXE, MAKE_WOOD_SWORD = 0, 11, 14  # actions
TABLE = 11  # the block of a crafting table

SYMBOLIC = {  # shapes of the map and of the vector; numbers of actions, steps and achievements
    "Craftax-Classic-Symbolic-v1": ((7, 9, 21), (22,), 17, 10_000, 22),
    "Craftax-Symbolic-v1": ((9, 11, 83), (51,), 43, 100_000, 67),
}
PIXELS = {"Craftax-Classic-Pixels-v1": (63, 63, 3), "Craftax-Pixels-v1": (130, 110, 3)}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbolic_specs(name):
    spec = craftax.Craftax(name).spec
    shape, size, num_actions, limit, num_achievements = SYMBOLIC[name]
    parts = {key: (part.shape, part.dtype) for key, part in spec.observation.items()}
    assert parts == {"map": (shape, np.bool_), "vector": (size, np.float32)}
    assert (spec.num_actions, spec.max_episode_steps) == (num_actions, limit)
    assert craftax.Craftax(name, {"max_timesteps": 7}).spec.max_episode_steps == 7
    assert len(set(spec.metrics)) == 1 + num_achievements
    assert {"achievements", "achievement/eat_cow"} < set(spec.metrics)


def test_a_damaged_cache_of_textures_is_one_line(monkeypatch):
    from craftax.craftax_classic import renderer  # noqa: PLC0415  (creates arrays)

    def load():
        raise EOFError("Compressed file ended")

    monkeypatch.setattr(renderer, "load_all_textures", load)
    with pytest.raises(errors.UserError, match="CRAFTAX_RELOAD_TEXTURES=true once"):
        _ = craftax.Craftax("Craftax-Classic-Pixels-v1").spec


def test_one_process_at_a_time_imports_the_textures():
    lock = pathlib.Path(tempfile.gettempdir(), f"craftax-textures-{os.getuid()}.lock")
    with craftax._textures(), lock.open("w") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.slow  # textures
@pytest.mark.parametrize("name", PIXELS)
def test_pixel_specs(name):
    observation = craftax.Craftax(name).spec.observation
    assert (observation.shape, observation.dtype) == (PIXELS[name], np.uint8)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SYMBOLIC, "Craftax-Classic-Pixels-v1"])
def test_keeps_the_contract(name):
    """Not with the pixels of the full game, whose rules compile for a minute."""
    env = craftax.Craftax(name, {"max_timesteps": LIMIT})
    contract.check_environment(env, num_steps=2 * LIMIT)


@functools.cache
def _compiled(name):
    """Returns an environment with a short time limit, the state of an episode, and its step."""
    env = craftax.Craftax(name, {"max_timesteps": LIMIT})
    state, timestep = jax.jit(env.reset)(jax.random.key(0))
    assert timestep.step_type == types.FIRST
    return env, state, jax.jit(env.step)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("time", "health", "step_type", "discount"),
    [
        (7, 9, types.MID, 1.0),
        (LIMIT - 1, 9, types.LAST, 1.0),
        (7, -9, types.LAST, 0.0),
        (LIMIT - 1, -9, types.LAST, 0.0),
    ],
)
@pytest.mark.parametrize("name", SYMBOLIC)
def test_ends_and_final_observations(name, time, health, step_type, discount):
    env, state, step = _compiled(name)
    health = jnp.full_like(state.inner.player_health, health)  # a float in the full game
    inner = state.inner.replace(timestep=jnp.int32(time), player_health=health)
    stepped, timestep = step(state._replace(inner=inner), jnp.int32(NOOP))
    assert (timestep.step_type, timestep.discount) == (step_type, discount)
    # The observation is that of the state before any reset, without a loss.
    ours = [np.ravel(timestep.observation[key]) for key in ("map", "vector")]
    theirs = env._built[0].get_obs(stepped.inner)
    np.testing.assert_allclose(np.concatenate(ours), theirs, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "earlier"),
    [("Craftax-Classic-Symbolic-v1", set()), ("Craftax-Symbolic-v1", {"collect_wood"})],
)
def test_achievements_of_a_known_episode(name, earlier):
    """Between tables with some wood in hand, which the full game counts as collected."""
    _, state, step = _compiled(name)
    inventory = state.inner.inventory.replace(wood=jnp.int32(9))
    inner = state.inner.replace(
        timestep=jnp.int32(LIMIT - 3),
        map=jnp.full_like(state.inner.map, TABLE),
        inventory=inventory,
    )
    state = state._replace(inner=inner)
    unlocked = {*earlier}
    for action, achievement in (
        (MAKE_WOOD_PICKAXE, "make_wood_pickaxe"),
        (MAKE_WOOD_SWORD, "make_wood_sword"),
        (MAKE_WOOD_SWORD, "make_wood_sword"),
    ):
        state, timestep = step(state, jnp.int32(action))
        unlocked.add(achievement)
        expected = {f"achievement/{name}" for name in unlocked}
        metrics = dict(timestep.metrics)
        assert metrics.pop("achievements") == len(expected)
        assert {key for key, value in metrics.items() if value} == expected
        assert {float(value) for value in metrics.values()} == {0.0, 1.0}
    assert timestep.truncated()
