"""The precision that an agent computes with: a decision of the experiment, not of a backend.

Two choices, each for all that an agent traces, in either runner and in evaluations. Of matrix
products and convolutions, how many bits of float32 operands a TPU or GPU reads: by default a TPU
rounds them to bfloat16, a GPU may round them to TensorFloat-32, and a CPU keeps all. Of the bodies
of networks (encoders and cores), the dtype: what they compute in bfloat16 they give to heads and
losses as float32, and parameters, optimizers and recurrent states are float32 in any case.
"""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from podracers import agent as agent_lib
from podracers import errors

MATMULS = ("default", "high", "highest")
COMPUTE_DTYPES = ("float32", "bfloat16")
_METHODS = ("init_learner", "init_memory", "init_actor", "actor_params", "act", "update")

# The name of the dtype. It is part of the key of what `jax.jit` has traced, as JAX's own precision.
_compute_dtype = jax.make_user_context(COMPUTE_DTYPES[0])


def compute_dtype() -> jnp.dtype:
    """Returns the dtype of the bodies of networks that are being traced."""
    return jnp.dtype(_compute_dtype.value)


@dataclasses.dataclass(frozen=True)
class Precision:
    """A choice of both.

    Attributes:
      matmul: "default", "high" (TensorFloat-32, or three products of bfloat16) or "highest" (all of
        float32); None leaves it to JAX, whose default `JAX_DEFAULT_MATMUL_PRECISION` may change.
      compute_dtype: "float32" or "bfloat16", of encoders and cores.
    """

    matmul: str | None = None
    compute_dtype: str = COMPUTE_DTYPES[0]

    def __post_init__(self):
        """Refuses names that do not exist."""
        for name, value, known in (
            ("matmul_precision", self.matmul, MATMULS),
            ("compute_dtype", self.compute_dtype, COMPUTE_DTYPES),
        ):
            if value not in known and not (value is None and known is MATMULS):
                raise errors.UserError(
                    f"Experiment.{name}: expected one of {', '.join(known)}, got {value!r}"
                    f"{errors.nearest(str(value), known)}"
                )

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Has programs traced with this precision."""
        of_jax = contextlib.nullcontext()
        if self.matmul is not None:
            of_jax = jax.default_matmul_precision(self.matmul)
        with _compute_dtype(self.compute_dtype), of_jax:
            yield

    def apply(self, agent: agent_lib.Agent) -> agent_lib.Agent:
        """Returns the agent, whose methods are traced with this precision, whoever traces them."""
        if self == Precision():
            return agent
        base = type(agent)
        methods = {name: self._within(getattr(base, name)) for name in _METHODS}
        precise = copy.copy(agent)
        # Fields, and what the agent has made of them, stay; `dataclasses.replace` keeps the class.
        object.__setattr__(precise, "__class__", type(base.__name__, (base,), methods))
        return precise

    def describe(self) -> dict[str, str]:
        """Returns both names, for a run's summary."""
        matmul = self.matmul or jax.config.jax_default_matmul_precision or MATMULS[0]
        return {"matmul_precision": matmul, "compute_dtype": self.compute_dtype}

    def _within(self, method):
        @functools.wraps(method)
        def traced(*arguments, **options):
            with self.tracing():
                return method(*arguments, **options)

        return traced
