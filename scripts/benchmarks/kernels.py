"""Kernels of an update, counted in compiled programs without running them.

The GPU compiler is JAX's plugin for CUDA, which compiles for a description of a GPU where none is
present (https://github.com/openxla/xla/pull/16913). In an environment for CPU, it is installed into
its own folder, as the TPU compiler is.
"""

import contextlib
import dataclasses
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.experimental import topologies

from podracers import anakin, errors, parallel
from podracers.scripts.benchmarks import costs, measure, ppo_speed, records, tpu_estimates

_EXPERIMENTS = {
    **{agent: f"cartpole_{agent}" for agent in ("impala", "pqn", "dqn")},
    **{agent: f"catch_{agent}" for agent in ("sac", "alphazero")},
}
_NUM_ENVS = 1024  # of PPO on Breakout
# Names of the parts of `costs`, in the order of the table; the last one is the rest of an update.
_PHASES = {
    "act": "acting",
    "environment": "environment",
    "environment/reset": "reset",
    "rollout": "storing",
    "learn/returns": "returns",
    "learn/shuffle": "shuffle",
    "learn/gradient": "gradient",
    "learn/optimizer": "optimizer",
    "learn": "rest of learning",
    "other": "rest",
}
_CUDA = "jax-cuda12-plugin=={0} jax-cuda12-pjrt=={0} nvidia-cuda-nvcc-cu12"
# Without a GPU no library can be tried out; matrix products are cuBLAS's.
_FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false --xla_gpu_cuda_data_dir="
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 registers_per_block_limit: 65536 registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 l2_cache_size: 52428800
  memory_bandwidth: 3352320000000 device_memory_size: 84929347584
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def benchmark(libtpu: pathlib.Path | None, cuda: pathlib.Path | None) -> records.Result:
    """Counts the kernels of an update of six agents under Anakin, by compiler.

    Programs are compiled for this machine's CPU, for a TPU if `libtpu` is the folder of its
    compiler, and for an H100 if `cuda` is.

    Raises:
      errors.UserError: there is no compiler in a folder.
    """
    targets: dict[str, Any] = {}
    if cuda:
        targets["an H100"] = _gpu(cuda)
    if libtpu:
        version = tpu_estimates.find_compiler(libtpu)
        targets[f"a v5e (libtpu {version})"] = tpu_estimates.hardware(1)[1]
    targets["the CPU"] = None
    rows, notes = [], []
    for target, devices in targets.items():
        context = parallel.compiling_for(devices) if devices else contextlib.nullcontext()
        for agent in ("ppo", *_EXPERIMENTS):
            with context:
                runner = _runner(agent)
                steps = tpu_estimates.gradient_steps(runner.agent, runner.steps_per_update)
                compiled = runner.trace(0).lower().compile()
            counted = costs.Kernels(compiled.as_text() or "", steps)
            rows += _rows(target, agent, counted)
            print(f"{agent}, compiled for {target}: {counted.cycles:.0f} kernels", flush=True)
            for passed, operation in counted.loops:
                text = f"a pass of the loop `{operation}` has {passed:.0f} kernels"
                notes.append(f"{agent}, {target}: {text}")
    names = ", ".join(_EXPERIMENTS.values())
    return records.Result(
        "Operations of one update that a GPU launches one by one, outside of fusions, each body of "
        "a loop times its passes; compiled, not run. PPO is that of MinAtar Breakout with "
        f"{_NUM_ENVS} environments; the others are {names}, without `reset_batch`, which "
        "accelerators do not use. Unknown are the kernels of a call of a library (counted as one), "
        "copies that a driver merges, and the passes of loops in the notes (counted as one). The "
        "CPU's and the TPU's compiler fuse otherwise than a GPU's; the CPU's draws random numbers "
        "in loops.",
        tuple(rows),
        tuple(notes),
    )


def _runner(agent: str) -> anakin.Anakin:
    if agent == "ppo":
        runner = ppo_speed.build("breakout", _NUM_ENVS)
    else:
        runner = measure.build([f"gin/experiments/{_EXPERIMENTS[agent]}.gin"]).runner
    assert isinstance(runner, anakin.Anakin)
    return dataclasses.replace(runner, reset_batch=None)


def _rows(target: str, agent: str, counted: costs.Kernels) -> Iterator[records.Row]:
    title = f"an update compiled for {target}"
    for part, phase in _PHASES.items():
        if part in counted.parts:
            yield records.row(title, "kernels", counted.parts[part], agent=agent, phase=phase)
    yield records.row(title, "kernels", counted.cycles, agent=agent, phase="all")


def _gpu(folder: pathlib.Path) -> Sequence[jax.Device]:
    """Returns a GPU to compile for."""
    install = f"pip install --no-deps --target DIR {_CUDA.format(jax.__version__)}"
    if not (folder / "jax_plugins").is_dir() or not (folder / "nvidia/cuda_nvcc").is_dir():
        raise errors.UserError(f"no GPU compiler in {folder}: {install}, then --cuda DIR")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}{folder}/nvidia/cuda_nvcc"
    jax.config.update("jax_platforms", "cpu")  # programs are not run
    jax.config.update("jax_enable_compilation_cache", False)  # it would look for a GPU
    sys.path.append(str(folder.resolve()))  # where JAX looks for plugins
    try:
        grid = topologies.get_topology_desc(platform="cuda", target_config=_H100, topology="1x1x1")
    except NotImplementedError as error:
        raise errors.UserError("kernels --cuda: run it without other benchmarks") from error
    return grid.devices
