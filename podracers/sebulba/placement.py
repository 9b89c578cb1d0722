"""Which devices act and which learn, and how streams go from the ones to the others.

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
    """A plan for one process.

    Streams are dealt in order: actor `a` has the rows from `a * B / A` on, learner device `l` those
    from `l * B / L` on. Either every actor feeds `L / A` learner devices, each with a slice of its
    own, or every learner device is fed by `A / L` actors, whose rollouts it joins.

    Attributes:
      actors: the device of each actor thread; one device may serve several.
      learners: the devices that learn.
      mesh: those of all processes, one process after the other: each has the same places.
    """

    actors: tuple[jax.Device, ...]
    learners: tuple[jax.Device, ...]
    mesh: tuple[jax.Device, ...]

    @property
    def learners_per_actor(self) -> int:
        """Learner devices that each actor cuts its rollout for; 1 where some share one."""
        return max(len(self.learners) // len(self.actors), 1)

    @property
    def actors_per_learner(self) -> int:
        """Actors whose rollouts each learner device joins; 1 where an actor feeds several."""
        return max(len(self.actors) // len(self.learners), 1)

    def describe(self) -> str:
        """Returns the plan as people read it."""
        kind = self.learners[0].device_kind
        shared = set(self.actors) & set(self.learners)
        actors = _numbers(self.actors)
        if set(self.actors) == set(self.learners):
            threads = f"{len(self.actors)} actor thread" + "s" * (len(self.actors) > 1)
            return f"{kind} {actors} shared by {threads} and the learner"
        note = f" ({_numbers(sorted(shared, key=lambda d: d.id))} shared)" if shared else ""
        return f"actors on {kind} {actors}, learner on {kind} {_numbers(self.learners)}{note}"


def _numbers(devices: Sequence[jax.Device]) -> str:
    return ", ".join(str(device.id) for device in devices)


def plan(
    devices: Sequence[Sequence[jax.Device]],
    process: int,
    num_envs: int,
    rows_per_actor: int,
    actor_devices: Sequence[int] | None,
    learner_devices: Sequence[int] | None,
) -> Placement:
    """Returns which devices act and which learn.

    Args:
      devices: those of each process, in the order of the processes.
      process: index of this process.
      num_envs: `B`, of one process.
      rows_per_actor: divisor of the streams of every actor.
      actor_devices: indices into `devices`, one for each actor thread; None to choose.
      learner_devices: indices, each once; None for those that do not act, or for all where none is
        left over.

    Raises:
      errors.UserError: there is no such device, or the streams do not divide.
    """
    if len({len(each) for each in devices}) > 1:
        raise errors.UserError(
            "the processes have different numbers of devices: "
            f"{', '.join(str(len(each)) for each in devices)}"
        )
    count = len(devices[process])
    actors, learners = actor_devices, learner_devices
    for name, chosen in (("actor_devices", actors), ("learner_devices", learners)):
        if chosen is not None:
            _require(name, chosen, count)
    if learners is not None and len(set(learners)) < len(learners):
        raise errors.UserError(f"Sebulba.learner_devices = {tuple(learners)} names a device twice")
    if actors is None and learners is None:
        actors, learners = _choose(count, num_envs, rows_per_actor)
    elif actors is None:
        left = [index for index in range(count) if index not in set(learners)]
        most = max(len(learners) // _LEARNERS_PER_ACTOR, 1)
        actors = left[:most] or learners[:1]
    elif learners is None:
        learners = [index for index in range(count) if index not in set(actors)] or range(count)
    _check(num_envs, rows_per_actor, len(actors), len(learners))
    local = devices[process]
    return Placement(
        actors=tuple(local[index] for index in actors),
        learners=tuple(local[index] for index in learners),
        mesh=tuple(each[index] for each in devices for index in learners),
    )


def _require(name: str, chosen: Sequence[int], count: int) -> None:
    beyond = [index for index in chosen if not 0 <= index < count]
    if beyond:
        raise errors.UserError(
            f"Sebulba.{name} = {tuple(chosen)}: this machine has {count} devices, 0 to "
            f"{count - 1}, and no device {beyond[0]}"
        )
    if not chosen:
        raise errors.UserError(f"Sebulba.{name} is empty: name at least one device")


def _fits(num_envs: int, rows_per_actor: int, actors: int, learners: int) -> bool:
    even = actors % learners == 0 or learners % actors == 0
    return even and num_envs % math.lcm(actors * rows_per_actor, learners) == 0


def _choose(count: int, num_envs: int, rows_per_actor: int) -> tuple[range, range]:
    """Returns the split that uses most devices, and of those the one nearest to 1 : 3."""
    if count == 1:
        return range(1), range(1)
    splits = [
        (actors, learners)
        for actors in range(1, count)
        for learners in range(1, count - actors + 1)
        if _fits(num_envs, rows_per_actor, actors, learners)
    ]
    if not splits:
        return range(1), range(1, 2)
    actors, learners = max(
        splits,
        key=lambda split: (sum(split), -abs(split[1] / split[0] - _LEARNERS_PER_ACTOR)),
    )
    return range(actors), range(actors, actors + learners)


def _check(num_envs: int, rows_per_actor: int, actors: int, learners: int) -> None:
    if actors % learners and learners % actors:
        raise errors.UserError(
            f"{actors} actors cannot feed {learners} learner devices evenly: one number has to "
            "divide the other; set Sebulba.actor_devices and Sebulba.learner_devices"
        )
    if not _fits(num_envs, rows_per_actor, actors, learners):
        unit = math.lcm(actors * rows_per_actor, learners)
        lower = num_envs // unit * unit
        near = " or ".join(str(number) for number in (lower, lower + unit) if number)
        raise errors.UserError(
            f"Sebulba.num_envs = {num_envs} does not divide over {actors} actors of "
            f"{rows_per_actor} batches and {learners} learner devices: use {near}"
        )
