"""The precision that an agent computes with, under any runner and in evaluations."""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from podracers import errors

_MATMULS = (None, "default", "high", "highest")
_COMPUTE_DTYPES = ("float32", "bfloat16")

# As JAX's own precision, it is part of the key of `jax.jit`'s cache of traces.
_compute_dtype = jax.make_user_context(_COMPUTE_DTYPES[0])


def compute_dtype() -> jnp.dtype:
    """Returns the dtype of encoders and cores in the program that is being traced."""
    return jnp.dtype(_compute_dtype.value)


def require_32_bits() -> None:
    """Raises a `UserError` where JAX's default numbers have 64 bits."""
    if jax.config.values["jax_enable_x64"]:
        raise errors.UserError(
            "JAX_ENABLE_X64: expected false, got true; parameters, counters and the observations "
            "of environments have 32 bits"
        )


@dataclasses.dataclass(frozen=True)
class Precision:
    """A matmul precision and a compute dtype.

    Attributes:
      matmul: precision of matrix products and convolutions of float32: "default", "high"
        (TensorFloat-32, or three products of bfloat16) or "highest" (float32); None for JAX's
        default, which `JAX_DEFAULT_MATMUL_PRECISION` may change.
      compute_dtype: "float32" or "bfloat16", of encoders and cores. Heads, losses, parameters,
        optimizer states and recurrent states are float32 in any case.
    """

    matmul: str | None = None
    compute_dtype: str = _COMPUTE_DTYPES[0]

    def __post_init__(self):
        errors.require_known("Experiment.matmul_precision: got", self.matmul, _MATMULS)
        errors.require_known("Experiment.compute_dtype: got", self.compute_dtype, _COMPUTE_DTYPES)

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Enters a context, of this thread, in which programs are traced with this precision.

        The context also decorates functions: `jax.jit(precision.tracing()(function))`.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(_compute_dtype(self.compute_dtype))
            if self.matmul is not None:
                stack.enter_context(jax.default_matmul_precision(self.matmul))
            yield

    def describe(self) -> dict[str, str]:
        """Returns both names, for the summary of a run."""
        default = jax.config.values["jax_default_matmul_precision"] or "default"
        return {"matmul_precision": self.matmul or default, "compute_dtype": self.compute_dtype}


DEFAULT = Precision()
