"""What every factory of host environments has to keep: `check_contract(factory)` checks it all.

Axis legend: `T` time, `B` streams, `A` actions, `D` parts of a multi-discrete action.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from dm_env import specs

from podracers import environment, types
from podracers.training import check

NUM_STREAMS = 4
NUM_STEPS = 200
FIRST_STREAM = 5  # streams of a thread need not begin at 0

_SCALARS = {"reward": np.float32, "discount": np.float32, "step_type": np.int8}


class Recording(NamedTuple):
    """What `B` streams went through, with next-step reset."""

    timestep: types.TimeStep  # [T + 1, B, ...]
    action: np.ndarray  # [T, B, ...]


def check_contract(
    factory: environment.HostEnvironmentFactory,
    num_steps: int = NUM_STEPS,
    *,
    random: bool = True,
    num_threads: int = 1,
) -> Recording:
    """Asserts the whole contract, and returns the recording of a random policy.

    Args:
      factory: what is checked.
      num_steps: `T`.
      random: whether two episodes of it ever differ under the same actions; false for a simulator
        that has nothing random in it.
      num_threads: what the environments are made with.
    """
    check_factory(factory)
    env_id = np.arange(FIRST_STREAM, FIRST_STREAM + NUM_STREAMS, dtype=np.int32)
    key = jax.random.key(0)
    with _made(factory, key, env_id, num_threads) as host:
        assert host.num_envs == NUM_STREAMS
        recording = record(host, factory.spec, num_steps)
    check_arrays(factory.spec, recording)
    check_stream(factory.spec, recording.timestep)
    check_masks(factory.spec, recording)
    check_render(factory, recording)
    with _made(factory, key, env_id, num_threads) as host:
        assert_equal(recording, replay(host, recording.action))
    with _made(factory, key, env_id[2:4], num_threads) as host:
        rows = jax.tree.map(lambda leaf: leaf[:, 2:4], recording)
        assert_equal(rows, replay(host, rows.action))
    if random:
        check_streams_differ(factory, num_steps, num_threads)
    return recording


def check_factory(factory: environment.HostEnvironmentFactory) -> None:
    """Asserts that the factory is frozen, and that its spec is well-formed."""
    assert environment.is_host(factory)
    assert isinstance(factory, environment.HostEnvironmentFactory)
    assert dataclasses.is_dataclass(factory) and type(factory).__dataclass_params__.frozen
    faults, _ = check.spec_faults(factory)
    assert not faults, faults


def record(
    host: environment.HostEnvironment,
    spec: environment.EnvironmentSpec,
    num_steps: int = NUM_STEPS,
    seed: int = 0,
    *,
    shared: bool = False,
) -> Recording:
    """Returns `num_steps` of random legal actions; asserts that arrays stay as handed out.

    Args:
      host: freshly made.
      spec: of its factory.
      num_steps: `T`.
      seed: of the actions.
      shared: draw the same for all rows, so that rows that see the same also do the same.
    """
    generator = np.random.default_rng(seed)

    def act(_, timestep: types.TimeStep) -> np.ndarray:
        return random_action(spec.action, timestep.observation, host.num_envs, generator, shared)

    return _run(host, act, num_steps)


def replay(host: environment.HostEnvironment, action: np.ndarray) -> Recording:
    """Returns what given actions `[T, B, ...]` lead to."""
    return _run(host, lambda time, _: action[time].copy(), len(action))


def _run(host: environment.HostEnvironment, act: Any, num_steps: int) -> Recording:
    timesteps, copies, actions = [host.reset()], [], []
    copies.append(_copy(timesteps[-1]))
    for time in range(num_steps):
        actions.append(act(time, timesteps[-1]))
        host.send(actions[-1])
        timesteps.append(host.recv())
        copies.append(_copy(timesteps[-1]))
    for timestep, copy in zip(timesteps, copies):
        assert_equal(timestep, copy)  # nobody wrote into what was handed out
    assert np.all(copies[0].step_type == types.FIRST)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *copies)
    return Recording(stacked, np.stack(actions))


def random_action(
    spec: specs.BoundedArray,
    observation: types.PyTree,
    num_envs: int,
    generator: np.random.Generator,
    shared: bool = False,
) -> np.ndarray:
    """Draws legal actions, `[B, ...]`; equal rows get equal ones if `shared`."""
    rows = 1 if shared else num_envs
    if np.issubdtype(spec.dtype, np.floating):
        action = generator.uniform(spec.minimum, spec.maximum, (rows, *spec.shape))
        return np.broadcast_to(action, (num_envs, *spec.shape)).astype(spec.dtype)
    num_values = np.broadcast_to(np.asarray(spec.maximum, np.int64) + 1, spec.shape)
    legal = np.arange(num_values.max()) < num_values[..., None]  # [A] or [D, A]
    score = generator.uniform(0.1, 1.0, (rows, *legal.shape)) * legal
    if isinstance(observation, dict) and environment.ACTION_MASK in observation:
        score = score * observation[environment.ACTION_MASK]
    score = np.broadcast_to(score, (num_envs, *legal.shape))
    return np.argmax(score, axis=-1).astype(spec.dtype)


def check_arrays(spec: environment.EnvironmentSpec, recording: Recording) -> None:
    """Asserts structure, shapes, dtypes, bounds and finiteness."""
    timestep = recording.timestep
    leading = recording.action.shape[:2]
    leading = (leading[0] + 1, leading[1])
    assert jax.tree.structure(timestep.observation) == jax.tree.structure(spec.observation)
    parts, _ = jax.tree.flatten_with_path(spec.observation)
    for (path, part), array in zip(parts, jax.tree.leaves(timestep.observation)):
        name = f"observation{jax.tree_util.keystr(path)}"
        assert type(array) is np.ndarray, name
        assert array.shape == (*leading, *part.shape), name
        assert array.dtype == part.dtype, name
        if np.issubdtype(array.dtype, np.floating):
            assert np.all(np.isfinite(array)), name
        if isinstance(part, specs.BoundedArray):
            assert np.all(array >= part.minimum), name
            assert np.all(array <= part.maximum), name
    for name, dtype in _SCALARS.items():
        array = getattr(timestep, name)
        assert type(array) is np.ndarray, name
        assert (array.shape, array.dtype) == (leading, dtype), name
    assert np.all(np.isfinite(timestep.reward))


def check_stream(spec: environment.EnvironmentSpec, timestep: types.TimeStep) -> None:
    """Asserts S1, S2, reward and discount at FIRST, and the time limit, step by step."""
    limit = spec.max_episode_steps or np.inf
    num_times, num_streams = timestep.step_type.shape
    for stream in range(num_streams):
        length, previous = 0, types.LAST  # a stream begins like what follows an ended episode
        for t in range(num_times):
            where = f"at time {t} of stream {stream}"
            step_type = timestep.step_type[t, stream]
            assert step_type in (types.FIRST, types.MID, types.LAST), where
            assert (step_type == types.FIRST) == (previous == types.LAST), where
            length = 0 if step_type == types.FIRST else length + 1
            if step_type == types.FIRST:
                assert timestep.reward[t, stream] == 0.0, where
            allowed = {0.0, 1.0} if step_type == types.LAST else {1.0}
            assert timestep.discount[t, stream] in allowed, where
            assert length < limit or (length == limit and step_type == types.LAST), where
            previous = step_type


def check_masks(spec: environment.EnvironmentSpec, recording: Recording) -> None:
    """Asserts that there is a legal action wherever one counts."""
    observation = recording.timestep.observation
    if isinstance(observation, dict) and environment.ACTION_MASK in observation:
        mask = observation[environment.ACTION_MASK]  # [T + 1, B, A] or [T + 1, B, D, A]
        assert np.all(np.any(mask, axis=-1)[~recording.timestep.last()])


def check_render(factory: environment.HostEnvironmentFactory, recording: Recording) -> None:
    """Asserts that a time step can be drawn, if the factory draws."""
    if not hasattr(factory, "render"):
        return
    image = factory.render(jax.tree.map(lambda leaf: leaf[-1, 0], recording.timestep))
    assert image.dtype == np.uint8
    assert image.ndim == 3 and image.shape[2] == 3


def check_streams_differ(
    factory: environment.HostEnvironmentFactory, num_steps: int = NUM_STEPS, num_threads: int = 1
) -> None:
    """Asserts that no two rows are one stream, nor two keys, though all choose alike."""
    env_id = np.arange(NUM_STREAMS, dtype=np.int32)
    streams = []
    for key in (jax.random.key(0), jax.random.key(1)):
        with _made(factory, key, env_id, num_threads) as host:
            recording = record(host, factory.spec, num_steps, shared=True)
        leaves = [np.swapaxes(leaf, 0, 1) for leaf in jax.tree.leaves(recording.timestep)]
        streams += [b"".join(leaf[row].tobytes() for leaf in leaves) for row in env_id]
    assert len(set(streams)) == len(streams), "two streams are copies of one another"


def assert_equal(one: types.PyTree, other: types.PyTree) -> None:
    """Asserts that two pytrees are equal bit for bit."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.tobytes() == b.tobytes()


@contextlib.contextmanager
def _made(
    factory: environment.HostEnvironmentFactory, key: Any, env_id: np.ndarray, num_threads: int
) -> Iterator[environment.HostEnvironment]:
    """Makes environments, and closes them twice."""
    host = factory.make(key, env_id, num_threads)
    assert isinstance(host, environment.HostEnvironment)
    try:
        yield host
    finally:
        host.close()
        host.close()


def _copy(tree: types.PyTree) -> types.PyTree:
    # Not `np.array`, which would hide a leaf that is something else than an array.
    return jax.tree.map(lambda leaf: leaf.copy(), tree)
