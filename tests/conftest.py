"""Sets JAX up for the tests: four fake CPU devices, and a compilation cache that persists.

All of it has to stand in the environment before JAX is imported, and child processes inherit it.
"""

import importlib.metadata
import os
import pathlib
import signal
import sys

NUM_DEVICES = 4


def _configure() -> None:
    """Fills in what the user's environment leaves open; what it sets already is kept."""
    flags = os.environ.get("XLA_FLAGS", "").split()

    def add(name: str, value: int | str) -> None:
        if not any(flag.startswith(f"--{name}=") for flag in flags):
            flags.append(f"--{name}={value}")

    add("xla_force_host_platform_device_count", NUM_DEVICES)
    # A collective that deadlocks kills the process within seconds, not after most of a minute. What
    # XLA does not know ends the process.
    if int(importlib.metadata.version("jaxlib").split(".")[1]) >= 10:
        add("xla_cpu_collective_call_terminate_timeout_seconds", 30)
    # Twice as fast to compile, and all the same to what a test runs: the older code generator, and
    # one LLVM module instead of up to 32, where two cores have other tests to run.
    add("xla_cpu_use_fusion_emitters", "false")
    add("xla_cpu_parallel_codegen_split_count", 1)
    os.environ["XLA_FLAGS"] = " ".join(flags)

    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Programs with collectives queue up faster than they run; without threads to spare, those of
    # one program take the threads that another one waits for.
    os.environ.setdefault("PJRT_NPROC", "16")
    # What the tests compile runs for a moment: compiling it well would take a third longer.
    # Long learning runs turn it on again, below.
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    cache = pathlib.Path(__file__).resolve().parents[1] / ".cache" / "jax"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def _hear_signals() -> None:
    """Undoes what a background shell or nohup inherits to us: child processes are to be stopped."""
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


if "jax" in sys.modules:
    raise RuntimeError("JAX was imported before tests/conftest.py could set up its devices")
_configure()
_hear_signals()

import jax  # noqa: E402
import pytest  # noqa: E402


@pytest.fixture(autouse=True)
def _compare_bits_on_cpu_alone(request):
    """What is exact is so on CPU (docs/architecture.md, "Determinism")."""
    if request.node.get_closest_marker("exact") and jax.default_backend() != "cpu":
        pytest.skip("bits repeat on CPU")


@pytest.fixture(autouse=True)
def _compile_long_runs_well(request):
    """Long learning runs are worth compiling well."""
    if request.node.get_closest_marker("learning") is None:
        yield
        return
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
