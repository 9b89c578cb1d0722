"""Settings of a runner that `scripts/tune.py` tries.

Settings are values by parameter. A parameter is a field of the runner, except `devices` (how many
act) and `actor_threads` (of each of them), which stand for Sebulba's placement.
"""

from collections.abc import Sequence
from typing import Any

from podracers import errors

Settings = dict[str, Any]
# Field of the runner that each parameter sets.
FIELDS = {
    "num_envs": "num_envs",
    "devices": "actor_devices",
    "actor_threads": "actor_devices",
    "batches_per_actor": "batches_per_actor",
    "num_threads": "num_threads",
    "reset_batch": "reset_batch",
    "rollout_length": "rollout_length",
}
_RESET_BATCHES = (1, 4, 16, 64, 256)
_MAX_PER_DEVICE = 8  # actor threads of a device, and batches of an actor


def parse(texts: Sequence[str], fields: Sequence[str], runner: str) -> dict[str, list | None]:
    """Returns the values to try by parameter; None to derive them from the settings.

    A text is `NAME` or `NAME=VALUE,VALUE`; none stands for all parameters but `rollout_length`.

    Raises:
      errors.UserError: the runner has no such parameter, or a value is invalid.
    """
    known, chosen = [name for name, field in FIELDS.items() if field in fields], {}
    for text in texts or [name for name in known if name != "rollout_length"]:
        name, equals, rest = text.partition("=")
        errors.require_known(f"--parameters: {runner} has no", name, known)
        values = rest.split(",") if equals else []
        none = "None" if name == "reset_batch" else ""
        if not all(value == none or (value.isdecimal() and int(value)) for value in values):
            raise errors.UserError(
                f"--parameters {name}: expected whole numbers such as {name}=2,4, got '{rest}'"
            )
        chosen[name] = [None if value == none else int(value) for value in values] or None
    return chosen


def values(name: str, settings: Settings, num_devices: int, num_cores: int) -> tuple[list, list]:
    """Returns the values above and below the current one, the nearest first."""
    now = settings[name]
    if name == "devices":
        return [*range(now + 1, num_devices + 1)], [*range(now - 1, 0, -1)]
    if name == "reset_batch":  # None resets every stream
        sizes = [size for size in _RESET_BATCHES if size < settings["num_envs"]]
        if now is None:
            return [], sizes[::-1]
        return [*(x for x in sizes if x > now), None], [x for x in sizes[::-1] if x < now]
    most, parts = {
        "num_envs": (64 * now, now),
        "rollout_length": (4 * now, 4),
        "num_threads": (2 * num_cores, now),
    }.get(name, (_MAX_PER_DEVICE, now))
    powers = [2**n for n in range(1, max(most, now).bit_length())]
    halves = [now // power for power in powers if power <= parts and now % power == 0]
    return [now * power for power in powers if now * power <= most], halves


def fields(settings: Settings, start: Settings, num_devices: int) -> dict[str, Any]:
    """Returns the runner's fields, by name, for the parameters that differ from the start.

    `devices` devices act, and as many others learn as divide; if all act, all learn, too.
    """
    changed = {name: value for name, value in settings.items() if value != start[name]}
    if "devices" in changed or "actor_threads" in changed:
        acting, threads = settings["devices"], settings["actor_threads"]
        actors = [device for device in range(acting) for _ in range(threads)]
        first = 0 if acting >= num_devices else acting
        sizes = range(max(num_devices - first, 1), 0, -1)
        learning = next(n for n in sizes if n % len(actors) == 0 or len(actors) % n == 0)
        changed["actor_devices"] = tuple(actors)
        changed["learner_devices"] = tuple(range(first, first + learning))
    return {name: value for name, value in changed.items() if FIELDS.get(name, name) == name}
