"""Captures a trace for the JAX profiler: one gin value, `Experiment.profile_update`."""

import contextlib
import pathlib
from collections.abc import Iterator

import jax

_FOLDER = "profile"


class Profiler:
    """Traces the dispatch in which one given update is taken.

    TensorBoard (with its profile plugin) and Perfetto read what is written.

    Args:
      directory: of the run; the trace goes to `profile` in it.
      update: which one; None for no trace.
    """

    def __init__(self, directory: pathlib.Path, update: int | None):
        self._folder = directory / _FOLDER
        self._update = update

    @contextlib.contextmanager
    def around(self, first: int, count: int) -> Iterator[None]:
        """Traces what is inside if it takes the update: `count` of them, from `first` on."""
        if self._update is None or not first <= self._update < first + count:
            yield
            return
        with jax.profiler.trace(self._folder, create_perfetto_trace=True):
            yield
