"""Memory of a device and of this process: limits, and the parts that a runner uses."""

import os
from collections.abc import Sequence
from typing import Any

import jax
import psutil

from podracers import errors, parallel


def usage(runner: Any, devices: Sequence[jax.Device]) -> list[str]:
    """Returns lines on the memory of a device: of replay, and on accelerators of an update.

    The `learner` of the runner's state is on each of the devices; the rest is split evenly.

    Raises:
      errors.UserError: the state with the observations of one rollout, or an update with its
        temporary memory, needs more memory than a device has.
    """
    where = f"on each of {len(devices)} {devices[0].device_kind} device{'s' * (len(devices) > 1)}"
    limit = _limit(devices)

    def line(name: str, size: float) -> str:
        of_limit = "" if limit is None else f", of {parallel.readable_bytes(limit)}"
        text = f"{name}: {parallel.readable_bytes(size)} {where}{of_limit}"
        if limit is not None and size > limit:
            raise errors.UserError(
                f"{text}: lower replay_capacity, num_envs, rollout_length, or the size of batches "
                "or networks"
            )
        return text

    state = jax.eval_shape(lambda: runner.init(0))
    spec = runner.environment.spec
    num_streams = runner.population * runner.num_envs * spec.num_agents
    observations = parallel.num_bytes(spec.observation) * num_streams * (runner.rollout_length + 1)
    split = parallel.num_bytes(state._replace(learner=())) + observations
    line("state and observations", parallel.num_bytes(state.learner) + split / len(devices))
    memory = parallel.num_bytes(state.memory) / len(devices)
    lines = [line("replay and other agent memory", memory)] if memory >= 1e4 else []
    if devices[0].platform == "cpu":
        return lines
    analysis = runner.trace(0).lower().compile().memory_analysis()  # the run reuses the program
    if analysis is None:  # this backend has none
        return lines
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    total = analysis.argument_size_in_bytes + results + analysis.temp_size_in_bytes
    return [*lines, line("an update", total)]


def _limit(devices: Sequence[jax.Device]) -> float | None:
    """Returns the number of bytes of each of this process's devices; None if unknown."""
    local = [device for device in devices if device.process_index == jax.process_index()]
    if local[0].platform == "cpu":  # fake devices share the memory of the machine
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / len(local)
    try:
        return (local[0].memory_stats() or {}).get("bytes_limit")
    except jax.errors.JaxRuntimeError:  # a device that programs are only compiled for
        return None


def in_use() -> dict[str, float]:
    """Returns the GB in use: `process`, of this process, and `device`, the most of its devices'.

    Devices that share the memory of the process, such as CPUs, are left out.
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    used = {"process": [psutil.Process().memory_info().rss]}
    used["device"] = [stat["bytes_in_use"] for stat in stats if "bytes_in_use" in stat]
    return {name: max(sizes) / 1e9 for name, sizes in used.items() if sizes}
