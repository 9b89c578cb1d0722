"""What a runner is: it moves an experiment forward and knows nothing of any algorithm."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax

from podracers import metrics, types


@runtime_checkable
class Runner(Protocol):
    """A frozen dataclass of static configuration, built with `agent=` and `environment=`.

    Attributes:
      steps_per_update: agent steps of one update, over all streams, all devices and one member of
        the population.
      population: number of independent seeds trained at once. With more than one, parameters and
        metrics carry a leading axis `[P]`.
      population_values: by option of the agent, one number for each member; empty where members
        differ in their seeds alone (see `podracers.population`).
      updates_per_dispatch: most updates that a caller should ask of `step`, so that it may
        stop in between; None where any number costs one dispatch.
      timeout: seconds that a step of a simulator on the host may take; None where there is none.
    """

    steps_per_update: int
    population: int
    population_values: Mapping[str, tuple[float, ...]]
    updates_per_dispatch: int | None
    timeout: float | None

    def trace(self, seed: int) -> jax.stages.Traced:
        """Traces one update and runs nothing, so that parts that do not fit are refused early.

        Returns:
          The program of an update, as far as it is traced: it can be compiled and looked at.
        """

    def init(self, seed: int) -> Any:
        """Returns the pytree of arrays that a checkpoint holds; member `p` is seeded `seed + p`."""

    def step(self, state: Any, num_updates: int) -> tuple[Any, metrics.Report]:
        """Takes `num_updates` updates: each is one rollout from every stream and one learning step.

        `state` is donated. The report is on the device and need not be waited for.
        """

    def actor_params(self, state: Any) -> types.PyTree:
        """Returns what acting needs; alive until `state` is donated."""

    def describe(self) -> list[str]:
        """Returns a few lines for the start of a run: devices, batch, what goes where."""

    def diagnostics(self) -> metrics.Diagnostics:
        """Returns where the host's time went since the last call; empty where nobody measured."""

    def close(self) -> None:
        """Frees threads and simulators."""
