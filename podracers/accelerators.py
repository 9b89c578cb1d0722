"""Which accelerator this machine shows, whatever JAX makes of it.

`python -I podracers/accelerators.py` prints the extra of setup.cfg that serves it, or nothing, for
`make` to install: it needs no package, and no file of this one.
"""

from __future__ import annotations  # `make` may meet an older Python

import os
import pathlib
import re
from collections.abc import Mapping
from typing import NamedTuple

ROOT = pathlib.Path("/")
_GOOGLE = "0x1ae0"  # as a PCI vendor
# The oldest driver of CUDA 13 (https://docs.jax.dev/en/latest/installation.html); that of CUDA 12
# is 525.
_CUDA_13 = 580


class Accelerator(NamedTuple):
    """An accelerator that is there."""

    name: str  # for people
    extra: str  # of setup.cfg
    place: pathlib.Path  # where it shows


def find(
    root: pathlib.Path | None = None, environment: Mapping[str, str] = os.environ
) -> Accelerator | None:
    """Returns the accelerator that this machine shows to this process, or None.

    Args:
      root: the folder above `dev`, `proc` and `sys`; None for the machine's own.
      environment: variables, of which `CUDA_VISIBLE_DEVICES` may hide all GPUs.
    """
    root = ROOT if root is None else root
    hidden = environment.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1", "NoDevFiles")
    gpus = [] if hidden else sorted(root.glob("dev/nvidia[0-9]*"))
    if gpus:
        return Accelerator("an NVIDIA GPU", _cuda(root), gpus[0])
    # Up to v4, and from v5e on: groups of VFIO may be of any device that is passed through.
    tpus = sorted(root.glob("dev/accel[0-9]*"))
    if not tpus and _has_google_device(root):
        tpus = sorted(root.glob("dev/vfio/[0-9]*"))
    return Accelerator("a TPU", "tpu", tpus[0]) if tpus else None


def _cuda(root: pathlib.Path) -> str:
    """Returns the extra that the NVIDIA driver is new enough for."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return "cuda13"
    driver = re.search(r"\s(\d+)\.\d+(?:\.\d+)?\s", text)
    return "cuda12" if driver and int(driver[1]) < _CUDA_13 else "cuda13"


def _has_google_device(root: pathlib.Path) -> bool:
    return any(
        path.read_text().strip() == _GOOGLE for path in root.glob("sys/bus/pci/devices/*/vendor")
    )


if __name__ == "__main__":
    found = find()
    print(found.extra if found else "")
