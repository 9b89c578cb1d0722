"""Golden digests of the results of programs, bit for bit, in `tests/golden.json`."""

import hashlib
import json
import os
import pathlib
import platform
from typing import Any

import jax
import numpy as np

_FILE = pathlib.Path(__file__).parent / "golden.json"


def check(name: str, tree: Any) -> None:
    """Asserts that the arrays of a pytree equal those recorded under `name`.

    They are compared as a multiset, so that they may be renamed. Bits depend on the processor, on
    OpenBLAS's kernels and on XLA; elsewhere norms are compared. `GOLDEN=record` records the arrays.
    """
    arrays = [np.asarray(x) for x in jax.tree.leaves(tree)]
    digests = sorted(hashlib.sha256(x.tobytes()).hexdigest() for x in arrays)
    actual = {
        "digest": hashlib.sha256("".join(digests).encode()).hexdigest(),
        "norm": float(np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in arrays))),
        "machine": f"{_processor()}, jaxlib {jax.lib.__version__}",
        "openblas": os.environ.get("OPENBLAS_CORETYPE"),
    }
    golden = json.loads(_FILE.read_text())
    if os.environ.get("GOLDEN") == "record":
        _FILE.write_text(json.dumps({**golden, name: actual}, indent=1, sort_keys=True) + "\n")
        return
    expected = golden[name]
    np.testing.assert_allclose(actual["norm"], expected["norm"], rtol=1e-3)
    if all(actual[key] == expected.get(key, actual[key]) for key in ("machine", "openblas")):
        assert actual["digest"] == expected["digest"]


def _processor() -> str:
    """Returns the CPU's name and a digest of its features, which determine how XLA compiles."""
    info = pathlib.Path("/proc/cpuinfo")
    if not info.exists():
        return platform.machine()
    lines = (line.partition(":") for line in info.read_text().splitlines())
    fields = {name.strip(): value.strip() for name, _, value in lines}
    flags = hashlib.sha256(fields.get("flags", "").encode()).hexdigest()[:8]
    return f"{fields.get('model name', platform.machine())} {flags}"
