"""The Runner protocol: acting, stepping environments and updating, independent of the algorithm."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax

from podracers import metrics, types


@runtime_checkable
class Runner(contextlib.AbstractContextManager["Runner"], Protocol):
    """Frozen dataclass of static configuration, built with `agent=` and `environment=`.

    The end of its context closes it. A runner whose members' options evolve has a field
    `pbt_period`: updates between changes, each of which gets a log line. Where it is not None,
    states have a field `evolution`, and `actor_params` returns `population.Acting`.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def num_envs(self) -> int:
        """Environments over all devices, of one member of the population."""

    @property
    def rollout_length(self) -> int:
        """Agent steps of each stream between updates."""

    @property
    def steps_per_update(self) -> int:
        """Agent steps of one update, over all streams, all devices and one member."""

    @property
    def population(self) -> int:
        """Number of seeds trained at once; of several, arrays have a leading axis `[P]`."""

    @property
    def population_values(self) -> Mapping[str, Sequence[float]]:
        """Numbers for each member, by option of the agent; see `podracers.population`."""

    @property
    def updates_per_dispatch(self) -> int | None:
        """Largest number of updates of a `step`; None if one dispatch takes any."""

    @property
    def timeout(self) -> float | None:
        """Seconds that a step of a host simulator may take; None without host simulators."""

    def trace(self, seed: int) -> jax.stages.Traced:
        """Returns the traced program of one update, without running it."""

    def init(self, seed: int) -> Any:
        """Returns the pytree of arrays that a checkpoint holds; member `p` is seeded `seed + p`."""

    def step(
        self, state: Any, num_updates: int, report: metrics.Report | None = None
    ) -> tuple[Any, metrics.Report]:
        """Runs `num_updates` updates, each of one rollout from every stream and one `Agent.update`.

        Args:
          state: the state before the updates; it is donated.
          num_updates: a number of updates.
          report: the report of earlier updates, to which the new updates are added one by one, so
            that any split into calls gives the same bits; None to begin a report.

        Returns:
          The state after the updates, and the report, which the device may still compute.
        """

    def actor_params(self, state: Any) -> types.PyTree:
        """Returns the parameters for acting; valid until `state` is donated."""

    def describe(self) -> list[str]:
        """Returns lines for the start of a run: devices, batch and placement."""

    def diagnostics(self) -> metrics.Diagnostics:
        """Returns the host's times by activity since the last call; empty if not measured."""

    def close(self) -> None:
        """Frees threads and simulators."""
