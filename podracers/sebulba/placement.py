"""Which devices act and which learn, and how streams are divided over both.

Axis legend: `B` streams, `A` actors, `L` learner devices.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax

from podracers import errors

_LEARNERS_PER_ACTOR = 3  # Hessel et al. 2021, section "Sebulba": about as many in their examples


@dataclasses.dataclass(frozen=True)
class Placement:
    """The devices of one process.

    Streams are divided in order: actor `a` has the rows from `a * B / A` on, learner device `l`
    those from `l * B / L` on. Either every actor feeds `L / A` learner devices with a slice each,
    or every learner device joins the rollouts of `A / L` actors.
    """

    actors: tuple[jax.Device, ...]  # one for each actor thread; one device may serve several
    learners: tuple[jax.Device, ...]
    mesh: tuple[jax.Device, ...]  # learners of all processes in turn, which are placed alike

    @property
    def learners_per_actor(self) -> int:
        """Learner devices that each actor feeds; 1 where actors share one."""
        return max(len(self.learners) // len(self.actors), 1)

    @property
    def actors_per_learner(self) -> int:
        """Actors whose rollouts each learner device joins; 1 where an actor feeds several."""
        return max(len(self.actors) // len(self.learners), 1)

    def describe(self) -> str:
        """Returns the placement as text."""

        def ids(devices):
            return ", ".join(str(device.id) for device in devices)

        kind = self.learners[0].device_kind
        if set(self.actors) == set(self.learners):
            threads = f"{len(self.actors)} actor thread" + "s" * (len(self.actors) > 1)
            return f"{kind} {ids(self.actors)} shared by {threads} and the learner"
        return f"actors on {kind} {ids(self.actors)}, learner on {kind} {ids(self.learners)}"


def plan(
    devices: Sequence[Sequence[jax.Device]],
    process: int,
    num_envs: int,
    rows_per_actor: int,
    actor_devices: Sequence[int] | None,
    learner_devices: Sequence[int] | None,
) -> Placement:
    """Chooses the devices that act and the devices that learn.

    Args:
      devices: the devices of each process, in the order of the processes.
      process: index of this process.
      num_envs: `B`, of one process.
      rows_per_actor: divisor of the streams of every actor.
      actor_devices: indices into `devices`, one for each actor thread; None to choose.
      learner_devices: indices, each once; None for those that do not act, or for all where all act.

    Raises:
      errors.UserError: there is no such device, or the streams do not divide.
    """
    counts = [len(local) for local in devices]
    if len(set(counts)) > 1:
        raise errors.UserError(f"the processes have different numbers of devices: {counts}")
    count, local, actors, learners = counts[0], devices[process], actor_devices, learner_devices
    for name, chosen in (("actor_devices", actors), ("learner_devices", learners)):
        if chosen is not None and not set() < set(chosen) <= set(range(count)):
            raise errors.UserError(
                f"Sebulba.{name}: expected indices of this machine's {count} devices, 0 to "
                f"{count - 1}, got {tuple(chosen)}"
            )
    if learners is not None and len(set(learners)) < len(learners):
        raise errors.UserError(f"Sebulba.learner_devices = {tuple(learners)} names a device twice")

    if learners is None:
        if actors is None:
            actors, learners = _choose(count, num_envs, rows_per_actor)
        else:
            learners = [index for index in range(count) if index not in set(actors)] or range(count)
    elif actors is None:
        others = [index for index in range(count) if index not in set(learners)]
        actors = others[: max(len(learners) // _LEARNERS_PER_ACTOR, 1)] or learners[:1]

    num_actors, num_learners = len(actors), len(learners)
    if num_actors % num_learners and num_learners % num_actors:
        raise errors.UserError(
            f"{num_actors} actors cannot feed {num_learners} learner devices evenly: one number "
            "has to divide the other; set Sebulba.actor_devices and Sebulba.learner_devices"
        )
    unit = math.lcm(num_actors * rows_per_actor, num_learners)
    if num_envs % unit:
        near = errors.nearest_multiples(num_envs, unit)
        raise errors.UserError(
            f"Sebulba.num_envs = {num_envs} does not divide over {num_actors} actors of "
            f"{rows_per_actor} batches and {num_learners} learner devices: use {near}"
        )
    return Placement(
        actors=tuple(local[index] for index in actors),
        learners=tuple(local[index] for index in learners),
        mesh=tuple(row[index] for row in devices for index in learners),
    )


def _choose(count: int, num_envs: int, rows_per_actor: int) -> tuple[range, range]:
    """Returns the split that uses most devices, and of those the one nearest to 1 : 3."""
    if count == 1:
        return range(1), range(1)
    splits = [
        (actors, learners)
        for actors in range(1, count)
        for learners in range(1, count - actors + 1)
        if (actors % learners == 0 or learners % actors == 0)
        and num_envs % math.lcm(actors * rows_per_actor, learners) == 0
    ]
    actors, learners = max(
        splits or [(1, 1)],
        key=lambda split: (sum(split), -abs(split[1] / split[0] - _LEARNERS_PER_ACTOR)),
    )
    return range(actors), range(actors, actors + learners)
