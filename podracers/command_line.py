"""What the scripts share: how they start JAX, and how they end."""

import argparse
import os
import pathlib
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import jax

from podracers import closing, config_errors, distributed, errors, pipeline, watchdog


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
        code, cause = main() or 0, None
    except errors.UserError as error:
        # gin appends to whatever passes through the parts that it made.
        code, cause = errors.UserError.exit_code, config_errors.first_line(error)
        said = f"error: {cause}"
    except errors.RunFailure as error:
        code, cause = errors.RunFailure.exit_code, config_errors.first_line(error)
        said = f"failed: {cause}"
    except KeyboardInterrupt:
        code, cause = 130, "interrupted"
        said = cause
    except Exception as error:
        distributed.hear_causes()
        code, cause = errors.RunFailure.exit_code, f"{type(error).__name__}: {error}"
        said = traceback.format_exc().rstrip()
    if not cause and closing.failures():  # which have been said
        code = errors.RunFailure.exit_code
    several = distributed.is_several()
    if cause:
        # First, for whoever says what another process told it ends at once.
        distributed.fail(cause, code)
        print(said, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    if (cause and several) or pipeline.abandoned():
        # Leaving in order would wait for processes that are gone, or for threads that do not come
        # back, and for what they hold.
        if not cause:
            distributed.leave()
        watchdog.kill_children()
        os._exit(code)
    if not several:  # else the others may take their time
        watchdog.expect_end()
    sys.exit(code)
