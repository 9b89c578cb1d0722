"""How much memory an agent asks for, and whether a device has it: known before anything runs."""

import math
import os
from collections.abc import Sequence

import jax

from podracers import errors, types

_UNITS = ("bytes", "kB", "MB", "GB", "TB")


def num_bytes(tree: types.PyTree) -> int:
    """Returns how many bytes the arrays of a tree take; their shapes and dtypes are enough."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def describe(memory: types.PyTree, devices: Sequence[jax.Device]) -> list[str]:
    """Returns a line on the memory of an agent; no line where it has next to none.

    Args:
      memory: of the agent, over all devices; its shapes are enough.
      devices: over which it is spread evenly.

    Raises:
      errors.UserError: it does not fit.
    """
    each = num_bytes(memory) / len(devices)
    if each < 1e4:
        return []
    local = [device for device in devices if device.process_index == jax.process_index()]
    there = _available(local)
    line = f"replay and other memory of the agent: {readable(each)} on each of {len(devices)}"
    line += f" {devices[0].device_kind} device" + "s" * (len(devices) > 1)
    if there is None:
        return [line]
    if each > there:
        raise errors.UserError(
            f"{line}, which has room for {readable(there)}: lower the agent's replay_capacity, or "
            "spread it over more devices"
        )
    return [f"{line}, of {readable(there)}"]


def readable(count: float) -> str:
    """Returns a number of bytes as people read it."""
    power = 0
    while count >= 1000.0 and power < len(_UNITS) - 1:
        count, power = count / 1000.0, power + 1
    return f"{count:.3g} {_UNITS[power]}"


def _available(devices: Sequence[jax.Device]) -> float | None:
    """Returns how many bytes each of this process's devices has room for; None if unknown."""
    if devices[0].platform == "cpu":
        try:
            # Fake devices share what the machine has.
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / len(devices)
        except (ValueError, OSError):
            return None
    statistics = devices[0].memory_stats() or {}
    return statistics.get("bytes_limit")
