"""Checks of an environment's contract (`podracers.types`), for its author and before a run.

Three stages, each of which needs the ones before it: the spec; shapes and dtypes of the outputs of
`reset` and `step`; values in episodes of a random policy.

Axis legend: `B` streams, `A` actions, `D` parts of a multi-discrete action.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from podracers import environment, errors, parallel, types

_NUM_STREAMS = 8


def check_environment(candidate: Any, num_steps: int = 1000, seed: int = 0) -> None:
    """Raises an error that lists the faults of an environment; returns if there are none.

    Runs eight streams of random legal actions, batched and compiled as in a runner. Randomness that
    is drawn while `reset` or `step` is traced (`np.random`) becomes a constant and is not found.

    Args:
      candidate: an `Environment`, or a class that is called without arguments.
      num_steps: steps of each stream; the time limit is checked if it is reached within them.
      seed: seed of the resets and the actions.

    Raises:
      errors.UserError: one line with the environment and every fault.
    """
    if isinstance(candidate, type):
        try:
            candidate = candidate()
        except Exception as error:
            raise errors.UserError(
                f"{candidate.__name__} cannot be made without arguments: {errors.one_line(error)}"
            ) from error
    name = type(candidate).__name__
    missing = [member for member in ("spec", "reset", "step") if not has(candidate, member)]
    if missing:
        raise errors.UserError(
            f"{name} is not an environment: it has no {', no '.join(missing)} "
            "(see podracers.environment.Environment)"
        )
    faults, spec = spec_faults(candidate)
    if not faults:
        faults = trace_faults(candidate, spec)
    if not faults:
        faults = _rollout_faults(candidate, spec, num_steps, seed)
    if faults:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise errors.UserError(f"environment {name} has {count}: {'; '.join(faults)}")


def random_action(action: specs.Array, observation: types.PyTree, key: jax.Array) -> jax.Array:
    """Draws an action uniformly from the legal ones (one stream, no batch axis).

    Args:
      action: the action's spec.
      observation: an observation, whose `action_mask` is applied if there is one.
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
    # Each of several identically distributed numbers is the largest with equal probability.
    score = jax.random.uniform(key, legal.shape)
    return jnp.argmax(jnp.where(legal, score, -1.0), axis=-1).astype(action.dtype)


def has(candidate: Any, member: str) -> bool:
    """Returns whether an object has a member, without evaluating a property."""
    return hasattr(type(candidate), member) or member in getattr(candidate, "__dict__", {})


def spec_faults(
    candidate: environment.Environment,
) -> tuple[list[str], environment.EnvironmentSpec | None]:
    """Returns the faults of the spec, and the spec."""
    try:
        spec = candidate.spec
    except Exception as error:
        return [f"spec raises {errors.one_line(error)}"], None
    if not isinstance(spec, environment.EnvironmentSpec):
        fault = f"spec is a {type(spec).__name__}, not a podracers EnvironmentSpec"
        if hasattr(candidate, "action_space"):
            fault += " (it looks like a Gym environment: those step on the host, not under jit)"
        return [fault], None
    faults = []
    parts, _ = jax.tree.flatten_with_path(
        spec.observation, is_leaf=lambda node: not isinstance(node, dict)
    )
    if not parts:
        faults.append("spec.observation is an empty dict")
    for key_path, part in parts:
        path = f"observation{jax.tree_util.keystr(key_path)}"
        if not isinstance(part, specs.Array):
            kind = type(part).__name__
            faults.append(f"spec.{path} is a {kind}, not a dm_env.specs.Array or a dict of them")
        elif jax.dtypes.canonicalize_dtype(part.dtype) != part.dtype:
            faults.append(f"spec.{path} has dtype {part.dtype}, which JAX does not make by default")
    if fault := _action_fault(spec.action):
        faults.append(f"spec.action {fault}")
    limit = spec.max_episode_steps
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        faults.append(f"spec.max_episode_steps is {limit!r}, not a positive int or None")
    has_mask = isinstance(spec.observation, dict) and environment.ACTION_MASK in spec.observation
    if has_mask and not faults:
        mask = spec.observation[environment.ACTION_MASK]
        expected = (*spec.action.shape, int(np.max(spec.action.maximum)) + 1)
        if np.issubdtype(spec.action.dtype, np.floating):
            faults.append("spec.observation has an action_mask, but the action is continuous")
        elif isinstance(mask, dict) or mask.shape != expected or mask.dtype != np.bool_:
            faults.append(
                f"spec.observation['action_mask'] must be {expected} bool, not {_shape(mask)}"
            )
    return faults, spec


def _action_fault(action: Any) -> str | None:
    """Returns the fault of an action's spec, if it has one."""
    if not isinstance(action, specs.BoundedArray):
        return (
            f"is a {type(action).__name__}; supported are a DiscreteArray, an integer BoundedArray "
            "of shape (D,) and a floating BoundedArray (all of dm_env.specs)"
        )
    is_integer = np.issubdtype(action.dtype, np.integer)
    faults = {
        f"has dtype {action.dtype}; integers and floats are supported": not is_integer
        and not np.issubdtype(action.dtype, np.floating),
        f"has dtype {action.dtype}, which JAX does not make by default": (
            jax.dtypes.canonicalize_dtype(action.dtype) != action.dtype
        ),
    }
    if not is_integer:
        bounds = np.stack(np.broadcast_arrays(action.minimum, action.maximum))
        faults["has infinite bounds: a continuous action needs finite ones"] = not np.all(
            np.isfinite(bounds)
        )
        faults["has a part whose minimum is not below its maximum"] = np.any(bounds[0] >= bounds[1])
    elif not isinstance(action, specs.DiscreteArray):
        faults[
            f"is an integer BoundedArray of shape {action.shape}: use a DiscreteArray for one "
            "part, or shape (D,) for several"
        ] = len(action.shape) != 1
        faults[f"has minimum {action.minimum}: parts count from 0"] = np.any(action.minimum != 0)
    return next((fault for fault, is_there in faults.items() if is_there), None)


def trace_faults(
    candidate: environment.Environment, spec: environment.EnvironmentSpec
) -> list[str]:
    """Returns the faults in the shapes and dtypes of the outputs of `reset` and `step`."""
    action = jax.ShapeDtypeStruct(spec.action.shape, spec.action.dtype)
    arguments, states = (jax.random.key(0),), []
    for name in ("reset", "step"):
        try:
            output = jax.eval_shape(getattr(candidate, name), *arguments)
        except Exception as error:
            return [f"{name} cannot be traced by JAX: {errors.one_line(error)}"]
        if not isinstance(output, tuple) or len(output) != 2:
            return [f"{name} returns a {type(output).__name__}, not a pair (state, TimeStep)"]
        state, timestep = output
        if not isinstance(timestep, types.TimeStep):
            kind = type(timestep).__name__
            return [f"{name} returns a {kind} where a podracers TimeStep belongs"]
        expected = types.TimeStep(
            observation=spec.observation,
            reward=specs.Array((), np.float32),
            discount=specs.Array((), np.float32),
            step_type=specs.Array((), np.int8),
        )
        faults = [
            fault
            for field, one, two in zip(timestep._fields, expected, timestep)
            for fault in _differences(field, "expected", one, f"{name} returned", two)
        ]
        if faults:
            return faults
        arguments, states = (state, action), [*states, state]
    return _differences("state", "reset returned", states[0], "step returned", states[1])


def _differences(
    name: str, one_label: str, one: types.PyTree, two_label: str, two: types.PyTree
) -> list[str]:
    """Returns the differences in structure, shape and dtype of two pytrees, one for each leaf."""
    leaves, tree = jax.tree.flatten_with_path(one)
    other_leaves, other_tree = jax.tree.flatten_with_path(two)
    if tree != other_tree:
        texts = [str(t).removeprefix("PyTreeDef(")[:-1] for t in (tree, other_tree)]
        short = [text if len(text) <= 120 else text[:117] + "..." for text in texts]
        return [f"{name}: {one_label} the structure {short[0]}, {two_label} {short[1]}"]
    return [
        f"{name}{jax.tree_util.keystr(path)}: {one_label} {_shape(a)}, {two_label} {_shape(b)}"
        for (path, a), (_, b) in zip(leaves, other_leaves)
        if a.shape != b.shape or a.dtype != b.dtype
    ]


def _shape(leaf: Any) -> str:
    """Returns a shape and a dtype as `(4,) float32`."""
    return f"{leaf.shape} {leaf.dtype}" if hasattr(leaf, "dtype") else type(leaf).__name__


class _Scan(NamedTuple):
    """Carry of the random rollout; leaves are `[B, ...]`."""

    state: Any
    timestep: types.TimeStep
    length: jax.Array  # int32, steps in this episode so far
    faults: dict[str, jax.Array]  # bool, whether it ever occurred
    digest: jax.Array  # float32, a sum that depends on all time steps


def _rollout_faults(
    candidate: environment.Environment,
    spec: environment.EnvironmentSpec,
    num_steps: int,
    seed: int,
) -> list[str]:
    """Returns the rules that a random policy's episodes break."""

    def rollout(key: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        # Keys are split before the scan: each use of the generator in it adds compile time.
        reset_keys, action_keys = jax.random.split(key, (2, num_steps + 1))
        state, timestep = candidate.reset(reset_keys[0])
        zero = jnp.zeros((), jnp.int32)
        faults = _timestep_faults(spec, timestep, zero)

        def step(carry: _Scan, keys: tuple[jax.Array, jax.Array]) -> tuple[_Scan, None]:
            reset_key, action_key = keys
            action = random_action(spec.action, carry.timestep.observation, action_key)
            stepped, fresh = candidate.step(carry.state, action), candidate.reset(reset_key)
            ended = carry.timestep.last()
            state, timestep = jax.tree.map(lambda a, b: jnp.where(ended, a, b), fresh, stepped)
            length = jnp.where(ended, 0, carry.length + 1)
            now = _timestep_faults(spec, timestep, length)
            faults = {text: carry.faults[text] | occurs for text, occurs in now.items()}
            total = sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(timestep))
            return _Scan(state, timestep, length, faults, 0.999 * carry.digest + total), None

        carry = _Scan(state, timestep, zero, faults, jnp.zeros(()))
        carry, _ = jax.lax.scan(step, carry, (reset_keys[1:], action_keys[1:]))
        return carry.faults, carry.digest

    keys = jax.random.split(jax.random.key(seed), _NUM_STREAMS)
    # The rollouts are short: compiling takes most of the time.
    options = {"xla_backend_optimization_level": 0} if parallel.platform() == "cpu" else None
    run = jax.jit(jax.vmap(rollout), compiler_options=options)
    try:
        faults, digest = jax.device_get(run(keys))
        _, again = jax.device_get(run(keys))
    except Exception as error:
        return [f"a batched, compiled rollout fails: {errors.one_line(error)}"]
    found = [text for text, occurred in faults.items() if np.any(occurred)]
    if not np.array_equal(digest, again, equal_nan=True):
        found.append("the same keys and actions gave two different rollouts")
    return found


def _timestep_faults(
    spec: environment.EnvironmentSpec, timestep: types.TimeStep, length: jax.Array
) -> dict[str, jax.Array]:
    """Returns each rule's text, and whether a time step breaks it.

    Args:
      spec: the environment's specification.
      timestep: one stream's time step.
      length: steps since the reset; 0 if `timestep` came from `reset`.
    """
    fresh, last = length == 0, timestep.last()
    step_type, discount, reward = timestep.step_type, timestep.discount, timestep.reward
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
    parts, _ = jax.tree.flatten_with_path(spec.observation)
    for (path, part), leaf in zip(parts, jax.tree.leaves(timestep.observation)):
        name = f"observation{jax.tree_util.keystr(path)}"
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            faults[f"{name} is NaN or infinite"] = ~jnp.all(jnp.isfinite(leaf))
        if isinstance(part, specs.BoundedArray):
            outside = (leaf < part.minimum) | (leaf > part.maximum)
            faults[f"{name} leaves the bounds of its spec"] = jnp.any(outside)
    if isinstance(spec.observation, dict) and environment.ACTION_MASK in spec.observation:
        mask = timestep.observation[environment.ACTION_MASK]
        empty = ~jnp.all(jnp.any(mask, axis=-1)) & ~last  # the action at LAST is ignored
        faults["an action_mask has no legal action"] = empty
        num_values = np.broadcast_to(np.asarray(spec.action.maximum) + 1, spec.action.shape)
        beyond = np.arange(mask.shape[-1]) >= num_values[..., None]
        faults["an action_mask allows a value beyond spec.action"] = jnp.any(mask & beyond)
    if (limit := spec.max_episode_steps) is not None:
        text = f"an episode goes on after spec.max_episode_steps = {limit}"
        faults[text] = (length >= limit) & ~last
    return faults
