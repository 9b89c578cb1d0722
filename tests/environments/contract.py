"""The contract of JAX environments; an environment joins with one line in `ENVIRONMENTS`.

Axis legend: `T` time, `B` streams.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from environments import (
    cartpole,
    catch,
    gridworld,
    pendulum,
    probes,
    wrappers,
)
from environments.meta import delayed_chains, lifetimes, tabular_grids
from podracers import environment, types
from podracers.training import check

NUM_STREAMS = 4
NUM_STEPS = 150

ENVIRONMENTS: dict[str, Callable[[], environment.Environment]] = {
    "catch": catch.Catch,
    "gridworld": gridworld.GridWorld,
    "cartpole": cartpole.CartPole,
    "pendulum": lambda: pendulum.Pendulum(max_episode_steps=40),
    "tabular_grid": lambda: lifetimes.FixedTask(tabular_grids.TabularGrids(("small",))),
    "delayed_chain": lambda: lifetimes.FixedTask(delayed_chains.DelayedChains(("distractor",))),
    "lifetimes": lambda: lifetimes.Lifetimes(
        lifetimes.Mixture(
            (tabular_grids.TabularGrids(("small",)), delayed_chains.DelayedChains(("short",)))
        ),
        num_envs=2,
        period=10,
        max_periods=4,
    ),
    "multi_discrete_masked": lambda: probes.MultiDiscreteReward(masked=True),
    "time_limit": lambda: wrappers.TimeLimit(cartpole.CartPole, max_episode_steps=10),
    "flat_observation": lambda: wrappers.FlattenObservation(probes.MaskedAction),
    "flat_action": lambda: wrappers.FlattenAction(probes.MultiDiscreteReward(masked=True)),
    "truncation": probes.Truncation,
    "memory": probes.Memory,
}


class Episodes(NamedTuple):
    """A random policy's experience, with next-step reset, in NumPy."""

    timestep: types.TimeStep  # [T + 1, B, ...]
    action: Any  # [T, B, ...]
    last_state: Any  # [B, ...]


def record(candidate: environment.Environment, seed: int = 0) -> Episodes:
    """Returns `NUM_STEPS` steps of `NUM_STREAMS` streams under a random policy, compiled."""
    spec = candidate.spec

    def step(carry, keys):
        state, timestep = carry
        reset_key, action_key = keys
        action = check.random_action(spec.action, timestep.observation, action_key)
        stepped = candidate.step(state, action)
        fresh = candidate.reset(reset_key)
        carry = jax.tree.map(lambda a, b: jnp.where(timestep.last(), a, b), fresh, stepped)
        return carry, (timestep, action)

    def stream(key):
        reset_keys, action_keys = jax.random.split(key, (2, NUM_STEPS + 1))
        carry, (timestep, action) = jax.lax.scan(
            step, candidate.reset(reset_keys[0]), (reset_keys[1:], action_keys[1:])
        )
        state, final = carry
        timestep = jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), timestep, final)
        return timestep, action, state

    keys = jax.random.split(jax.random.key(seed), NUM_STREAMS)
    batched = jax.vmap(stream, out_axes=(1, 1, 0))
    # Run once, for a moment: compiling is what takes the time.
    run = jax.jit(batched, compiler_options={"xla_backend_optimization_level": 0})
    timestep, action, state = run(keys)
    # A state may hold typed keys, which NumPy cannot: it stays on the device.
    return Episodes(jax.device_get(timestep), jax.device_get(action), state)


def check_specs(spec: environment.EnvironmentSpec, episodes: Episodes) -> None:
    """Asserts that observations and actions have the shapes, dtypes and bounds of the spec."""
    timestep = episodes.timestep
    leaves, tree = jax.tree.flatten(spec.observation)
    assert jax.tree.structure(timestep.observation) == tree
    arrays = list(zip(leaves, jax.tree.leaves(timestep.observation)))
    arrays.append((spec.action, episodes.action))
    for part, array in arrays:
        assert array.shape[2:] == part.shape
        assert array.dtype == part.dtype
        if np.issubdtype(array.dtype, np.floating):
            assert np.all(np.isfinite(array))
        if isinstance(part, specs.BoundedArray):
            assert np.all(array >= part.minimum)
            assert np.all(array <= part.maximum)
    for field, dtype in {
        "reward": np.float32,
        "discount": np.float32,
        "step_type": np.int8,
    }.items():
        array = getattr(timestep, field)
        assert array.shape == (NUM_STEPS + 1, NUM_STREAMS)
        assert array.dtype == dtype
    assert np.all(np.isfinite(timestep.reward))


def check_stream(spec: environment.EnvironmentSpec, timestep: types.TimeStep) -> None:
    """Asserts S1, S2 and the time limit, stream by stream, step by step."""
    limit = spec.max_episode_steps
    for stream in range(NUM_STREAMS):
        length = 0
        previous = types.LAST  # a stream begins like what follows an ended episode
        for t in range(NUM_STEPS + 1):
            step_type = timestep.step_type[t, stream]
            discount = timestep.discount[t, stream]
            assert (step_type == types.FIRST) == (previous == types.LAST)
            if step_type == types.FIRST:
                length = 0
                assert timestep.reward[t, stream] == 0.0
            else:
                length += 1
            assert discount in ({0.0, 1.0} if step_type == types.LAST else {1.0})
            if limit is not None:
                assert length <= limit
                assert length < limit or step_type == types.LAST
            previous = step_type


def check_masks(spec: environment.EnvironmentSpec, episodes: Episodes) -> None:
    """Asserts that there is a legal action, and that the recorded ones are legal."""
    observation = episodes.timestep.observation
    if not isinstance(observation, dict) or environment.ACTION_MASK not in observation:
        return
    mask = observation[environment.ACTION_MASK]  # [T + 1, B, A] or [T + 1, B, D, A]
    acting = ~episodes.timestep.last()
    assert np.all(np.any(mask, axis=-1)[acting])
    chosen = np.take_along_axis(mask[:-1], episodes.action[..., None], axis=-1)[..., 0]
    assert np.all(chosen[acting[:-1]])


def check_render(candidate: environment.Environment, episodes: Episodes) -> None:
    """Asserts that a state can be drawn, if the environment draws."""
    if not hasattr(candidate, "render"):
        return
    image = candidate.render(jax.tree.map(lambda leaf: leaf[0], episodes.last_state))
    assert image.dtype == np.uint8
    assert image.ndim == 3 and image.shape[2] == 3
    assert min(image.shape[:2]) >= 200
    assert image.std() > 0.0
