"""The contract of factories of host environments; `check_contract(factory)` checks all of it.

Axis legend: `T` time, `B` streams.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from podracers import environment, types
from podracers.training import check
from tests import streams

NUM_STREAMS = 4
FIRST_STREAM = 5  # streams of a thread need not begin at 0


class Recording(NamedTuple):
    """The time steps and actions of `B` streams, with next-step reset."""

    timestep: types.TimeStep  # [T + 1, B, ...]
    action: np.ndarray  # [T, B, ...]


def check_contract(
    factory: environment.HostEnvironmentFactory,
    num_steps: int = 200,
    *,
    random: bool = True,
    num_threads: int = 1,
) -> Recording:
    """Asserts the whole contract, and returns the recording of a random policy.

    Args:
      factory: the factory to check.
      num_steps: `T`.
      random: whether episodes differ under the same actions; false for a deterministic simulator.
      num_threads: number of threads of the environments.
    """
    assert isinstance(factory, environment.HostEnvironmentFactory)
    assert dataclasses.is_dataclass(factory) and type(factory).__dataclass_params__.frozen
    spec, faults = factory.spec, check.spec_faults(factory)
    assert not faults, faults
    made = functools.partial(_made, factory, num_threads=num_threads)
    env_id = np.arange(FIRST_STREAM, FIRST_STREAM + NUM_STREAMS, dtype=np.int32)
    with made(0, env_id) as host:
        assert host.num_envs == NUM_STREAMS
        recording = record(host, spec, num_steps)
    check_timesteps(spec, recording.timestep)
    if hasattr(factory, "render"):
        image = factory.render(jax.tree.map(lambda leaf: leaf[-1, 0], recording.timestep))
        assert image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3
    # The same streams repeat, together or with other neighbours.
    for rows in (slice(0, NUM_STREAMS), slice(2, 4)):
        expected = jax.tree.map(lambda leaf, rows=rows: leaf[:, rows], recording)
        with made(0, env_id[rows]) as host:
            again = _run(host, lambda t, _, x=expected: x.action[t].copy(), num_steps)
            streams.assert_same(again, expected, strict=True)
    if random:
        seen = set()
        for seed in (0, 1):
            with made(seed, env_id - FIRST_STREAM) as host:
                leaves = jax.tree.leaves(record(host, spec, num_steps, shared=True).timestep)
            seen |= {b"".join(x[:, b].tobytes() for x in leaves) for b in range(NUM_STREAMS)}
        assert len(seen) == 2 * NUM_STREAMS, "two streams are copies of one another"
    return recording


def record(
    host: environment.HostEnvironment,
    spec: environment.EnvironmentSpec,
    num_steps: int,
    *,
    shared: bool = False,
) -> Recording:
    """Returns `num_steps` of random legal actions; asserts that returned arrays do not change.

    Args:
      host: environments that were not reset yet.
      spec: the specification of its factory.
      num_steps: `T`.
      shared: draw with the same keys for all rows.
    """
    draw = jax.jit(jax.vmap(functools.partial(check.random_action, spec.action)))
    keys = jax.random.split(jax.random.key(0), (num_steps, host.num_envs))
    keys = keys[:, [0] * host.num_envs] if shared else keys
    return _run(
        host, lambda t, timestep: np.asarray(draw(timestep.observation, keys[t])), num_steps
    )


def _run(
    host: environment.HostEnvironment,
    act: Callable[[int, types.TimeStep], np.ndarray],
    num_steps: int,
) -> Recording:
    timesteps, actions = [host.reset()], []
    assert timesteps[0].reward.shape == (host.num_envs,)
    # Not `np.array`, which would hide a leaf that is not an array.
    copies = [jax.tree.map(lambda leaf: leaf.copy(), timesteps[0])]
    for time in range(num_steps):
        actions.append(act(time, timesteps[-1]))
        host.send(actions[-1])
        timesteps.append(host.recv())
        copies.append(jax.tree.map(lambda leaf: leaf.copy(), timesteps[-1]))
    for timestep, copy in zip(timesteps, copies):
        streams.assert_same(timestep, copy, strict=True)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *copies)
    return Recording(stacked, np.stack(actions))


def check_timesteps(spec: environment.EnvironmentSpec, timestep: types.TimeStep) -> None:
    """Asserts structure, shapes and dtypes, S1, and the rules of `check_environment`."""
    expected = types.restart(spec.zero_observation())
    assert jax.tree.structure(timestep) == jax.tree.structure(expected)
    for part, array in zip(jax.tree.leaves(expected), jax.tree.leaves(timestep)):
        assert type(array) is np.ndarray
        assert (array.shape[1:], array.dtype) == ((NUM_STREAMS, *part.shape), part.dtype)
    first, last = timestep.first(), timestep.last()  # [T + 1, B]
    assert np.all(first[0]) and np.array_equal(first[1:], last[:-1])
    time = np.arange(len(first))[:, None]
    length = time - np.maximum.accumulate(np.where(first, time, 0))  # steps since FIRST
    rules = jax.vmap(jax.vmap(functools.partial(check._timestep_faults, spec)))
    broken = jax.jit(rules)(timestep, length)
    assert [text for text, occurred in broken.items() if np.any(occurred)] == []


@contextlib.contextmanager
def _made(
    factory: environment.HostEnvironmentFactory, seed: int, env_id: np.ndarray, num_threads: int
) -> Iterator[Any]:
    """Makes environments, and closes them twice."""
    host = factory.make(jax.random.key(seed), env_id, num_threads)
    assert isinstance(host, environment.HostEnvironment)
    try:
        yield host
    finally:
        host.close()
        host.close()
