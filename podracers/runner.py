"""What a runner is: it moves an experiment forward and knows nothing of any algorithm."""

from typing import Any, Protocol, runtime_checkable

from podracers import metrics, types


@runtime_checkable
class Runner(Protocol):
    """A frozen dataclass of static configuration, built with `agent=` and `environment=`.

    Attributes:
      steps_per_update: agent steps of one update, over all streams, all devices and one member of
        the population.
      population: how many independent seeds are trained at once. With more than one, parameters and
        metrics carry a leading axis `[P]`.
    """

    steps_per_update: int
    population: int

    def init(self, seed: int) -> Any:
        """Returns the pytree of arrays that a checkpoint holds; member `p` is seeded `seed + p`."""

    def step(self, state: Any, num_updates: int) -> tuple[Any, metrics.Report]:
        """Takes `num_updates` updates: each is one rollout from every stream and one learning step.

        `state` is donated. The report is on the device and is not waited for.
        """

    def actor_params(self, state: Any) -> types.PyTree:
        """Returns what acting needs; alive until `state` is donated."""

    def describe(self) -> list[str]:
        """Returns a few lines for the start of a run: devices, batch, what goes where."""

    def close(self) -> None:
        """Frees threads and simulators."""
