"""Which settings of a runner `scripts/tune.py` tries.

A candidate is the settings of a runner that are searched. From one candidate a parameter leads to
others, in directions: the values above it, the nearest first, and those below.
"""

import ast
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from podracers import errors

_FIELDS = {  # what each parameter sets
    "num_envs": ("num_envs",),
    "devices": ("actor_devices", "learner_devices"),
    "actor_threads": ("actor_devices", "learner_devices"),
    "batches_per_actor": ("batches_per_actor",),
    "num_threads": ("num_threads",),
    "reset_batch": ("reset_batch",),
    "rollout_length": ("rollout_length",),
}
PARAMETERS = tuple(_FIELDS)
LEARNT = ("num_envs", "rollout_length")  # these change what is learnt, not only how fast
_RESET_BATCHES = (1, 4, 16, 64, 256)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Settings of a runner, by name."""

    values: tuple[tuple[str, Any], ...]

    def get(self, name: str) -> Any:
        """Returns a value; None where it is not searched."""
        return dict(self.values).get(name)

    def changed(self, **values: Any) -> "Candidate":
        """Returns a candidate that differs in these values."""
        return Candidate(tuple((dict(self.values) | values).items()))

    def bindings(self, runner: str) -> list[str]:
        """Returns gin bindings for a runner of this name."""
        return [f"{runner}.{name} = {value!r}" for name, value in self.values]

    def describe(self, start: "Candidate") -> str:
        """Returns what is not as in `start`."""
        other = dict(start.values)
        names = [f"{name} {value}" for name, value in self.values if value != other[name]]
        return ", ".join(names) or "the experiment's own values"


@dataclasses.dataclass(frozen=True)
class Machine:
    """What candidates depend on besides one another.

    Attributes:
      num_devices: of the process.
      num_cores: of the host.
      is_host: the environment is stepped by threads of its own, on the host.
      actors: the index of the device of each actor thread, where nothing is said of it.
      learners: the index of each learner device, where nothing is said of it.
      num_batches: of each actor, where nothing is said of it.
    """

    num_devices: int
    num_cores: int
    is_host: bool = False
    actors: tuple[int, ...] = ()
    learners: tuple[int, ...] = ()
    num_batches: int | None = None

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Machine":
        """Returns it as a trial found it."""
        names = [field.name for field in dataclasses.fields(cls)]
        lists = {name: tuple(facts[name]) for name in ("actors", "learners")}
        return cls(**{name: facts[name] for name in names} | lists)


@dataclasses.dataclass(frozen=True)
class Choice:
    """A parameter that is searched.

    Attributes:
      name: one of `PARAMETERS`.
      values: those to try; None to climb from the start.
    """

    name: str
    values: tuple[Any, ...] | None = None

    @classmethod
    def parse(cls, text: str, fields: Sequence[str], runner: str) -> "Choice":
        """Returns what `NAME` or `NAME=VALUE,VALUE` says.

        Args:
          text: of the user.
          fields: of the runner.
          runner: its name.

        Raises:
          errors.UserError: there is no such parameter, or a value is none.
        """
        name, equals, rest = text.partition("=")
        known = available(fields)
        if name not in known:
            raise errors.UserError(
                f"--parameters: {runner} has no '{name}'{errors.nearest(name, known)}"
            )
        if not equals:
            return cls(name)
        values = tuple(map(_value, rest.split(",")))
        optional = name not in (*LEARNT, "devices", "actor_threads")
        for value, shown in zip(values, rest.split(",")):
            if not ((isinstance(value, int) and value > 0) or (value is None and optional)):
                raise errors.UserError(
                    f"--parameters {name}: expected whole numbers such as {name}=2,4, got '{shown}'"
                )
        return cls(name, values)

    def directions(self, candidate: Candidate, machine: Machine) -> list[list[Candidate]]:
        """Returns the candidates that this parameter leads to, from near to far."""
        move = _MOVES.get(self.name, _set)
        if self.values is not None:
            made = [move(candidate, self.name, value, machine) for value in self.values]
            return [[each] for each in made if each is not None]
        below, above = _LADDERS[self.name](candidate, machine)
        made = [
            [move(candidate, self.name, value, machine) for value in values]
            for values in (above, below)
        ]
        return [[each for each in direction if each is not None] for direction in made]


def available(fields: Sequence[str]) -> list[str]:
    """Returns which parameters a runner with these fields has."""
    return [name for name, needed in _FIELDS.items() if set(needed) <= set(fields)]


def searched_fields(choices: Sequence[Choice]) -> list[str]:
    """Returns the fields of the runner that these parameters set."""
    return list(dict.fromkeys(field for each in choices for field in _FIELDS[each.name]))


def start(choices: Sequence[Choice], values: Mapping[str, Any]) -> Candidate:
    """Returns where the search starts, from the values that the experiment gives its runner."""
    names = searched_fields(choices)
    as_tuple = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return Candidate(tuple((name, as_tuple[name]) for name in names))


def _value(text: str) -> Any:
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return text
    return text if isinstance(value, bool) else value


def _set(candidate: Candidate, name: str, value: Any, machine: Machine) -> Candidate:
    del machine
    return candidate.changed(**{name: value})


# How devices are dealt: `a` of them act, with `t` threads each; where all act, all learn, too.


def _dealt(candidate: Candidate, machine: Machine) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (
        candidate.get("actor_devices") or machine.actors,
        candidate.get("learner_devices") or machine.learners,
    )


def _num_acting(candidate: Candidate, machine: Machine) -> int:
    actors, learners = map(set, _dealt(candidate, machine))
    return machine.num_devices if actors & learners else len(actors)


def _num_threads(candidate: Candidate, machine: Machine) -> int:
    actors, _ = _dealt(candidate, machine)
    return len(actors) // max(len(set(actors)), 1) or 1


def _deal(acting: int, threads: int, candidate: Candidate, machine: Machine) -> Candidate | None:
    """Returns a split that can be fed evenly and leaves as few devices over as possible."""
    count = machine.num_devices
    if not 1 <= acting <= count:
        return None
    first, most = (0, count) if acting == count else (acting, count - acting)
    actors = tuple(device for device in range(acting) for _ in range(threads))
    learning = next(n for n in range(most, 0, -1) if len(actors) % n == 0 or n % len(actors) == 0)
    learners = tuple(range(first, first + learning))
    if (actors, learners) == _dealt(candidate, machine):
        return candidate
    return candidate.changed(actor_devices=actors, learner_devices=learners)


def _move_devices(
    candidate: Candidate, name: str, value: int, machine: Machine
) -> Candidate | None:
    del name
    return _deal(value, _num_threads(candidate, machine), candidate, machine)


def _move_threads(
    candidate: Candidate, name: str, value: int, machine: Machine
) -> Candidate | None:
    """Changes how many threads feed a device, and leaves the devices as they are."""
    del name
    actors, learners = _dealt(candidate, machine)
    dealt = tuple(device for device in dict.fromkeys(actors) for _ in range(value))
    if dealt == actors:
        return candidate
    if len(dealt) % len(learners) and len(learners) % len(dealt):
        return None
    return candidate.changed(actor_devices=dealt, learner_devices=learners)


_MOVES = {"devices": _move_devices, "actor_threads": _move_threads}

# Values below and above the current one, the nearest first.
_Ladder = tuple[list[Any], list[Any]]


def _doubling(current: int, most: int, least: int = 1) -> _Ladder:
    above, below = [], []
    while (value := (above or [current])[-1] * 2) <= most:
        above.append(value)
    while (value := (below or [current])[-1]) % 2 == 0 and value // 2 >= least:
        below.append(value // 2)
    return below, above


def _num_envs(candidate: Candidate, machine: Machine) -> _Ladder:
    del machine
    now = candidate.get("num_envs")
    return _doubling(now, now * 64)


def _rollout_length(candidate: Candidate, machine: Machine) -> _Ladder:
    del machine
    now = candidate.get("rollout_length")
    return _doubling(now, now * 4, -(-now // 4))


def _batches(candidate: Candidate, machine: Machine) -> _Ladder:
    return _doubling(candidate.get("batches_per_actor") or machine.num_batches or 1, 8)


def _simulator_threads(candidate: Candidate, machine: Machine) -> _Ladder:
    if not machine.is_host:  # environments in JAX are stepped by its own threads
        return [], []
    return _doubling(candidate.get("num_threads") or machine.num_cores, 2 * machine.num_cores)


def _resets(candidate: Candidate, machine: Machine) -> _Ladder:
    """Climbs to None at the end: that every lane is reset at every step."""
    del machine
    now = candidate.get("reset_batch")
    streams = candidate.get("num_envs") or _RESET_BATCHES[-1] + 1
    below = [value for value in _RESET_BATCHES if now is None or value < now]
    above = [value for value in _RESET_BATCHES if now is not None and now < value < streams]
    return below[::-1], [*above, None] if now is not None else []


def _acting_devices(candidate: Candidate, machine: Machine) -> _Ladder:
    now = _num_acting(candidate, machine)
    return list(range(now - 1, 0, -1)), list(range(now + 1, machine.num_devices + 1))


def _threads(candidate: Candidate, machine: Machine) -> _Ladder:
    return _doubling(_num_threads(candidate, machine), 8)


_LADDERS: dict[str, Callable[[Candidate, Machine], _Ladder]] = {
    "num_envs": _num_envs,
    "devices": _acting_devices,
    "actor_threads": _threads,
    "batches_per_actor": _batches,
    "num_threads": _simulator_threads,
    "reset_batch": _resets,
    "rollout_length": _rollout_length,
}
