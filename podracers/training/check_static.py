"""What can be said of an environment without running it: its spec, and what JAX traces it to.

`podracers.training.check` is the way in. Every function returns faults, each a phrase for one line.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from dm_env import specs

from podracers import environment, types


def spec_faults(
    candidate: environment.Environment,
) -> tuple[list[str], environment.EnvironmentSpec | None]:
    """Returns what is wrong with the spec, and the spec."""
    try:
        spec = candidate.spec
    except Exception as error:
        return [f"spec raises {one_line(error)}"], None
    if not isinstance(spec, environment.EnvironmentSpec):
        fault = f"spec is a {type(spec).__name__}, not a podracers EnvironmentSpec"
        if hasattr(candidate, "action_space"):
            fault += " (it looks like a Gym environment: those step on the host, not under jit)"
        return [fault], None
    faults = _observation_spec_faults(spec.observation, "observation")
    faults += _action_spec_faults(spec.action)
    limit = spec.max_episode_steps
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        faults.append(f"spec.max_episode_steps is {limit!r}, not a positive int or None")
    if not faults:
        faults = _mask_spec_faults(spec)
    return faults, spec


def _observation_spec_faults(node: Any, path: str) -> list[str]:
    """Returns what is wrong with the observation's spec at `path` and below."""
    if isinstance(node, dict):
        if not node:
            return [f"spec.{path} is an empty dict"]
        return [
            fault
            for key, child in node.items()
            for fault in _observation_spec_faults(child, f"{path}[{key!r}]")
        ]
    if not isinstance(node, specs.Array):
        return [
            f"spec.{path} is a {type(node).__name__}, not a dm_env.specs.Array or a dict of them"
        ]
    if jax.dtypes.canonicalize_dtype(node.dtype) != node.dtype:
        return [f"spec.{path} has dtype {node.dtype}, which JAX does not make by default"]
    return []


def _action_spec_faults(action: Any) -> list[str]:
    """Returns what is wrong with the action's spec."""
    if not isinstance(action, specs.BoundedArray):
        return [
            f"spec.action is a {type(action).__name__}; supported are a DiscreteArray, an integer "
            "BoundedArray of shape (D,) and a floating BoundedArray (all of dm_env.specs)"
        ]
    if np.issubdtype(action.dtype, np.floating):
        fault = _continuous_fault(action)
    elif np.issubdtype(action.dtype, np.integer):
        fault = _integer_fault(action)
    else:
        fault = f"spec.action has dtype {action.dtype}; integers and floats are supported"
    if not fault and jax.dtypes.canonicalize_dtype(action.dtype) != action.dtype:
        fault = f"spec.action has dtype {action.dtype}, which JAX does not make by default"
    return [fault] if fault else []


def _continuous_fault(action: specs.BoundedArray) -> str:
    """Returns what is wrong with the bounds of a continuous action, or nothing."""
    if not np.all(np.isfinite(action.minimum)) or not np.all(np.isfinite(action.maximum)):
        return "spec.action has infinite bounds: a continuous action needs finite ones"
    if not np.all(action.minimum < action.maximum):
        return "spec.action has a part whose minimum is not below its maximum"
    return ""


def _integer_fault(action: specs.BoundedArray) -> str:
    """Returns what is wrong with a discrete or multi-discrete action, or nothing."""
    if isinstance(action, specs.DiscreteArray):
        return ""
    if len(action.shape) != 1:
        return (
            f"spec.action is an integer BoundedArray of shape {action.shape}: use a DiscreteArray "
            "for one part, or shape (D,) for several"
        )
    if np.any(action.minimum != 0):
        return f"spec.action has minimum {action.minimum}: parts count from 0"
    return ""


def _mask_spec_faults(spec: environment.EnvironmentSpec) -> list[str]:
    """Returns what is wrong with the spec of the action mask, if there is one."""
    if not isinstance(spec.observation, dict) or environment.ACTION_MASK not in spec.observation:
        return []
    mask = spec.observation[environment.ACTION_MASK]
    if np.issubdtype(spec.action.dtype, np.floating):
        return ["spec.observation has an action_mask, but the action is continuous"]
    most = int(np.max(spec.action.maximum)) + 1
    expected = (*spec.action.shape, most)
    if isinstance(mask, dict) or mask.shape != expected or mask.dtype != np.bool_:
        return [f"spec.observation['action_mask'] must be {expected} bool, not {_shape(mask)}"]
    return []


def trace_faults(
    candidate: environment.Environment, spec: environment.EnvironmentSpec
) -> list[str]:
    """Returns what is wrong with the shapes and dtypes of `reset` and `step`."""
    key = jax.random.key(0)
    try:
        after_reset = jax.eval_shape(_fresh(candidate.reset), key)
    except Exception as error:
        return [f"reset cannot be traced by JAX: {one_line(error)}"]
    faults = _output_faults("reset", after_reset, spec)
    if faults:
        return faults
    action = jax.ShapeDtypeStruct(spec.action.shape, spec.action.dtype)
    try:
        after_step = jax.eval_shape(_fresh(candidate.step), after_reset[0], action)
    except Exception as error:
        return [f"step cannot be traced by JAX: {one_line(error)}"]
    faults = _output_faults("step", after_step, spec)
    faults += _difference(
        "state", ("reset returned", after_reset[0]), ("step returned", after_step[0])
    )
    return faults + _tracing_noise(candidate, after_reset[0], key, action)


def _output_faults(name: str, output: Any, spec: environment.EnvironmentSpec) -> list[str]:
    """Returns what is wrong with the shapes of what `reset` or `step` returned."""
    if not isinstance(output, tuple) or len(output) != 2:
        return [f"{name} returns a {type(output).__name__}, not a pair (state, TimeStep)"]
    timestep = output[1]
    if not isinstance(timestep, types.TimeStep):
        return [f"{name} returns a {type(timestep).__name__} where a podracers TimeStep belongs"]
    came = f"{name} returned"
    faults = _difference(
        "observation", ("spec says", spec.observation), (came, timestep.observation)
    )
    scalars = {"reward": np.float32, "discount": np.float32, "step_type": np.int8}
    for field, dtype in scalars.items():
        expected = ("the contract says", specs.Array((), dtype))
        faults += _difference(field, expected, (came, getattr(timestep, field)))
    return faults


def _difference(
    what: str, one: tuple[str, types.PyTree], two: tuple[str, types.PyTree]
) -> list[str]:
    """Returns where two pytrees of shaped things differ, one phrase for each leaf.

    Args:
      what: the name of the thing.
      one: who says so ("spec says"), and the first pytree.
      two: the same of the second.
    """
    (left_says, left), (right_says, right) = one, two
    left_leaves, left_tree = jax.tree.flatten_with_path(left)
    right_leaves, right_tree = jax.tree.flatten_with_path(right)
    if left_tree != right_tree:
        left_text, right_text = _structure(left_tree), _structure(right_tree)
        return [f"{what}: {left_says} the structure {left_text}, {right_says} {right_text}"]
    return [
        f"{what}{jax.tree_util.keystr(path)}: {left_says} {_shape(a)}, {right_says} {_shape(b)}"
        for (path, a), (_, b) in zip(left_leaves, right_leaves)
        if a.shape != b.shape or a.dtype != b.dtype
    ]


def _tracing_noise(
    candidate: environment.Environment, state: Any, key: jax.Array, action: Any
) -> list[str]:
    """Returns whether tracing twice gives two programs: NumPy randomness, or state in `self`."""
    faults = []
    calls = {"reset": (candidate.reset, (key,)), "step": (candidate.step, (state, action))}
    for name, (function, arguments) in calls.items():
        one, two = (jax.make_jaxpr(_fresh(function))(*arguments) for _ in range(2))
        same = _without_addresses(one) == _without_addresses(two) and all(
            _same_constant(a, b) for a, b in zip(one.consts, two.consts)
        )
        if not same:
            faults.append(
                f"{name} is not deterministic: tracing it twice gives two programs "
                "(randomness must come from the key, and memory lie in the state)"
            )
    return faults


def _fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a new function that does the same: JAX would not trace a known one again."""

    def call(*arguments: Any) -> Any:
        return function(*arguments)

    return call


def _same_constant(one: Any, two: Any) -> bool:
    """Returns whether two constants of a program are equal; typed keys do not compare as arrays."""
    if isinstance(one, jax.Array) and jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
        one, two = jax.random.key_data(one), jax.random.key_data(two)
    return np.array_equal(one, two)


def _without_addresses(program: Any) -> str:
    """Returns the text of a program without the addresses of the functions in it."""
    return re.sub(r"0x[0-9a-f]+", "", str(program))


def _shape(leaf: Any) -> str:
    """Returns a shape and a dtype as `(4,) float32`."""
    return f"{leaf.shape} {leaf.dtype}" if hasattr(leaf, "dtype") else type(leaf).__name__


def _structure(tree: jax.tree_util.PyTreeDef) -> str:
    """Returns the structure of a pytree, short."""
    text = str(tree).removeprefix("PyTreeDef(").removesuffix(")")
    return text if len(text) <= 120 else text[:117] + "..."


def one_line(error: Exception) -> str:
    """Returns an exception as one line."""
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first.strip()}" if first else type(error).__name__
