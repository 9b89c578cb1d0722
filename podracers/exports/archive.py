"""A policy as programs of `jax.export`: a zip archive that needs JAX and flatbuffers.

It has `policy.json`, a description, and two programs for each platform, whose parameters are
constants:

  PLATFORM/initial   state = initial(seed)
  PLATFORM/act       action, state = act(state, observation, first[, reward])
"""

import functools
import io
import json
import zipfile
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from podracers import errors, parallel
from podracers.exports import program as program_lib

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")  # names of `jax.export`


def archived(
    program: program_lib.Program, about: dict[str, Any]
) -> tuple[program_lib.Arguments, bytes]:
    """Returns the arguments of `act`, and the archive.

    `about` is the beginning of `policy.json`, with `platforms`, some of `PLATFORMS`, and
    `batch_size`, None for any.
    """
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for platform in about["platforms"]:
            kept, initial, act = export(program, platform, about["batch_size"])
            file.writestr(f"{platform}/initial", initial.serialize())
            file.writestr(f"{platform}/act", act.serialize())
        file.writestr("policy.json", json.dumps(about | program.describe(kept), indent=2))
    return kept, archive.getvalue()


def export(
    program: program_lib.Program, platform: str, batch_size: int | None
) -> tuple[program_lib.Arguments, jax.export.Exported, jax.export.Exported]:
    """Returns the shapes of the arguments of `act`, then `initial` and `act`, for one platform.

    A `batch_size` of None leaves it open.
    """
    target = "gpu" if platform in ("cuda", "rocm") else platform
    with parallel.compiling_for(target):
        kept, act = program.reduced(batch_size or jax.export.symbolic_shape("b")[0])

        def initial(seed: jax.Array) -> dict[str, jax.Array]:
            state = program.initial(seed)
            return {name: state[name] for name in kept.state}

        export = functools.partial(jax.export.export, platforms=[platform])
        seed = jax.ShapeDtypeStruct(kept.first.shape, jnp.uint32)
        arguments = kept if kept.reward is not None else kept[:-1]
        try:
            return kept, export(jax.jit(initial))(seed), export(jax.jit(act))(*arguments)
        except Exception as error:
            if batch_size is not None:
                raise
            raise errors.UserError(
                "the policy cannot be exported with an open batch dimension; fix it by "
                f"--batch_size: {errors.one_line(error)}"
            ) from error
