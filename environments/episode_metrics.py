"""Numbers of episodes from the numbers of their steps, for environments on the host.

Axis legend: `B` streams, `N` some of them. This module does not import JAX: worker processes start
faster without it.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from podracers import errors

REDUCTIONS = ("last", "max", "mean", "sum")


def check(name: str, reductions: Mapping[str, str]) -> None:
    """Raises `errors.UserError` for a reduction that does not exist; `name` is the option's."""
    for entry, reduction in reductions.items():
        errors.require_known(f"{name}['{entry}']: got", reduction, REDUCTIONS)


def reduce(reduction: str, so_far: Any, number: Any, count: Any, xp: Any = np) -> Any:
    """Returns a number of an episode after a step, by one of `REDUCTIONS`.

    `so_far` is the number of the `count` steps before, `number` the step's own, and `xp` is `numpy`
    or `jax.numpy`.
    """
    match reduction:
        case "max":
            return xp.where(count > 0, xp.maximum(so_far, number), number)
        case "mean":
            return so_far + (number - so_far) / (count + 1)
        case "sum":
            return so_far + number
    return number


class EpisodeMetrics:
    """Reduces the entries of `info` over the steps of the running episodes of `B` streams.

    `reductions` has one of `REDUCTIONS` for each entry. A step without an entry is skipped, and an
    entry that no step of an episode had is 0.
    """

    def __init__(self, reductions: Mapping[str, str], num_envs: int):
        self._reductions = dict(reductions)
        self._values = {name: np.zeros(num_envs, np.float64) for name in reductions}
        self._counts = {name: np.zeros(num_envs, np.int64) for name in reductions}

    def restart(self, rows: Any) -> None:
        """Begins the episodes of some streams, given by a mask `[B]` or an index."""
        for name in self._reductions:
            self._values[name][rows] = 0.0
            self._counts[name][rows] = 0

    def add(self, name: str, value: Any, rows: Any) -> None:
        """Adds an entry of one step, `[N]`, of the streams `rows`, a mask `[B]` or an index."""
        so_far, count = self._values[name][rows], self._counts[name][rows]
        self._values[name][rows] = reduce(self._reductions[name], so_far, value, count)
        self._counts[name][rows] += 1

    def read(self) -> dict[str, np.ndarray]:
        """Returns the numbers of the episodes so far by name, new float32 arrays `[B]`."""
        return {name: values.astype(np.float32) for name, values in self._values.items()}
