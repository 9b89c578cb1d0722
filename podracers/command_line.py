"""What the scripts share: how they start JAX, and how they end."""

import argparse
import contextlib
import os
import pathlib
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import jax

from podracers import config_errors, errors, pipeline


class Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line in one line, as with any other mistake."""

    def error(self, message: str) -> NoReturn:
        """Raises `errors.UserError`."""
        raise errors.UserError(f"{message} (see --help)")


def use_compilation_cache() -> None:
    """Keeps compiled programs on disk, unless the environment says where or forbids it.

    A second start of the same configuration compiles nothing. `JAX_COMPILATION_CACHE_DIR` names
    another folder; `JAX_ENABLE_COMPILATION_CACHE=false` turns the cache off.
    """
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    wanted = {
        "jax_compilation_cache_dir": str(pathlib.Path(base) / "podracers" / "jax"),
        # Small programs are many, and cost more in all than the large one.
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in wanted.items():
        if not os.environ.get(name.upper()):
            jax.config.update(name, value)


def run(main: Callable[[], int | None]) -> None:
    """Runs a script's `main` and exits: 2 for a user's mistake, 1 for a failure, else its result.

    A mistake, and a failure whose cause is known, get one line on stderr; anything else is a bug,
    and keeps its traceback.
    """
    try:
        code = main() or 0
    except errors.UserError as error:
        # gin appends to whatever passes through the parts that it made.
        print(f"error: {config_errors.first_line(error)}", file=sys.stderr)
        code = errors.UserError.exit_code
    except errors.RunFailure as error:
        print(f"failed: {config_errors.first_line(error)}", file=sys.stderr)
        code = errors.RunFailure.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except Exception:
        traceback.print_exc()
        code = errors.RunFailure.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    if pipeline.abandoned():
        # Leaving in order would wait for threads that do not come back, and for what they hold.
        _kill_children()
        os._exit(code)
    sys.exit(code)


def _kill_children() -> None:
    """Kills the simulators in processes of their own, where /proc tells of them (Linux)."""
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            _, parent = stat.read_text().rpartition(") ")[2].split()[:2]
            if int(parent) == os.getpid():
                os.kill(int(stat.parent.name), signal.SIGKILL)
