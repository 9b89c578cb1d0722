"""A policy as an ONNX model, converted by jax2onnx.

Inputs are the leaves of `program.Arguments` by name, such as `state/actor/core`, `observation`,
`first`; outputs are `action` and `next_state/...`. An episode begins with a state of zeros, which
`first` resets.
"""

import dataclasses
import importlib
import json
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval

from podracers import agent as agent_lib
from podracers import errors, parallel, trees
from podracers.exports import program as program_lib

_TOLERANCE = 1e-4  # absolute and relative


def deterministic(agent: agent_lib.Agent) -> agent_lib.Agent:
    """Returns the agent with the evaluations that draw least: greedy, and without epsilon."""
    agent = agent_lib.greedy(agent) or agent
    is_random = hasattr(agent, "evaluation_epsilon")
    return dataclasses.replace(agent, evaluation_epsilon=0.0) if is_random else agent


def converted(
    program: program_lib.Program, about: dict[str, Any]
) -> tuple[program_lib.Arguments, bytes]:
    """Returns the arguments of `act`, and the model, which acts once as the agent does.

    `about` is the beginning of the description in the metadata `policy.json`; its `batch_size` is
    None for any.

    Raises:
      errors.UserError: the agent draws random numbers as it acts, or jax2onnx cannot convert it.
    """
    for name in ("jax2onnx", "onnx_ir"):  # they warn of unused plugins and untyped values
        logging.getLogger(name).setLevel(logging.ERROR)
    jax2onnx = importlib.import_module("jax2onnx")  # optional, as its packages
    helper = importlib.import_module("onnx.helper")
    agent = errors.path_of(program.agent)
    with parallel.compiling_for("cpu"):
        kept, act = program.reduced(1)
        if "key" in kept.state:
            raise errors.UserError(
                f"{agent} draws random numbers as it acts, which ONNX cannot repeat: expected a "
                "policy that is greedy or a mean"
            )
        leaves, structure = jax.tree.flatten(kept)

        def outputs(*leaves: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(act(*jax.tree.unflatten(structure, leaves)))

        def live(*leaves: jax.Array) -> list[jax.Array]:
            # jax2onnx also converts what no output depends on, such as keys.
            closed = jax.make_jaxpr(outputs)(*leaves)
            used = [True] * len(closed.jaxpr.outvars)
            jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, used, instantiate=True)
            closed = jax.extend.core.ClosedJaxpr(jaxpr, closed.consts)
            return jax.extend.core.jaxpr_as_fun(closed)(*leaves)

        size: Any = about["batch_size"] or "B"
        shapes = [jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for x in leaves]
        try:
            model = jax2onnx.to_onnx(live, shapes, input_names=[*trees.leaves(kept)])
        except Exception as error:
            cause = errors.one_line(error)
            raise errors.UserError(f"jax2onnx cannot convert {agent}: {cause}") from error
    # A value may be two outputs, as an action that is also part of the state.
    for output, name in zip(model.graph.output, output_names(kept), strict=True):
        model.graph.node.append(helper.make_node("Identity", [output.name], [name]))
        output.name = name
    state = {
        f"state/{name}": {"shape": x.shape[1:], "dtype": str(x.dtype)}
        for name, x in sorted(kept.state.items())
    }
    described = json.dumps({**about, **program.describe(kept), "state": state}, indent=2)
    helper.set_model_props(model, {"policy.json": described})
    data = model.SerializeToString()
    _check(agent, data, kept, outputs, about["batch_size"] or 2)
    return kept, data


def output_names(kept: program_lib.Arguments) -> list[str]:
    """Returns the names of the outputs."""
    return ["action", *(f"next_state/{name}" for name in sorted(kept.state))]


def session(data: bytes) -> Any:
    """Returns an `onnxruntime.InferenceSession` of a model, on the CPU."""
    onnxruntime = importlib.import_module("onnxruntime")  # optional
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors: it warns of constants that jax2onnx leaves unused
    return onnxruntime.InferenceSession(data, options, ["CPUExecutionProvider"])


def _check(
    agent: str,
    data: bytes,
    kept: program_lib.Arguments,
    outputs: Callable[..., list[jax.Array]],
    size: int,
) -> None:
    """Raises `errors.UserError` unless onnxruntime acts as JAX, at drawn inputs."""
    rng = np.random.default_rng(0)

    def draw(x: jax.ShapeDtypeStruct) -> np.ndarray:
        shape = (size, *x.shape[1:])
        if x.dtype == jnp.float32:
            return rng.normal(size=shape).astype(x.dtype)
        return np.full(shape, x.dtype == bool, x.dtype)  # masks are True, other integers 0

    inputs = {name: draw(x) for name, x in trees.leaves(kept).items()}
    inputs["first"] = np.arange(size) % 2 == 0
    try:
        actual = session(data).run(None, inputs)
    except Exception as error:
        cause = errors.one_line(error)
        raise errors.UserError(f"jax2onnx's model of {agent} does not run: {cause}") from error
    for x, y in zip(actual, jax.jit(outputs)(*inputs.values()), strict=True):
        if not np.allclose(x, y, _TOLERANCE, _TOLERANCE):
            raise errors.UserError(f"jax2onnx's model of {agent} acts otherwise than JAX")
