"""The Runner protocol: acting, stepping environments and updating, independent of the algorithm."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax

from podracers import metrics, types


@runtime_checkable
class Runner(Protocol):
    """Frozen dataclass of static configuration, built with `agent=` and `environment=`.

    Attributes:
      num_envs: streams over all devices, of one member of the population.
      rollout_length: agent steps of each stream between updates.
      steps_per_update: agent steps of one update, over all streams, all devices and one member of
        the population.
      population: number of independent seeds trained at once. With more than one, parameters and
        metrics carry a leading axis `[P]`.
      population_values: by option of the agent, one number for each member; empty if members
        differ only in their seeds (see `podracers.population`).
      updates_per_dispatch: largest number of updates of a `step`; None if one dispatch takes any.
      timeout: seconds that a step of a host simulator may take; None without host simulators.
    """

    num_envs: int
    rollout_length: int
    steps_per_update: int
    population: int
    population_values: Mapping[str, Sequence[float]]
    updates_per_dispatch: int | None
    timeout: float | None

    def trace(self, seed: int) -> jax.stages.Traced:
        """Returns the traced program of one update, without running it."""

    def init(self, seed: int) -> Any:
        """Returns the pytree of arrays that a checkpoint holds; member `p` is seeded `seed + p`."""

    def step(self, state: Any, num_updates: int) -> tuple[Any, metrics.Report]:
        """Runs `num_updates` updates, each of one rollout from every stream and one `Agent.update`.

        `state` is donated. The report may still be computed on the device when the call returns.
        """

    def actor_params(self, state: Any) -> types.PyTree:
        """Returns the parameters for acting; valid until `state` is donated."""

    def describe(self) -> list[str]:
        """Returns lines for the start of a run: devices, batch and placement."""

    def diagnostics(self) -> metrics.Diagnostics:
        """Returns the host's times by activity since the last call; empty if not measured."""

    def close(self) -> None:
        """Frees threads and simulators."""
