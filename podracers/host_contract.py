"""Checks of the contract of host environments (`environment.HostEnvironmentFactory`).

Axis legend: `T` time, `B` streams.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from podracers import contract, environment, errors, types, video

NUM_STREAMS = 4
_FIRST_STREAM = 5  # streams of a thread need not begin at 0
_NUM_THREADS = 2
_PAIRS = slice(-1), slice(1, None)  # time steps, and those after them


class Recording(NamedTuple):
    """The time steps and actions of `B` streams, with next-step reset."""

    timestep: types.TimeStep  # [T + 1, B, ...]
    action: np.ndarray  # [T, B, ...]


class _BrokenError(Exception):
    """Time steps cannot be recorded; the arguments are the faults, one line each."""


def environment_faults(
    candidate: environment.HostEnvironmentFactory,
    num_steps: int = 200,
    again: Any = None,
    stage: contract.Stage = contextlib.nullcontext,
) -> list[str]:
    """Returns the faults of the first stage that has any, one line each.

    Takes `T` steps of random legal actions. See `contract.environment_faults`.
    """
    if faults := contract.static_faults(candidate):
        return faults
    if not getattr(getattr(candidate, "__dataclass_params__", None), "frozen", False):
        return ["the factory is not a frozen dataclass: `@dataclasses.dataclass(frozen=True)`"]
    env_id = np.arange(_FIRST_STREAM, _FIRST_STREAM + NUM_STREAMS, dtype=np.int32)
    try:
        with stage(f"{num_steps} random steps of {NUM_STREAMS} streams"):
            before = contract.generators()
            with simulators(candidate, env_id) as host:
                recording = record(host, candidate.spec, num_steps)
            _require_rules(candidate.spec, recording.timestep)
        try:
            filmed = video.drawable(candidate)
        except errors.UserError as error:
            with stage(f"no picture: {error}"):
                pass
        else:
            with stage("a picture"):
                _require_picture(candidate, filmed, recording.timestep)
        with stage("one seed twice, together and with other neighbours"):
            for rows, cause in (
                (slice(0, NUM_STREAMS), "it draws from a generator without a seed"),
                (slice(2, NUM_STREAMS), "a stream depends on its neighbours in the batch"),
            ):
                streams = candidate.spec.streams_of(np.arange(NUM_STREAMS)[rows])
                expected = jax.tree.map(lambda leaf, rows=streams: leaf[:, rows], recording)
                with simulators(again or candidate, env_id[rows]) as host:
                    act = functools.partial(lambda actions, t, _: actions[t], expected.action)
                    repeated = _run(host, candidate.spec, num_steps, act)
                if _bits(repeated) != _bits(expected):
                    raise _BrokenError(contract.seed_fault(before, cause))
    except _BrokenError as error:
        return list(error.args)
    return []


def equal_actions(
    factory: environment.HostEnvironmentFactory, num_steps: int = 200
) -> list[Recording]:
    """Returns recordings of two seeds, in which all streams get equal actions.

    Streams differ unless the environment has no chance, or ignores its seeds; `num_different`.
    """
    recordings = []
    for seed in (0, 1):
        with simulators(factory, np.arange(NUM_STREAMS, dtype=np.int32), seed) as host:
            recordings.append(record(host, factory.spec, num_steps, shared=True))
    return recordings


def num_different(recordings: list[Recording]) -> int:
    """Returns the number of different streams in all recordings together."""
    streams = {
        _bits(jax.tree.map(lambda leaf, row=row: leaf[:, row], recording.timestep))
        for recording in recordings
        for row in range(recording.action.shape[1])
    }
    return len(streams)


@contextlib.contextmanager
def simulators(
    factory: environment.HostEnvironmentFactory, env_id: np.ndarray, seed: int = 0
) -> Iterator[environment.HostEnvironment]:
    """Makes environments, and closes them twice."""
    host = factory.make(jax.random.key(seed), env_id, _NUM_THREADS)
    if missing := contract.missing_members(host, environment.HostEnvironment):
        raise _BrokenError(*(f"make returned an object without {member}" for member in missing))
    try:
        if host.num_envs != len(env_id):
            raise _BrokenError(f"num_envs is {host.num_envs} for {len(env_id)} streams")
        yield host
    finally:
        host.close()
        host.close()


def record(
    host: environment.HostEnvironment,
    spec: environment.EnvironmentSpec,
    num_steps: int,
    shared: bool = False,
) -> Recording:
    """Returns `T` steps of random legal actions from the first reset; all rows may share keys."""
    draw = jax.jit(jax.vmap(functools.partial(environment.random_action, spec.action)))
    rows = host.num_envs * spec.num_agents
    keys = jax.random.split(jax.random.key(0), (num_steps, rows))
    keys = keys[:, [0] * rows] if shared else keys
    return _run(host, spec, num_steps, lambda t, seen: np.asarray(draw(seen.observation, keys[t])))


def _run(
    host: environment.HostEnvironment,
    spec: environment.EnvironmentSpec,
    num_steps: int,
    act: Callable[[int, types.TimeStep], np.ndarray],
) -> Recording:
    """Plays actions `act(t, timestep)`; raises `_BrokenError` for a result that is no time step."""
    expected = spec.timesteps(host.num_envs * spec.num_agents)
    timesteps, actions, copies = [], [], []
    for time in range(num_steps + 1):
        if time:
            actions.append(act(time - 1, timesteps[-1]))
            host.send(actions[-1].copy())
        timestep, name = (host.recv(), "recv") if time else (host.reset(), "reset")
        if faults := environment.structure_faults(name, timestep, expected):
            raise _BrokenError(*faults)
        if others := {type(leaf).__name__ for leaf in jax.tree.leaves(timestep)} - {"ndarray"}:
            raise _BrokenError(f"{name} returned {', '.join(others)}, expected NumPy arrays")
        timesteps.append(timestep)
        copies.append(jax.tree.map(np.copy, timestep))
    if _bits(timesteps) != _bits(copies):
        raise _BrokenError("an array changed after it was returned: each call returns new ones")
    return Recording(jax.tree.map(lambda *leaves: np.stack(leaves), *copies), np.stack(actions))


def _bits(tree: types.PyTree) -> bytes:
    """Returns the bits of all arrays of a tree."""
    return b"".join(leaf.tobytes() for leaf in jax.tree.leaves(tree))


def _require_rules(spec: environment.EnvironmentSpec, timestep: types.TimeStep) -> None:
    """Raises the rules that time steps `[T + 1, B, ...]` break; FIRST follows LAST alone."""
    last = timestep.last()
    fresh = np.concatenate([np.ones_like(last[:1]), last[:-1]])
    time = np.arange(len(fresh))[:, None]
    length = time - np.maximum.accumulate(np.where(fresh, time, 0))  # steps since the reset
    rules = jax.vmap(jax.vmap(functools.partial(contract.timestep_faults, spec)))
    broken = jax.device_get(jax.jit(rules)(timestep, length))
    if spec.agent_axis:
        together = jax.tree.map(
            lambda x: x.reshape(len(x), -1, *spec.agent_axis, *x.shape[2:]), timestep
        )
        before, after = (jax.tree.map(lambda x, at=at: x[at], together) for at in _PAIRS)
        broken |= jax.device_get(jax.vmap(jax.vmap(contract.agents_faults))(before, after))
    if faults := [text for text, occurred in broken.items() if np.any(occurred)]:
        raise _BrokenError(*faults)


def _require_picture(factory: Any, filmed: Any, timestep: types.TimeStep) -> None:
    """Raises the fault of a picture by a factory, or by the simulators of its form that films."""
    try:
        if filmed is factory:
            image = factory.render(jax.tree.map(lambda leaf: leaf[-1, 0], timestep))
        else:
            with simulators(filmed, np.arange(1, dtype=np.int32)) as host:
                host.reset()
                # pyrefly: ignore[missing-attribute]  # optional: `filmed()` has checked it
                image = host.render()[0]
        video.picture(filmed, image)
    except errors.UserError as error:
        raise _BrokenError(str(error)) from error
