"""How much memory a run asks for, and whether a device has it: known before anything runs."""

import math
import os
from collections.abc import Sequence
from typing import Any

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
    there = _room(devices)
    line = f"replay and other memory of the agent: {_on_each(each, devices)}"
    if there is None:
        return [line]
    if each > there:
        raise errors.UserError(
            f"{line}, which has room for {readable(there)}: lower the agent's replay_capacity, or "
            "spread it over more devices"
        )
    return [f"{line}, of {readable(there)}"]


def require_room(
    state: Any,
    observation: types.PyTree,
    num_steps: int,
    devices: Sequence[jax.Device],
) -> None:
    """Refuses what cannot fit: the state of a run, and the observations of one rollout.

    It is less than what a run takes: the network's activations are not counted, for one.

    Args:
      state: of a runner, over all devices; its shapes are enough. Its `learner` lies on each of
        them, the rest is spread evenly.
      observation: the specification of one observation.
      num_steps: time steps of a rollout, over all streams of all devices.
      devices: over which the state is spread.

    Raises:
      errors.UserError: it does not fit.
    """
    spread = num_bytes(state._replace(learner=())) + num_bytes(observation) * num_steps
    each = num_bytes(state.learner) + spread / len(devices)
    there = _room(devices)
    if there is not None and each > there:
        raise errors.UserError(
            f"the state and the observations of a rollout take {_on_each(each, devices)}, which "
            f"has room for {readable(there)}: lower num_envs, rollout_length or the network's size"
        )


def _on_each(each: float, devices: Sequence[jax.Device]) -> str:
    plural = "s" * (len(devices) > 1)
    kind = devices[0].device_kind
    return f"{readable(each)} on each of {len(devices)} {kind} device{plural}"


def readable(count: float) -> str:
    """Returns a number of bytes as people read it."""
    power = 0
    while count >= 1000.0 and power < len(_UNITS) - 1:
        count, power = count / 1000.0, power + 1
    return f"{count:.3g} {_UNITS[power]}"


def _room(devices: Sequence[jax.Device]) -> float | None:
    """Returns how many bytes each of this process's devices has room for; None if unknown."""
    local = [device for device in devices if device.process_index == jax.process_index()]
    if local[0].platform == "cpu":
        try:
            # Fake devices share what the machine has.
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / len(local)
        except (ValueError, OSError):
            return None
    statistics = local[0].memory_stats() or {}
    return statistics.get("bytes_limit")
