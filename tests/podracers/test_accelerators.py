"""Tests of what a machine shows of its accelerators, in folders that stand in for it."""

import pathlib
import subprocess
import sys

import jax
import pytest

from podracers import accelerators, command_line, errors
from podracers.training import train
from tests import processes

NVIDIA = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Mon Jan  1 00:00:00 UTC 2025\n"
GOOGLE, INTEL = "0x1ae0\n", "0x8086\n"


def _machine(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "extra"),
    [
        ({}, None),
        ({"dev/accel0": ""}, "tpu"),
        ({"dev/accel/accel0": ""}, None),  # the NPU of a laptop
        ({"dev/vfio/0": "", "sys/bus/pci/devices/a/vendor": GOOGLE}, "tpu"),
        ({"dev/vfio/vfio": "", "sys/bus/pci/devices/a/vendor": GOOGLE}, None),
        ({"dev/vfio/7": "", "sys/bus/pci/devices/a/vendor": INTEL}, None),
        ({"dev/nvidia0": ""}, "cuda13"),
        ({"dev/nvidiactl": ""}, None),
        ({"dev/nvidia3": "", "proc/driver/nvidia/version": NVIDIA.format("580.65.06")}, "cuda13"),
        ({"dev/nvidia0": "", "proc/driver/nvidia/version": NVIDIA.format("535.54")}, "cuda12"),
        # As in a container that was given none.
        ({"proc/driver/nvidia/version": NVIDIA.format("580.65.06")}, None),
    ],
)
def test_what_a_machine_shows(tmp_path, files, extra):
    found = accelerators.find(_machine(tmp_path, files), {})
    assert (found and found.extra) == extra
    if found:
        assert found.place.is_relative_to(tmp_path / "dev")


def test_gpus_that_are_hidden_are_none(tmp_path):
    machine = _machine(tmp_path, {"dev/nvidia0": ""})
    for hidden in ("", "-1"):
        assert accelerators.find(machine, {"CUDA_VISIBLE_DEVICES": hidden}) is None
    assert accelerators.find(machine, {"CUDA_VISIBLE_DEVICES": "0"})


def test_make_asks_without_any_package(tmp_path):
    _machine(tmp_path, {"dev/accel0": ""})
    path = pathlib.Path(accelerators.__file__)
    copy = tmp_path / path.name
    copy.write_text(path.read_text().replace('Path("/")', f"Path({str(tmp_path)!r})"))
    command = [sys.executable, "-I", "-S", str(copy)]
    asked = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert asked.stdout == "tpu\n"


@pytest.fixture
def undecided(monkeypatch):
    """JAX as it is where nobody said which platform to use; its backend is the CPU."""
    before = jax.config.jax_platforms
    assert jax.default_backend() == "cpu"
    jax.config.update("jax_platforms", None)
    yield
    jax.config.update("jax_platforms", before)


def test_the_cpu_does_not_stand_in_for_an_accelerator_that_jax_does_not_see(undecided, tmp_path):
    command_line.require_accelerator(tmp_path)  # there is none
    machine = _machine(tmp_path, {"dev/accel0": ""})
    with pytest.raises(errors.UserError, match=r"a TPU \(.*/dev/accel0\), and JAX sees the CPU"):
        command_line.require_accelerator(machine)
    jax.config.update("jax_platforms", "cpu")  # as JAX_PLATFORMS does
    command_line.require_accelerator(machine)


def test_train_refuses_before_anything_is_written(undecided, tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    monkeypatch.setattr(accelerators, "ROOT", _machine(tmp_path, {"dev/accel0": ""}))
    words = ("--gin_file", processes.config_file(tmp_path), "--run_dir", run_dir)
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, words)])
    with pytest.raises(errors.UserError, match="make EXTRAS=tpu install") as caught:
        train.main()
    assert command_line.ending(caught.value).code == 2
    assert not run_dir.exists()
