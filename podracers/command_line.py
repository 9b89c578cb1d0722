"""What the scripts share: how they start JAX, and how they end."""

import argparse
import contextlib
import os
import pathlib
import runpy
import sys
import sysconfig
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jax

from podracers import errors
from podracers.hosts import peers, processes
from podracers.supervision import pipeline, watchdog
from podracers.training import config

_OWN = tuple(f"{config.ROOT / name}{os.sep}" for name in (*config.PACKAGES, "scripts"))
_RUNNERS = "gin/runners"


class Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line in one line, as with any other mistake.

    Args:
      options: those of `argparse.ArgumentParser`; the description is printed as it is.
    """

    def __init__(self, **options: Any):
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})

    def error(self, message: str) -> NoReturn:
        """Raises `errors.UserError`."""
        raise errors.UserError(f"{message} (see --help)")

    def add_experiment(self, required: bool = False) -> None:
        """Adds the options that describe an experiment; `gin_files` reads them."""
        self.add_argument(
            "--gin_file", action="append", default=[], required=required, metavar="PATH"
        )
        self.add_argument("--gin_bindings", action="append", default=[], metavar="'NAME = VALUE'")
        self.add_argument(
            "--runner",
            metavar="NAME",
            help="anakin or sebulba, or a .gin file; default: the experiment's own, or else anakin "
            "for environments in JAX and sebulba for those on the host",
        )


def count(text: str) -> int:
    """Returns a number of things from the command line, as the `type` of an option.

    Raises:
      argparse.ArgumentTypeError: it is no whole number, or less than 1.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got '{text}'")
    return int(text)


def gin_files(arguments: argparse.Namespace) -> list[str]:
    """Returns the .gin files that a command line names, the runner's last.

    Raises:
      errors.UserError: there is no such runner.
    """
    return [*arguments.gin_file, *([runner_file(arguments.runner)] if arguments.runner else ())]


def runner_file(name: str) -> str:
    """Returns the .gin file that chooses a runner: one of gin/runners, by name or by path.

    Raises:
      errors.UserError: there is none.
    """
    if name.endswith(".gin"):
        config.require_file(name)
        return name
    known = [file.stem for file in (config.SHIPPED / _RUNNERS).glob("*.gin")]
    if name not in known:
        raise errors.UserError(f"there is no runner '{name}'{errors.nearest(name, known)}")
    return f"{_RUNNERS}/{name}.gin"


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


def require_accelerator(devices: pathlib.Path = pathlib.Path("/dev")) -> None:
    """Starts JAX's backend; refuses the CPU of a machine that shows an accelerator.

    Where `JAX_PLATFORMS` is set, only its platforms are required.

    Args:
      devices: the folder of device files.

    Raises:
      errors.UserError: JAX cannot start, or does not find the accelerator.
    """
    platforms = jax.config.jax_platforms
    try:
        platform = jax.default_backend()
    except RuntimeError as error:
        raise errors.UserError(f"JAX_PLATFORMS={platforms}: {errors.first_line(error)}") from error
    found = [f for name in ("nvidia", "accel", "vfio/") for f in devices.glob(f"{name}[0-9]*")]
    if platform == "cpu" and not platforms and found:
        raise errors.UserError(
            f"this machine has an accelerator ({found[0]}), and JAX finds only the CPU: install "
            "JAX for it (make install; in a notebook, pip install 'jax[cuda13]' or 'jax[tpu]'), "
            "or set JAX_PLATFORMS=cpu"
        )


class Ending(NamedTuple):
    """How a script ends that has raised something."""

    code: int  # of the process
    cause: str  # one line
    report: str  # for stderr


def ending(error: BaseException) -> Ending:
    """Returns how a script ends of an exception.

    A mistake, and a failure whose cause is known, get one line; anything else is a bug, and keeps
    its traceback, with a last line that says where: in the user's own code, if it went through any.
    """
    if isinstance(error, errors.UserError | errors.RunFailure):
        # gin appends to whatever passes through the parts that it made.
        cause = errors.first_line(error)
        kind = "error" if isinstance(error, errors.UserError) else "failed"
        return Ending(error.exit_code, cause, f"{kind}: {cause}")
    if isinstance(error, KeyboardInterrupt):
        return Ending(130, "interrupted", "interrupted")
    code, cause = errors.RunFailure.exit_code, _cause(error)
    if _is_out_of_memory(error):
        return Ending(code, f"out of memory: {cause}", f"failed: out of memory: {cause}")
    return Ending(code, cause, f"{''.join(traceback.format_exception(error))}\n{cause}")


def run(main: Callable[[], int | None]) -> None:
    """Runs a script's `main` and exits: with its result, or as `ending` says."""
    try:
        code, cause = main() or 0, None
    except (Exception, KeyboardInterrupt) as error:
        if not isinstance(error, errors.UserError | errors.RunFailure | KeyboardInterrupt):
            peers.await_cause()
        code, cause, said = ending(error)
    if not cause and pipeline.close_failures():  # which have been said
        code = errors.RunFailure.exit_code
    several = processes.is_several()
    if cause:
        # First, for whoever says what another process told it ends at once.
        peers.fail(cause, code)
        print(said, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    if (cause and several) or pipeline.abandoned():
        # Leaving in order would wait for processes that are gone, or for threads that do not come
        # back, and for what they hold.
        if not cause:
            processes.leave()
        watchdog.kill_children()
        os._exit(code)
    if not several:  # else the others may take their time
        watchdog.expect_end()
    sys.exit(code)


def compare() -> None:
    """Is `podracers-compare`: runs `scripts/compare.py`, which is installed as data."""
    script = pathlib.Path(__file__).parent / "scripts" / "compare.py"
    sys.path.insert(0, str(script.parent))  # of the modules beside it
    runpy.run_path(str(script), run_name="__main__")


def _first(error: BaseException) -> BaseException:
    """Returns what a thread raised, where that is why another one failed."""
    while isinstance(error, pipeline.WorkerError) and error.__cause__:
        error = error.__cause__
    return error


def _is_out_of_memory(error: BaseException) -> bool:
    first = _first(error)
    on_device = isinstance(first, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(first)
    return on_device or isinstance(first, MemoryError)


def _cause(error: BaseException) -> str:
    """Returns an exception in one line, with the innermost place in the user's own code.

    Where no frame is the user's, it is the innermost of this project.
    """
    error = _first(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if os.path.realpath(frame.filename).startswith(_OWN)]
    users = [frame for frame in frames if frame not in own and not _is_of_library(frame.filename)]
    what = errors.one_line(error)
    for frame in reversed(users or own):
        path = frame.filename
        with contextlib.suppress(OSError, ValueError):  # the working directory may be gone
            path = str(pathlib.Path(path).relative_to(pathlib.Path.cwd()))
        return f"{path}:{frame.lineno} in {frame.name}: {what}"
    return what


def _is_of_library(path: str) -> bool:
    # What has no file was generated, such as the constructor of a dataclass.
    if path.startswith(("<", sysconfig.get_path("stdlib"))):
        return True
    return not {"site-packages", "dist-packages"}.isdisjoint(pathlib.Path(path).parts)
