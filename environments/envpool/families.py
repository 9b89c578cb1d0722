"""Differences between EnvPool's families of simulators: options, time limits, system libraries.

EnvPool reports an episode's last step as truncated exactly if the simulator's clock has expired,
even if the task ended by its own rules on the same step. Some families have clocks that options
cannot set and that are not reported. Hence three kinds of `Clock`:

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
import importlib.metadata
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from environments import adaptors
from podracers import errors

NO_LIMIT = 2**31 - 1  # EnvPool's own value for no time limit

# Set by the runner or the adaptor; rewards are never clipped, and discounts are 0 at terminations
# alone: not options of the user.
_SET_ELSEWHERE = {
    *("num_envs", "batch_size", "num_threads", "seed", "env_seed", "max_num_players"),
    *("gym_reset_return_info", "max_episode_steps", "reward_clip", "zero_discount_on_life_loss"),
}
_PIXEL_OPTIONS = ("from_pixels", "render_width", "render_height", "render_camera_id")

_JUMANJI_CLOCKS = (
    *("Cleaner", "Connector", "LevelBasedForaging", "MMST", "Maze", "PacMan", "RobotWarehouse"),
    *("RubiksCube", "SearchAndRescue", "SlidingTilePuzzle", "Snake", "Sokoban", "Tetris"),
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
      clock: how episodes end at the time limit.
      spare: number of steps between the limit and a `LATE` clock.
      evidence: names of EnvPool's arrays that are nonzero at the last step of a terminated
        episode; a task may lack some.
      options: defaults that differ from EnvPool's, for tasks that have these options.
      metrics: reductions of entries of `info` that are reported (`EnvPool.metrics`), for tasks that
        have them: whether a task was solved.
      folders: subdirectories of its working directory, into which it writes. They are created
        beforehand, because its processes would race to create them.
    """

    clock: Clock = Clock.LATE
    spare: int = 1
    evidence: tuple[str, ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, str] = dataclasses.field(default_factory=dict)
    folders: tuple[str, ...] = ()


# By EnvPool's module. Networks stack frames (`agents.networks`), so that each frame is transferred
# and stored once.
FAMILIES = {
    "envpool.atari": Family(Clock.FLAGGED, evidence=("info:terminated",), options={"stack_num": 1}),
    "envpool.box2d": Family(),
    "envpool.classic_control": Family(),
    # Its episodes last one step longer than its limit.
    "envpool.gfootball": Family(spare=0),
    "envpool.highway": Family(
        Clock.FIXED,
        evidence=("info:crashed", "info:is_success"),
        metrics={"is_success": "max", "crashed": "max"},
    ),
    "envpool.jumanji": Family(Clock.FIXED, evidence=("info:solved",), metrics={"solved": "max"}),
    # Only reaching a goal and hitting an obstacle give a reward.
    "envpool.minigrid": Family(Clock.FLAGGED, evidence=("reward",)),
    # MetaWorld counts a success at any step (Yu et al. 2019, https://arxiv.org/abs/1910.10897), and
    # robotics at the end of the episode (Plappert et al. 2018, https://arxiv.org/abs/1802.09464).
    "envpool.mujoco": Family(metrics={"success": "max", "is_success": "last", "solved": "max"}),
    "envpool.pgx": Family(),
    "envpool.procgen": Family(
        Clock.FIXED, evidence=("info:prev_level_complete",), options={"channel_first": False}
    ),
    "envpool.toy_text": Family(),
    # Its other actions are single buttons, without bounds.
    "envpool.vizdoom": Family(
        options={"stack_num": 1, "use_combined_action": True}, folders=("_vizdoom",)
    ),
}


# The game of Pgx, and its options, that games of two players implement.
GAMES: dict[str, tuple[str, dict[str, int]]] = {
    "AnimalShogi-v1": ("animal_shogi", {}),
    "Backgammon-v1": ("backgammon", {}),
    "Chess-v1": ("chess", {}),
    "ConnectFour-v1": ("connect_four", {}),
    "GardnerChess-v1": ("gardner_chess", {}),
    "Go13x13-v1": ("go_9x9", {"size": 13}),
    "Go19x19-v1": ("go_19x19", {}),
    "Go9x9-v1": ("go_9x9", {}),
    "Hex-v1": ("hex", {}),
    "KuhnPoker-v1": ("kuhn_poker", {}),
    "LeducHoldem-v1": ("leduc_holdem", {}),
    "Othello-v1": ("othello", {}),
    "Shogi-v1": ("shogi", {}),
    "TicTacToe-v1": ("tic_tac_toe", {}),
}

_RELEASE = [*map(int, re.findall(r"\d+", importlib.metadata.version("envpool")))]
# Jumanji's tasks that EnvPool before 1.2.7 starts from one problem, whatever the seed.
ONE_PROBLEM = frozenset(
    f"Jumanji/{name}"
    for name in (
        *("BinPack", "CVRP", "Connector", "FlatPack", "JobShop", "LevelBasedForaging", "MMST"),
        *("MultiCVRP", "PacMan", "RobotWarehouse", "SearchAndRescue", "Sokoban", "Tetris"),
    )
    if _RELEASE < [1, 2, 7]
)


@dataclasses.dataclass(frozen=True)
class Task:
    """One EnvPool task with its options and its time limit.

    Attributes:
      family: simulator of the task.
      options: EnvPool's keyword arguments, without the pool's (numbers, threads, seeds).
      limit: EnvPool's steps after which an episode is truncated, or `NO_LIMIT`.
      clock_limit: elapsed steps from which an end is a truncation, unless there is evidence of a
        termination.
      pool_spec: EnvPool's specification.
    """

    family: Family
    options: Mapping[str, Any]
    limit: int
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
    """Returns a task after checking its options (see `EnvPool`); starts no simulator.

    Raises:
      errors.UserError: the task or option does not exist, or a package is missing.
    """
    from envpool.registration import registry  # noqa: PLC0415

    errors.require_known("EnvPool has no task", task_id, registry.specs)
    module = ".".join(registry.specs[task_id][0].split(".")[:2])
    family = FAMILIES[module]
    config = _pool_spec(task_id, {}).config
    known = {*config._fields, *(_PIXEL_OPTIONS if module == "envpool.mujoco" else ())}
    _check_options(task_id, options)
    options = {name: value for name, value in family.options.items() if name in known} | {**options}
    limit = default = config.max_episode_steps if config.max_episode_steps > 0 else NO_LIMIT
    # Tasks without a clock end by construction; EnvPool's number is an upper bound.
    if module == "envpool.jumanji" and not task_id.rpartition("/")[2].startswith(_JUMANJI_CLOCKS):
        limit = default = NO_LIMIT
    if max_episode_steps is not None:
        limit = max_episode_steps * action_repeat
    clock_limit = limit
    if family.clock is Clock.FIXED:
        if limit >= default + action_repeat:
            raise errors.UserError(
                f"EnvPool.max_episode_steps: expected at most {-(-default // action_repeat)}, "
                f"the fixed limit of {task_id}, got {max_episode_steps}"
            )
        limit, clock_limit = min(limit, default), default  # may cut an agent step short
    elif limit < NO_LIMIT:
        options["max_episode_steps"] = limit + (family.clock is Clock.LATE) * family.spare
    pool_spec = _pool_spec(task_id, options, known)
    players = pool_spec.config.max_num_players
    if players > 2 or (players == 2 and "info:current_player" not in pool_spec.state_array_spec):
        raise errors.UserError(
            f"EnvPool's {task_id} has {players} players: expected a task for one, or for two that "
            "move in turn"
        )
    if players == 2 and (limit < NO_LIMIT or action_repeat > 1):
        raise errors.UserError(
            f"EnvPool's {task_id} is a game of two players: expected no max_episode_steps, and "
            "action_repeat = 1"
        )
    return Task(family, options, limit, clock_limit, pool_spec)


def _pool_spec(task_id: str, options: Mapping[str, Any], known: Iterable[str] | None = None) -> Any:
    import envpool  # noqa: PLC0415  (slow to import)

    with adaptors.options_of(f"EnvPool's {task_id}", options, known):
        return envpool.make_spec(task_id, **options)


def _check_options(task_id: str, options: Mapping[str, Any]) -> None:
    for name in options:
        if name in _SET_ELSEWHERE:
            raise errors.UserError(
                f"EnvPool.options: '{name}' is set by the runner, by EnvPool.max_episode_steps or "
                "by the contract (agents clip rewards, 'episodic_life' ends episodes with a life)"
            )
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
