"""Settings of a runner that `scripts/tune.py` tries.

Settings are values of the runner's fields by name. From settings, a parameter leads to others in
directions: the values above, nearest first, and those below.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from podracers import errors

Settings = dict[str, Any]
# Fields of the runner that each parameter sets.
_SPLIT = ("actor_devices", "learner_devices")
FIELDS = {
    "num_envs": ("num_envs",),
    "devices": _SPLIT,
    "actor_threads": _SPLIT,
    "batches_per_actor": ("batches_per_actor",),
    "num_threads": ("num_threads",),
    "reset_batch": ("reset_batch",),
    "rollout_length": ("rollout_length",),
}
LEARNT = ("num_envs", "rollout_length")  # these change learning, not only its speed
_OPTIONAL = ("batches_per_actor", "num_threads", "reset_batch")  # these may be None
_RESET_BATCHES = (1, 4, 16, 64, 256)
_MAX_PER_DEVICE = 8  # actor threads of a device, and batches of an actor


@dataclasses.dataclass(frozen=True)
class Machine:
    """The machine, and the defaults that a runner chooses on it."""

    num_devices: int
    num_cores: int  # of the host
    is_host: bool = False  # whether environments are stepped on the host
    actors: tuple[int, ...] = ()  # index of the device of each actor thread
    learners: tuple[int, ...] = ()  # index of each learner device
    num_batches: int | None = None  # of each actor


def available(fields: Sequence[str]) -> list[str]:
    """Returns the parameters of a runner with these fields."""
    return [name for name, own in FIELDS.items() if set(own) <= set(fields)]


def parse(
    texts: Sequence[str], fields: Sequence[str], runner: str
) -> dict[str, list[int | None] | None]:
    """Returns the values to try by parameter; None to derive them from the settings.

    Args:
      texts: `NAME` or `NAME=VALUE,VALUE` each.
      fields: of the runner.
      runner: its name.

    Raises:
      errors.UserError: the runner has no such parameter, or a value is invalid.
    """
    known, chosen = available(fields), {}
    for text in texts:
        name, equals, rest = text.partition("=")
        if name not in known:
            hint = errors.nearest(name, known)
            raise errors.UserError(f"--parameters: {runner} has no '{name}'{hint}")
        chosen[name] = [_value(name, each) for each in rest.split(",")] if equals else None
    return chosen


def _value(name: str, text: str) -> int | None:
    if text == "None" and name in _OPTIONAL:
        return None
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise errors.UserError(
        f"--parameters {name}: expected whole numbers such as {name}=2,4, got '{text}'"
    )


def start(names: Sequence[str], values: Mapping[str, Any]) -> Settings:
    """Returns the searched fields with their values of the experiment."""
    fields = dict.fromkeys(field for name in names for field in FIELDS[name])
    return {field: tuple(v) if isinstance(v := values[field], list) else v for field in fields}


def directions(
    name: str, values: Sequence[Any] | None, settings: Settings, machine: Machine
) -> list[list[Settings]]:
    """Returns the settings that a parameter leads to, from near to far in each direction."""
    lists = [[value] for value in values] if values else _values(name, settings, machine)
    changes = {"devices": _with_acting, "actor_threads": _with_threads}
    change = changes.get(name, lambda settings, value, _: settings | {name: value})
    made = [[change(settings, value, machine) for value in own] for own in lists]
    return [[each for each in own if each is not None] for own in made]


def _values(name: str, settings: Settings, machine: Machine) -> tuple[Sequence[Any], Sequence[Any]]:
    """Returns the values above and below the current one, the nearest first."""
    now, cores = settings.get(name), machine.num_cores
    found: tuple[Sequence[Any], Sequence[Any]] = ([], [])
    if name == "num_envs":
        found = _doubled(now, 64 * now)
    elif name == "rollout_length":
        found = _doubled(now, 4 * now, 4)
    elif name == "batches_per_actor":
        found = _doubled(now or machine.num_batches or 1, _MAX_PER_DEVICE)
    elif name == "num_threads" and machine.is_host:  # of simulators
        found = _doubled(now or cores, 2 * cores)
    elif name == "actor_threads":
        found = _doubled(_num_threads(settings, machine), _MAX_PER_DEVICE)
    elif name == "devices":
        actors, learners = map(set, _split(settings, machine))
        acting = machine.num_devices if actors & learners else len(actors)
        found = range(acting + 1, machine.num_devices + 1), range(acting - 1, 0, -1)
    elif name == "reset_batch":  # None resets every stream
        most = settings.get("num_envs") or _RESET_BATCHES[-1] + 1
        now = most if now is None else now
        above = [value for value in _RESET_BATCHES if now < value < most]
        above += [None] if settings[name] is not None else []
        below = [value for value in _RESET_BATCHES[::-1] if value < now]
        found = above, below
    return found


def _doubled(now: int, most: int, parts: int | None = None) -> tuple[list[int], list[int]]:
    """Returns doubles up to `most`, and whole halves down to one of `parts` parts."""
    doubles = [now << n for n in range(1, most.bit_length()) if now << n <= most]
    shares = [1 << n for n in range(1, now.bit_length()) if (1 << n) <= (parts or now)]
    return doubles, [now // share for share in shares if now % share == 0]


def _split(settings: Settings, machine: Machine) -> tuple[tuple[int, ...], tuple[int, ...]]:
    actors, learners = (settings.get(name) for name in _SPLIT)
    return actors or machine.actors, learners or machine.learners


def _num_threads(settings: Settings, machine: Machine) -> int:
    actors, _ = _split(settings, machine)
    return len(actors) // max(len(set(actors)), 1) or 1


def _with_acting(settings: Settings, acting: int, machine: Machine) -> Settings | None:
    """Lets `acting` devices act; if all act, all learn, too; else as many others as divide."""
    count = machine.num_devices
    if not 1 <= acting <= count:
        return None
    first, most = (0, count) if acting == count else (acting, count - acting)
    threads = _num_threads(settings, machine)
    actors = tuple(device for device in range(acting) for _ in range(threads))
    learning = next(n for n in range(most, 0, -1) if _divides(n, len(actors)))
    return _with_split(settings, (actors, tuple(range(first, first + learning))), machine)


def _with_threads(settings: Settings, threads: int, machine: Machine) -> Settings | None:
    """Changes the number of actor threads of each acting device."""
    actors, learners = _split(settings, machine)
    fed = tuple(device for device in dict.fromkeys(actors) for _ in range(threads))
    if fed != actors and not _divides(len(fed), len(learners)):
        return None
    return _with_split(settings, (fed, learners), machine)


def _divides(one: int, other: int) -> bool:
    return one % other == 0 or other % one == 0


def _with_split(settings: Settings, split: Any, machine: Machine) -> Settings:
    same = split == _split(settings, machine)
    return settings if same else settings | dict(zip(_SPLIT, split))
