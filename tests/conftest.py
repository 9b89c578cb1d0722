"""Configures JAX for the tests: four fake CPU devices and a persistent compilation cache.

The variables are set before JAX is imported, and child processes inherit them.
"""

import ctypes
import gc
import importlib.metadata
import os
import pathlib
import shutil
import signal
import subprocess
import sys

NUM_DEVICES = 4
ROOT = pathlib.Path(__file__).resolve().parents[1]


def _configure() -> None:
    """Sets the variables that the user's environment does not set."""
    flags = os.environ.get("XLA_FLAGS", "").split()

    def add(name: str, value: int | str) -> None:
        if not any(flag.startswith(f"--{name}=") for flag in flags):
            flags.append(f"--{name}={value}")

    add("xla_force_host_platform_device_count", NUM_DEVICES)
    # XLA exits at flags it does not recognise.
    minor = int(importlib.metadata.version("jaxlib").split(".")[1])
    # A deadlocked collective ends the process after 30 s.
    if minor >= 10:
        add("xla_cpu_collective_call_terminate_timeout_seconds", 30)
    # The older code generator and a single LLVM module compile twice as fast. Long runs need
    # optimised programs.
    if minor <= 10 and "learning" not in sys.argv:  # -m learning
        add("xla_cpu_use_fusion_emitters", "false")
    add("xla_cpu_parallel_codegen_split_count", 1)
    os.environ["XLA_FLAGS"] = " ".join(flags)

    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Programs with collectives may deadlock if the thread pool is smaller than the queued programs.
    os.environ.setdefault("PJRT_NPROC", "16")
    # Most tests run for less time than optimizations take to compile. Learning runs enable them.
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


if "jax" in sys.modules:
    raise RuntimeError("JAX was imported before tests/conftest.py could set up its devices")
_configure()
gc.disable()  # until all modules are imported
# A background shell ignores SIGINT, and nohup ignores SIGHUP.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

import jax  # noqa: E402
import psutil  # noqa: E402
import pytest  # noqa: E402

# Bytes of a worker, beyond which compiled programs are dropped: after a module, and in one.
_MEMORY, _MOST_MEMORY = 1.6e9, 2.2e9


def pytest_collection_finish():
    """Collects garbage seldom, and never visits what imports have made."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    gc.enable()


def pytest_runtest_teardown(item, nextitem):
    """Drops the compiled programs of earlier modules, which would fill the memory."""
    cases = [getattr(getattr(x, "callspec", None), "id", None) for x in (item, nextitem)]
    if nextitem is None or (cases[0] and cases[0] == cases[1]):
        return  # tests of one case may count the traces of its fixture's programs
    most = _MOST_MEMORY if nextitem.path == item.path else _MEMORY
    if psutil.Process().memory_info().rss > most:
        jax.clear_caches()
        gc.collect()
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc
            trim(0)


@pytest.fixture(autouse=True)
def _compare_bits_on_cpu_alone(request):
    """Skips bit-exact tests on other backends (docs/architecture.md, "Determinism")."""
    if request.node.get_closest_marker("exact") and jax.default_backend() != "cpu":
        pytest.skip("bits repeat on CPU")


@pytest.fixture(autouse=True)
def _compile_long_runs_well(request):
    """Compiles long learning runs with all optimizations."""
    if request.node.get_closest_marker("learning") is None:
        yield
        return
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> pathlib.Path:
    """A copy of the library, because pip builds beside the sources."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("podracers", "agents", "environments", "gin", "scripts"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    (folder / "docs").mkdir()
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "docs/results.json"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture
def mount(tmp_path):
    """Mounts a file system of a given size: `mount("2m")` returns its folder."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(size: str) -> pathlib.Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting a small file system needs root")
        return folder

    yield mount
    subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)
