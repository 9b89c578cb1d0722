"""Command lines of the scripts: shared options, JAX's start, and exit codes."""

import argparse
import contextlib
import errno
import io
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
from typing_extensions import Buffer

from podracers import errors, leaks
from podracers.hosts import peers, processes
from podracers.supervision import pipeline, watchdog
from podracers.training import gin_names

# Values of an option, which may follow it together, and which may occur again.
SEVERAL: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}


class Parser(argparse.ArgumentParser):
    """A parser that raises `errors.UserError` and prints the description unchanged."""

    def __init__(self, **options: Any):
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        """Raises `errors.UserError`."""
        raise errors.UserError(f"{message} (see --help)")

    def add_experiment(self, required: bool = False) -> None:
        """Adds the options that describe an experiment; `gin_files` reads them."""
        self.add_argument("--gin_file", **SEVERAL, required=required, metavar="PATH")
        self.add_argument("--gin_bindings", **SEVERAL, metavar="'NAME = VALUE'")
        self.add_argument(
            "--runner",
            metavar="NAME",
            help="anakin or sebulba, or a .gin file; default: the experiment's own, or else anakin "
            "for environments in JAX and sebulba for those on the host",
        )


def count(text: str) -> int:
    """Returns a positive int from the command line, as the `type` of an option."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got '{text}'")
    return int(text)


def output_file(text: str) -> pathlib.Path:
    """Returns the path of a file that can be written, as the `type` of an option."""
    path = pathlib.Path(text)
    if path.is_dir():
        cause = "it is a folder"
    elif not path.parent.is_dir():
        cause = f"'{path.parent}' is no folder"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        cause = "Permission denied"
    else:
        return path
    raise argparse.ArgumentTypeError(f"cannot write '{path}': {cause}")


def gin_files(arguments: argparse.Namespace) -> list[str]:
    """Returns the .gin files of a command line, the runner's last."""
    runners = [runner_file(arguments.runner)] if arguments.runner else []
    return [*arguments.gin_file, *runners]


def runner_file(name: str) -> str:
    """Returns the .gin file of a runner: a file's path, or the name of a file in gin/runners.

    Raises:
      errors.UserError: there is no such file.
    """
    if name.endswith(".gin"):
        return name
    known = [file.stem for file in (gin_names.SHIPPED / "gin" / "runners").glob("*.gin")]
    errors.require_known("there is no runner", name, known)
    return f"gin/runners/{name}.gin"


def use_compilation_cache() -> None:
    """Caches compiled programs on disk, so that a second start compiles nothing.

    JAX's environment variables win: `JAX_COMPILATION_CACHE_DIR` names another folder, and
    `JAX_ENABLE_COMPILATION_CACHE=false` disables the cache. An unknown user without HOME has none.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = None if base.startswith("~") else os.path.join(base, "podracers", "jax")
    if not (folder or jax.config.values["jax_compilation_cache_dir"]):
        print("no home: set JAX_COMPILATION_CACHE_DIR to keep compiled programs", file=sys.stderr)
    settings = {
        "jax_compilation_cache_dir": folder,
        # The many small programs take longer to compile than the large one.
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        if not os.environ.get(name.upper()):
            jax.config.update(name, value)


def require_accelerator(device_files: pathlib.Path = pathlib.Path("/dev")) -> None:
    """Starts JAX's backend; refuses the CPU of a machine that shows an accelerator.

    Where `JAX_PLATFORMS` is set, only its platforms are required.

    Raises:
      errors.UserError: JAX cannot start, or does not find the accelerator.
    """
    platforms = jax.config.values["jax_platforms"]
    try:
        platform = jax.default_backend()
    except RuntimeError as error:
        raise errors.UserError(f"JAX_PLATFORMS={platforms}: {errors.first_line(error)}") from error
    files = [f for name in ("nvidia", "accel", "vfio/") for f in device_files.glob(f"{name}[0-9]*")]
    if platform == "cpu" and not platforms and files:
        raise errors.UserError(
            f"this machine has an accelerator ({files[0]}), and JAX finds only the CPU: install "
            "JAX for it (make install; in a notebook, pip install 'jax[cuda13]' or 'jax[tpu]'), "
            "or set JAX_PLATFORMS=cpu"
        )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Returns lines with aligned columns, for the terminal."""
    *widths, _ = (max(map(len, column)) for column in zip(*rows))
    return "\n".join("  ".join([*map(str.ljust, row, widths), row[-1]]) for row in rows)


class Ending(NamedTuple):
    """Exit of a script that raised an exception."""

    code: int  # exit code of the process
    cause: str  # one line
    report: str  # text for stderr


def ending(error: BaseException) -> Ending:
    """Returns the exit code and the report of an exception.

    A `UserError` or `RunFailure` is reported in one line, as is a lack of memory. Other exceptions
    are bugs: their traceback is followed by the innermost line outside of libraries.
    """
    if isinstance(error, jax.errors.UnexpectedTracerError):
        error = leaks.explained(error)
    code = getattr(error, "exit_code", errors.RunFailure.exit_code)
    if isinstance(error, errors.UserError | errors.RunFailure):
        cause = errors.first_line(error)  # gin appends lines
        kind = "error" if isinstance(error, errors.UserError) else "failed"
        return Ending(code, cause, f"{kind}: {cause}")
    if isinstance(error, KeyboardInterrupt):
        return Ending(130, "interrupted", "interrupted")
    cause = errors.one_line(error)
    is_jax = isinstance(error, jax.errors.JaxRuntimeError)
    if isinstance(error, MemoryError) or (is_jax and "RESOURCE_EXHAUSTED" in str(error)):
        return Ending(code, f"out of memory: {cause}", f"failed: out of memory: {cause}")
    cause = errors.located(error)
    if isinstance(error, ImportError):
        cause += gin_names.hiding()
    return Ending(code, cause, f"{''.join(traceback.format_exception(error))}\n{cause}")


class _Output(io.FileIO):
    """Standard output or standard error; discards bytes once its pipe or terminal has closed.

    Ctrl-C in `train.py 2>&1 | tee log` also ends `tee`, and the run has yet to save.
    """

    def write(self, data: Buffer, /) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):  # a pipe, a terminal
                raise
            with open(os.devnull, "wb") as null:  # also for processes that inherit the number
                os.dup2(null.fileno(), self.fileno())
            return memoryview(data).nbytes


def run(main: Callable[[], int | None]) -> None:
    """Runs a script's `main`, and exits with its result or with the code of `ending`.

    A pipe whose reader has ended does not end the script, nor does a closed standard stream.
    Modules in the working directory can be imported, after those of the same name elsewhere.
    """
    # An editable installation finds the packages of this project after all of `sys.path`.
    sys.path += [str(pathlib.Path(__file__).parents[2]), ""]
    for name in ("stdin", "stdout", "stderr"):
        if (stream := getattr(sys, name)) is None:  # closed: the next file would take its number
            stream = os.fdopen(os.open(os.devnull, os.O_RDWR), "r+")
            os.set_inheritable(stream.fileno(), True)
        elif name != "stdin":  # lines are written at once: `os._exit` flushes nothing
            file = io.BufferedWriter(_Output(stream.fileno(), "w", closefd=False))
            options = (stream.encoding, "backslashreplace")
            stream = io.TextIOWrapper(file, *options, line_buffering=True)
        setattr(sys, name, stream)
    code, end = 0, None
    try:
        code = main() or 0
    except (Exception, KeyboardInterrupt) as error:
        if not isinstance(error, errors.UserError | errors.RunFailure | KeyboardInterrupt):
            peers.await_cause()
        end = ending(error)
        code = end.code
    if not end and pipeline.close_failures:  # these are already printed
        code = errors.RunFailure.exit_code
    several = processes.is_several()
    if end:
        # Before the report: a process that reports a peer's failure exits at once.
        peers.fail(end.cause, code)
        with contextlib.suppress(OSError):  # the code stays
            print(end.report, file=sys.stderr)
    if (end and several) or pipeline.abandoned():
        # An orderly exit would wait for processes that are gone or for threads that hang.
        if not end:
            peers.leave()
            jax.distributed.shutdown()  # waits for the other processes, if any
        watchdog.kill_children()
        os._exit(code)
    if not several:  # other processes may take longer
        watchdog.expect_end()
    sys.exit(code)
