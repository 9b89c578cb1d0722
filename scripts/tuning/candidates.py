"""Which settings of a runner `scripts/tune.py` tries.

A candidate is the settings of a runner that are searched. From one candidate a parameter leads to
others, in directions: the values above it, the nearest first, and those below.
"""

import ast
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from podracers import errors

LEARNT = ("num_envs", "rollout_length")  # these change what is learnt, not only how fast
_SPLIT = ("actor_devices", "learner_devices")
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
    """What candidates depend on besides one another."""

    num_devices: int  # of the process
    num_cores: int  # of the host
    is_host: bool = False  # whether the environment is stepped by threads of its own, on the host
    # The index of the device of each actor thread, where the experiment does not say.
    actors: tuple[int, ...] = ()
    # The index of each learner device, where the experiment does not say.
    learners: tuple[int, ...] = ()
    num_batches: int | None = None  # of each actor, where the experiment does not say


# Values above and below the current one, the nearest first.
_Values = tuple[Sequence[Any], Sequence[Any]]


def _doubled(now: int, most: int, parts: int | None = None) -> _Values:
    """Returns doubles up to `most`, and whole halves, down to one of so many parts."""
    doubles = [now << n for n in range(1, most.bit_length()) if now << n <= most]
    shares = [1 << n for n in range(1, now.bit_length()) if (1 << n) <= (parts or now)]
    return doubles, [now // share for share in shares if now % share == 0]


def _simulator_threads(candidate: Candidate, machine: Machine) -> _Values:
    if not machine.is_host:  # environments in JAX are stepped by its own threads
        return [], []
    return _doubled(candidate.get("num_threads") or machine.num_cores, 2 * machine.num_cores)


def _resets(candidate: Candidate, machine: Machine) -> _Values:
    """Climbs to None at the end: that every lane is reset at every step."""
    del machine
    now = candidate.get("reset_batch")
    streams = candidate.get("num_envs") or _RESET_BATCHES[-1] + 1
    if now is None or isinstance(now, str):
        return [], _RESET_BATCHES[::-1]
    above = [value for value in _RESET_BATCHES if now < value < streams]
    return [*above, None], [value for value in _RESET_BATCHES[::-1] if value < now]


# Devices are split: some of them act, with as many threads each; where all act, all learn, too.


def _split(candidate: Candidate, machine: Machine) -> tuple[tuple[int, ...], tuple[int, ...]]:
    actors, learners = (candidate.get(name) for name in _SPLIT)
    return actors or machine.actors, learners or machine.learners


def _acting_devices(candidate: Candidate, machine: Machine) -> _Values:
    actors, learners = map(set, _split(candidate, machine))
    now = machine.num_devices if actors & learners else len(actors)
    return range(now + 1, machine.num_devices + 1), range(now - 1, 0, -1)


def _num_threads(candidate: Candidate, machine: Machine) -> int:
    actors, _ = _split(candidate, machine)
    return len(actors) // max(len(set(actors)), 1) or 1


def _with_acting(candidate: Candidate, acting: int, machine: Machine) -> Candidate | None:
    """Lets so many devices act, and as many others learn as can be fed evenly."""
    count = machine.num_devices
    if not 1 <= acting <= count:
        return None
    first, most = (0, count) if acting == count else (acting, count - acting)
    threads = _num_threads(candidate, machine)
    actors = tuple(device for device in range(acting) for _ in range(threads))
    learning = next(n for n in range(most, 0, -1) if _divides(n, len(actors)))
    return _changed(candidate, (actors, tuple(range(first, first + learning))), machine)


def _with_threads(candidate: Candidate, threads: int, machine: Machine) -> Candidate | None:
    """Changes how many threads feed a device, and leaves the devices as they are."""
    actors, learners = _split(candidate, machine)
    fed = tuple(device for device in dict.fromkeys(actors) for _ in range(threads))
    if fed != actors and not _divides(len(fed), len(learners)):
        return None
    return _changed(candidate, (fed, learners), machine)


def _divides(one: int, other: int) -> bool:
    return one % other == 0 or other % one == 0


def _changed(candidate: Candidate, split: Any, machine: Machine) -> Candidate:
    if split == _split(candidate, machine):
        return candidate
    return candidate.changed(**dict(zip(_SPLIT, split)))


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A coordinate of the search."""

    fields: tuple[str, ...]  # of the runner that it sets
    # The values above and below that of a candidate.
    values: Callable[[Candidate, Machine], _Values]
    # Returns the candidate with another value, None where there is none; None for one field that
    # holds the value itself.
    move: Callable[[Candidate, int, Machine], Candidate | None] | None = None
    optional: bool = False  # whether the value may be None


_KNOWN = {
    "num_envs": Parameter(
        ("num_envs",), lambda c, m: _doubled(c.get("num_envs"), 64 * c.get("num_envs"))
    ),
    "devices": Parameter(_SPLIT, _acting_devices, _with_acting),
    "actor_threads": Parameter(
        _SPLIT, lambda *at: _doubled(_num_threads(*at), 8), move=_with_threads
    ),
    "batches_per_actor": Parameter(
        ("batches_per_actor",),
        lambda c, m: _doubled(c.get("batches_per_actor") or m.num_batches or 1, 8),
        optional=True,
    ),
    "num_threads": Parameter(("num_threads",), _simulator_threads, optional=True),
    "reset_batch": Parameter(("reset_batch",), _resets, optional=True),
    "rollout_length": Parameter(
        ("rollout_length",),
        lambda c, m: _doubled(c.get("rollout_length"), 4 * c.get("rollout_length"), 4),
    ),
}
PARAMETERS = tuple(_KNOWN)
FIELDS = tuple(dict.fromkeys(field for each in _KNOWN.values() for field in each.fields))


@dataclasses.dataclass(frozen=True)
class Choice:
    """A parameter that is searched."""

    name: str  # one of `PARAMETERS`
    # Those to try; None for those that follow from the candidate.
    values: tuple[Any, ...] | None = None

    @classmethod
    def parse(cls, text: str, fields: Sequence[str], runner: str) -> "Choice":
        """Returns what `NAME` or `NAME=VALUE,VALUE` says of a runner with these fields.

        Raises:
          errors.UserError: there is no such parameter, or a value is none.
        """
        name, equals, rest = text.partition("=")
        known = available(fields)
        if name not in known:
            raise errors.UserError(
                f"--parameters: {runner} has no '{name}'{errors.nearest(name, known)}"
            )
        return cls(
            name, tuple(_value(name, shown) for shown in rest.split(",")) if equals else None
        )

    def directions(self, candidate: Candidate, machine: Machine) -> list[list[Candidate]]:
        """Returns the candidates that this parameter leads to, from near to far."""
        parameter = _KNOWN[self.name]
        if self.values is None:
            directions = parameter.values(candidate, machine)
        else:
            directions = [[value] for value in self.values]

        def moved(value: Any) -> Candidate | None:
            if parameter.move:
                return parameter.move(candidate, value, machine)
            return candidate.changed(**{self.name: value})

        made = [[moved(value) for value in direction] for direction in directions]
        return [[each for each in direction if each is not None] for direction in made]


def _value(name: str, text: str) -> int | None:
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        value = text
    if (type(value) is int and value > 0) or (value is None and _KNOWN[name].optional):
        return value
    raise errors.UserError(
        f"--parameters {name}: expected whole numbers such as {name}=2,4, got '{text}'"
    )


def available(fields: Sequence[str]) -> list[str]:
    """Returns which parameters a runner with these fields has."""
    return [name for name, each in _KNOWN.items() if set(each.fields) <= set(fields)]


def start(choices: Sequence[Choice], values: Mapping[str, Any]) -> Candidate:
    """Returns where the search starts, from the values that the experiment gives its runner."""
    names = dict.fromkeys(field for each in choices for field in _KNOWN[each.name].fields)
    as_tuple = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return Candidate(tuple((name, as_tuple[name]) for name in names))
