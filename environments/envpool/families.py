"""Differences between EnvPool's families of simulators: options, time limits, system libraries.

Ends of episodes. EnvPool reports an episode's last step as truncated exactly if the simulator's
clock has expired, even if the task ended by its own rules on the same step. Some families have
clocks that options cannot set and that are not reported. Hence three kinds of `Clock`:

- `LATE`: the simulator's clock is set too late to end an episode, and the adaptor ends the episode
  at the limit. Every end that the simulator reports is a termination.
- `FLAGGED`: rewards depend on the limit (MiniGrid), or the family reports terminations (Atari): the
  simulator's clock is set to the limit, and its report is used unless there is evidence of a
  termination.
- `FIXED`: the clock cannot be set. The adaptor ends episodes at lower limits; an end at the step
  at which the clock expires is a truncation unless there is evidence of a termination.

Axis legend: `B` streams.
"""

import ctypes
import dataclasses
import enum
import glob
import pathlib
import re
import types as python_types
from collections.abc import Mapping
from typing import Any

import numpy as np

from podracers import errors

NO_LIMIT = 2**31 - 1  # EnvPool's own value for no time limit
# Exceptions of EnvPool where it cannot start a simulator.
REFUSALS = (RuntimeError, ImportError, TypeError, ValueError, AssertionError)

# Set by the runner or fixed by the contract: not options of the user.
_SET_ELSEWHERE = {
    "num_envs": "it is the runner's, by its num_envs",
    "batch_size": "all environments step together",
    "num_threads": "the runner shares out the threads",
    "seed": "it follows from the run's seed",
    "env_seed": "it follows from the run's seed",
    "max_num_players": "one agent plays",
    "gym_reset_return_info": "the adaptor needs it as it is",
    "max_episode_steps": "it is EnvPool.max_episode_steps",
}
# Options that break the contract unless they are false.
_REFUSED = {
    "reward_clip": "rewards are never clipped here: agents clip them",
    "zero_discount_on_life_loss": "discounts are 0 at terminations alone; episodic_life ends "
    "episodes with a life",
}
_PIXEL_OPTIONS = ("from_pixels", "render_width", "render_height", "render_camera_id")
_QT = "libqt5core5a libqt5gui5"  # Debian's names

_JUMANJI_CLOCKS = (
    "Cleaner",
    "Connector",
    "LevelBasedForaging",
    "MMST",
    "Maze",
    "PacMan",
    "RobotWarehouse",
    "RubiksCube",
    "SearchAndRescue",
    "SlidingTilePuzzle",
    "Snake",
    "Sokoban",
    "Tetris",
)

State = Mapping[str, np.ndarray]  # EnvPool's arrays of a step, by its own names, `[B, ...]`


class Clock(enum.Enum):
    """How episodes end at the time limit: see the module's docstring."""

    LATE = enum.auto()
    FLAGGED = enum.auto()
    FIXED = enum.auto()


@dataclasses.dataclass(frozen=True)
class Family:
    """One simulator behind EnvPool.

    Attributes:
      name: name of the simulator in messages.
      clock: how episodes end at the time limit.
      spare: number of steps between the limit and a `LATE` clock.
      evidence: names of EnvPool's arrays that are nonzero at the last step of a terminated
        episode; a task may lack some.
      options: defaults that differ from EnvPool's, for tasks that have these options.
      folders: subdirectories of its working directory, into which it writes. They are created
        beforehand, because its processes would race to create them.
    """

    name: str
    clock: Clock = Clock.LATE
    spare: int = 1
    evidence: tuple[str, ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    folders: tuple[str, ...] = ()


# By EnvPool's module. Networks stack frames (`agents.networks`), so that each frame is transferred
# and stored once.
FAMILIES = {
    "envpool.atari": Family(
        "Atari", Clock.FLAGGED, evidence=("info:terminated",), options={"stack_num": 1}
    ),
    "envpool.box2d": Family("Box2D"),
    "envpool.classic_control": Family("classic control"),
    # Its episodes last one step longer than its limit.
    "envpool.gfootball": Family("Google Research Football", spare=0),
    "envpool.highway": Family("Highway", Clock.FIXED, evidence=("info:crashed", "info:is_success")),
    "envpool.jumanji": Family("Jumanji", Clock.FIXED),
    # Only reaching a goal and hitting an obstacle give a reward.
    "envpool.minigrid": Family("MiniGrid", Clock.FLAGGED, evidence=("reward",)),
    "envpool.mujoco": Family("MuJoCo"),
    "envpool.pgx": Family("Pgx"),
    "envpool.procgen": Family(
        "Procgen",
        Clock.FIXED,
        evidence=("info:prev_level_complete",),
        options={"channel_first": False},
    ),
    "envpool.toy_text": Family("toy text"),
    # Its other actions are single buttons, without bounds.
    "envpool.vizdoom": Family(
        "ViZDoom",
        options={"stack_num": 1, "use_combined_action": True},
        folders=("_vizdoom",),
    ),
}


@dataclasses.dataclass(frozen=True)
class Task:
    """One EnvPool task with its options and its time limit.

    Attributes:
      task_id: EnvPool id.
      family: simulator behind it.
      options: EnvPool's keyword arguments, without those of the pool (numbers, threads, seeds).
      limit: EnvPool's steps after which an episode is truncated, or None.
      clock_limit: elapsed steps from which an end is a truncation, unless there is evidence of a
        termination.
      pool_spec: EnvPool's specification.
    """

    task_id: str
    family: Family
    options: Mapping[str, Any]
    limit: int | None
    clock_limit: int
    pool_spec: Any

    def terminated(self, state: State) -> np.ndarray:
        """Returns `[B]` bool, where the rules of the task end the episode."""
        done = state["done"]
        if self.family.clock is Clock.LATE or not done.any():
            return done
        timed_out = state["trunc"] | (state["elapsed_step"] >= self.clock_limit)
        by_rules = ~timed_out
        for name in self.family.evidence:
            if name in state:
                by_rules |= state[name] != 0
        return done & by_rules


def load(
    task_id: str,
    options: Mapping[str, Any],
    max_episode_steps: int | None,
    action_repeat: int = 1,
) -> Task:
    """Returns a task after checking its options; starts no simulator.

    Args:
      task_id: EnvPool id.
      options: the user's keyword arguments of EnvPool.
      max_episode_steps: time limit, in agent steps; None for the task's own.
      action_repeat: number of EnvPool's steps per agent step.

    Raises:
      errors.UserError: the task or option does not exist, or a package is missing.
    """
    import envpool  # noqa: PLC0415  (slow to import)
    from envpool.registration import registry  # noqa: PLC0415

    if task_id not in registry.specs:
        near = errors.nearest(str(task_id), envpool.list_all_envs())
        raise errors.UserError(f"EnvPool has no task {task_id!r}{near}")
    module = registry.specs[task_id][0]
    family = FAMILIES[".".join(module.split(".")[:2])]
    plain = _pool_spec(envpool, task_id, {})
    known = set(plain.config._fields)
    if family.name == "MuJoCo":
        known.update(_PIXEL_OPTIONS)
    _check_options(task_id, options, known)
    defaults = {name: value for name, value in family.options.items() if name in known}
    options = {**defaults, **options}
    default = _default_limit(task_id, family, plain.config.max_episode_steps)
    if type(action_repeat) is not int or not 0 < action_repeat < NO_LIMIT:
        raise errors.UserError(
            f"EnvPool.action_repeat: expected a positive int, got {action_repeat!r}"
        )
    limit = _check_limit(task_id, family, default, max_episode_steps, action_repeat)
    clock_limit = NO_LIMIT if limit is None else limit
    if family.clock is Clock.FIXED:
        clock_limit = NO_LIMIT if default is None else default
    elif limit is not None:
        spare = family.spare if family.clock is Clock.LATE else 0
        options["max_episode_steps"] = limit + spare
    pool_spec = _pool_spec(envpool, task_id, options)
    if pool_spec.config.max_num_players != 1:
        raise errors.UserError(
            f"EnvPool's {task_id} is played by {pool_spec.config.max_num_players} agents at once: "
            "only tasks for one agent are supported"
        )
    return Task(task_id, family, options, limit, clock_limit, pool_spec)


def cannot_start(task_id: str, error: Exception) -> errors.UserError:
    """Returns an error with the package to install, for a task that EnvPool cannot make."""
    text = " ".join(str(error).split())
    library = re.search(r"lib[\w+-]+\.so[.\d]*", text)
    if "Qt 5" in text or (library and "Qt5" in library.group()):
        return errors.UserError(
            f"EnvPool's {task_id} (Procgen) needs the libraries of Qt 5, which are not installed: "
            f"apt-get install {_QT}"
        )
    if library and isinstance(error, ImportError):
        return errors.UserError(
            f"EnvPool's {task_id} needs the system library {library.group()}, which is not "
            "installed: install the package of your system that has it"
        )
    return errors.UserError(f"EnvPool cannot make {task_id}: {text}")


def _pool_spec(envpool: python_types.ModuleType, task_id: str, options: Mapping[str, Any]) -> Any:
    try:
        return envpool.make_spec(task_id, **options)
    except REFUSALS as error:
        raise cannot_start(task_id, error) from error


def _check_options(task_id: str, options: Mapping[str, Any], known: set[str]) -> None:
    for name, value in options.items():
        if name in _SET_ELSEWHERE:
            raise errors.UserError(
                f"EnvPool.options: '{name}' is no option: {_SET_ELSEWHERE[name]}"
            )
        if name not in known:
            near = errors.nearest(name, known - set(_SET_ELSEWHERE))
            raise errors.UserError(f"EnvPool's {task_id} has no option '{name}'{near}")
        if name in _REFUSED and value:
            raise errors.UserError(f"EnvPool.options: '{name}' cannot be on: {_REFUSED[name]}")
    if options.get("noop_max", 1) < 1:  # EnvPool ends the process at 0
        raise errors.UserError(
            f"EnvPool.options: 'noop_max' must be at least 1, got {options['noop_max']!r}"
        )
    if options.get("from_pixels"):
        if not glob.glob("/usr/share/glvnd/egl_vendor.d/*.json"):
            raise errors.UserError(
                f"EnvPool's {task_id} with from_pixels needs an EGL driver, and there is none: "
                "apt-get install libegl-mesa0, or the driver of your GPU"
            )
        _load_egl()


def _load_egl() -> None:
    """Loads the EGL of EnvPool's wheel with global symbols.

    EnvPool creates its contexts with it. MuJoCo looks it up among the symbols of the process, and
    aborts the process without it. The system's EGL cannot use these contexts.
    """
    import envpool  # noqa: PLC0415  (slow to import)

    folder = pathlib.Path(envpool.__file__).parents[1] / "envpool.libs"
    for library in folder.glob("libEGL-*.so*"):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _default_limit(task_id: str, family: Family, configured: int) -> int | None:
    """Returns the default time limit of a task, or None."""
    if family.name == "Jumanji" and not task_id.rsplit("/", maxsplit=1)[-1].startswith(
        _JUMANJI_CLOCKS
    ):
        return None  # these end by construction; EnvPool's number is an upper bound
    return configured if 0 < configured < NO_LIMIT else None


def _check_limit(
    task_id: str, family: Family, default: int | None, limit: int | None, action_repeat: int
) -> int | None:
    """Returns a time limit in EnvPool's steps, from one in agent steps; None for the default."""
    if limit is None:
        return default
    if not isinstance(limit, int) or not 0 < limit * action_repeat < NO_LIMIT:
        raise errors.UserError(
            f"EnvPool.max_episode_steps: expected a positive int or None, got {limit!r}"
        )
    steps = limit * action_repeat
    if family.clock is Clock.FIXED and default is not None and steps > default:
        if steps - default < action_repeat:  # the last agent step is cut short
            return default
        raise errors.UserError(
            f"EnvPool.max_episode_steps: expected at most {-(-default // action_repeat)}, the "
            f"fixed limit of {task_id}, got {limit}"
        )
    return steps


def jax_twin(task_id: str) -> str | None:
    """Returns the gin name of a JAX implementation of the task, or None."""
    ours = {
        "CartPole-v1": "@cartpole.CartPole",
        "Pendulum-v1": "@pendulum.Pendulum",
        "Catch-v0": "@catch.Catch",
    }
    if task_id in ours:
        return ours[task_id]
    from envpool.registration import registry  # noqa: PLC0415

    name = task_id.rpartition("/")[2]
    # Jumanji's registry is not used: its import initialises a backend.
    if registry.specs[task_id][0] == "envpool.jumanji" and name != "Connector-v2":
        return f"@jumanji.Jumanji with Jumanji.name = '{name}'"
    return None
