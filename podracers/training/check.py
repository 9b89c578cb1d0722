"""Tells the author of an environment what is wrong with it, before a training run does.

The checks go from the outside in, and each stage needs the ones before it: is it an environment;
does the spec make sense; do `reset` and `step` trace to what the spec promises; do the numbers of a
random policy's episodes obey the contract (`podracers.types`).

Axis legend: `B` streams, `A` actions, `D` parts of a multi-discrete action.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from podracers import environment, errors, parallel, types

_MEMBERS = ("spec", "reset", "step")
_NUM_STREAMS = 8


def check_environment(candidate: Any, num_steps: int = 1000, seed: int = 0) -> None:
    """Raises an error that lists what is wrong with an environment; returns if nothing is.

    Runs eight streams of random legal actions, batched and compiled as a runner would.

    Args:
      candidate: an `Environment`, or a class that makes one without arguments.
      num_steps: steps that each stream takes; the time limit is checked if it is within that.
      seed: seed of the resets and the actions.

    Raises:
      errors.UserError: one line that names the environment and every fault that was found.
    """
    candidate = _instance(candidate)
    faults, spec = spec_faults(candidate)
    if not faults:
        faults = trace_faults(candidate, spec)
    if not faults:
        faults = _rollout_faults(candidate, spec, num_steps, seed)
    if faults:
        name = type(candidate).__name__
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise errors.UserError(f"environment {name} has {count}: {'; '.join(faults)}")


def random_action(action: specs.Array, observation: types.PyTree, key: jax.Array) -> jax.Array:
    """Draws an action uniformly from the legal ones (one stream, no batch axis).

    Args:
      action: the action's spec.
      observation: an observation of any form, whose `action_mask` counts if there is one.
      key: a typed key.
    """
    if np.issubdtype(action.dtype, np.floating):
        low = jnp.asarray(np.broadcast_to(action.minimum, action.shape))
        high = jnp.asarray(np.broadcast_to(action.maximum, action.shape))
        return jax.random.uniform(key, action.shape, action.dtype, low, high)
    num_values = np.broadcast_to(np.asarray(action.maximum, np.int64) + 1, action.shape)
    legal = np.arange(num_values.max()) < num_values[..., None]  # [A] or [D, A]
    if isinstance(observation, dict) and environment.ACTION_MASK in observation:
        legal = legal & observation[environment.ACTION_MASK]
    # The largest of equally distributed numbers is anyone's with equal probability.
    score = jax.random.uniform(key, legal.shape)
    return jnp.argmax(jnp.where(legal, score, -1.0), axis=-1).astype(action.dtype)


def _instance(candidate: Any) -> environment.Environment:
    """Returns an instance with the members of the protocol, or raises."""
    if isinstance(candidate, type):
        try:
            candidate = candidate()
        except Exception as error:
            reason = errors.one_line(error)
            raise errors.UserError(
                f"{candidate.__name__} cannot be made without arguments: {reason}"
            ) from error
    missing = [member for member in _MEMBERS if not has(candidate, member)]
    if missing:
        kind = type(candidate).__name__
        raise errors.UserError(
            f"{kind} is not an environment: it has no {', no '.join(missing)} "
            "(see podracers.environment.Environment)"
        )
    return candidate


def has(candidate: Any, member: str) -> bool:
    """Returns whether the member is there, without evaluating it: a property may raise."""
    return hasattr(type(candidate), member) or member in getattr(candidate, "__dict__", {})


def spec_faults(
    candidate: environment.Environment,
) -> tuple[list[str], environment.EnvironmentSpec | None]:
    """Returns what is wrong with the spec, and the spec."""
    try:
        spec = candidate.spec
    except Exception as error:
        return [f"spec raises {errors.one_line(error)}"], None
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
        return [f"reset cannot be traced by JAX: {errors.one_line(error)}"]
    faults = _output_faults("reset", after_reset, spec)
    if faults:
        return faults
    action = jax.ShapeDtypeStruct(spec.action.shape, spec.action.dtype)
    try:
        after_step = jax.eval_shape(_fresh(candidate.step), after_reset[0], action)
    except Exception as error:
        return [f"step cannot be traced by JAX: {errors.one_line(error)}"]
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


class _Scan(NamedTuple):
    """What the random rollout carries; leaves are `[B, ...]`."""

    state: Any
    timestep: types.TimeStep
    length: jax.Array  # int32, steps in this episode so far
    faults: dict[str, jax.Array]  # bool, has it ever happened
    digest: jax.Array  # float32, changes when anything in the rollout does


def _rollout_faults(
    candidate: environment.Environment,
    spec: environment.EnvironmentSpec,
    num_steps: int,
    seed: int,
) -> list[str]:
    """Returns which rules the numbers of a random policy's episodes break."""
    keys = jax.random.split(jax.random.key(seed), _NUM_STREAMS)
    # Run twice, for a moment: compiling is what takes the time.
    options = {"xla_backend_optimization_level": 0} if parallel.platform() == "cpu" else None
    rollout = jax.jit(
        jax.vmap(lambda key: _rollout(candidate, spec, num_steps, key)), compiler_options=options
    )
    try:
        faults, digest = jax.device_get(rollout(keys))
        _, digest_again = jax.device_get(rollout(keys))
    except Exception as error:
        return [f"a batched, compiled rollout fails: {errors.one_line(error)}"]
    found = [text for text, happened in faults.items() if np.any(happened)]
    if not np.array_equal(digest, digest_again, equal_nan=True):
        found.append("the same keys and actions gave two different rollouts")
    return found


def _rollout(
    candidate: environment.Environment,
    spec: environment.EnvironmentSpec,
    num_steps: int,
    key: jax.Array,
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Runs one stream with auto-reset; returns which faults it met, and a digest."""
    # All keys are split before the scan: each use of the generator inside adds to the compile time.
    reset_keys, action_keys = jax.random.split(key, (2, num_steps + 1))
    state, timestep = candidate.reset(reset_keys[0])
    carry = _Scan(
        state=state,
        timestep=timestep,
        length=jnp.zeros((), jnp.int32),
        faults=_timestep_faults(spec, timestep, jnp.zeros((), jnp.int32)),
        digest=_digest(timestep),
    )

    def step(carry: _Scan, keys: tuple[jax.Array, jax.Array]) -> tuple[_Scan, None]:
        reset_key, action_key = keys
        action = random_action(spec.action, carry.timestep.observation, action_key)
        stepped = candidate.step(carry.state, action)
        fresh = candidate.reset(reset_key)
        ended = carry.timestep.last()
        state, timestep = jax.tree.map(lambda a, b: jnp.where(ended, a, b), fresh, stepped)
        length = jnp.where(ended, 0, carry.length + 1)
        now = _timestep_faults(spec, timestep, length)
        faults = {text: carry.faults[text] | happened for text, happened in now.items()}
        digest = 0.999 * carry.digest + _digest(timestep)
        return _Scan(state, timestep, length, faults, digest), None

    carry, _ = jax.lax.scan(step, carry, (reset_keys[1:], action_keys[1:]))
    return carry.faults, carry.digest


def _timestep_faults(
    spec: environment.EnvironmentSpec, timestep: types.TimeStep, length: jax.Array
) -> dict[str, jax.Array]:
    """Returns each rule's text, and whether this time step breaks it.

    Args:
      spec: the environment's specification.
      timestep: one stream's time step.
      length: steps since the reset; 0 means that `timestep` came from `reset`.
    """
    fresh = length == 0
    step_type, discount, reward = timestep.step_type, timestep.discount, timestep.reward
    last = timestep.last()
    faults = {
        "reset returned a step_type other than FIRST": fresh & (step_type != types.FIRST),
        "reset returned a reward other than 0": fresh & (reward != 0.0),
        "step returned a step_type other than MID or LAST": ~fresh
        & (step_type != types.MID)
        & ~last,
        "a LAST time step has a discount other than 0 (terminated) or 1 (truncated)": last
        & (discount != 0.0)
        & (discount != 1.0),
        "a time step other than LAST has a discount other than 1": ~last & (discount != 1.0),
        "reward is NaN or infinite": ~jnp.isfinite(reward),
    }
    faults |= _observation_faults(spec, timestep)
    if spec.max_episode_steps is not None:
        limit = spec.max_episode_steps
        text = f"an episode goes on after spec.max_episode_steps = {limit}"
        faults[text] = (length >= limit) & ~last
    return faults


def _observation_faults(
    spec: environment.EnvironmentSpec, timestep: types.TimeStep
) -> dict[str, jax.Array]:
    """Returns each rule about observations, and whether this time step breaks it."""
    faults = {}
    expected, _ = jax.tree.flatten_with_path(spec.observation)
    for (path, part), leaf in zip(expected, jax.tree.leaves(timestep.observation)):
        name = f"observation{jax.tree_util.keystr(path)}"
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            faults[f"{name} is NaN or infinite"] = ~jnp.all(jnp.isfinite(leaf))
        if isinstance(part, specs.BoundedArray):
            outside = (leaf < part.minimum) | (leaf > part.maximum)
            faults[f"{name} leaves the bounds of its spec"] = jnp.any(outside)
    if isinstance(spec.observation, dict) and environment.ACTION_MASK in spec.observation:
        # The action at LAST is ignored, so a mask may be empty there.
        mask = timestep.observation[environment.ACTION_MASK]
        empty = ~jnp.all(jnp.any(mask, axis=-1)) & ~timestep.last()
        faults["an action_mask has no legal action"] = empty
        num_values = np.broadcast_to(np.asarray(spec.action.maximum) + 1, spec.action.shape)
        beyond = np.arange(mask.shape[-1]) >= num_values[..., None]
        faults["an action_mask allows a value beyond spec.action"] = jnp.any(mask & beyond)
    return faults


def _digest(timestep: types.TimeStep) -> jax.Array:
    """Returns one number that depends on every element of the time step."""
    total = jnp.zeros((), jnp.float32)
    for leaf in jax.tree.leaves(timestep):
        flat = jnp.ravel(leaf).astype(jnp.float32)
        total += jnp.sum(flat * jnp.cos(jnp.arange(flat.size, dtype=jnp.float32)))
    return total
