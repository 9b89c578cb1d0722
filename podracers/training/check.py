"""Tells the author of an environment what is wrong with it, before a training run does.

The checks go from the outside in, and each stage needs the ones before it: is it an environment;
does the spec make sense; do `reset` and `step` trace to what the spec promises; do the numbers of a
random policy's episodes obey the contract (`podracers.types`).

Axis legend: `B` streams, `A` actions, `D` parts of a multi-discrete action.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from podracers import environment, errors, types
from podracers.training import check_static

_MEMBERS = ("spec", "reset", "step")
_NUM_STREAMS = 8


def check_environment(candidate: Any, num_steps: int = 1000, seed: int = 0) -> None:
    """Raises an error that lists what is wrong with an environment; returns if nothing is.

    Runs eight streams of random legal actions, batched and compiled as a runner would.

    Args:
      candidate: an `Environment`, or a class that makes one without arguments.
      num_steps: how many steps each stream takes; the time limit is checked if it is within that.
      seed: of the resets and the actions.

    Raises:
      errors.UserError: one line that names the environment and every fault that was found.
    """
    candidate = _instance(candidate)
    faults, spec = check_static.spec_faults(candidate)
    if not faults:
        faults = check_static.trace_faults(candidate, spec)
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
      observation: where `action_mask` is looked up; may be of any form.
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
            reason = check_static.one_line(error)
            raise errors.UserError(
                f"{candidate.__name__} cannot be made without arguments: {reason}"
            ) from error
    missing = [member for member in _MEMBERS if not _has(candidate, member)]
    if missing:
        kind = type(candidate).__name__
        raise errors.UserError(
            f"{kind} is not an environment: it has no {', no '.join(missing)} "
            "(see podracers.environment.Environment)"
        )
    return candidate


def _has(candidate: Any, member: str) -> bool:
    """Returns whether the member is there, without evaluating it: a property may raise."""
    return hasattr(type(candidate), member) or member in getattr(candidate, "__dict__", {})


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
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    rollout = jax.jit(
        jax.vmap(lambda key: _rollout(candidate, spec, num_steps, key)), compiler_options=options
    )
    try:
        faults, digest = jax.device_get(rollout(keys))
        _, digest_again = jax.device_get(rollout(keys))
    except Exception as error:
        return [f"a batched, compiled rollout fails: {check_static.one_line(error)}"]
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
        faults=_moment_faults(spec, timestep, jnp.zeros((), jnp.int32)),
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
        now = _moment_faults(spec, timestep, length)
        faults = {text: carry.faults[text] | happened for text, happened in now.items()}
        digest = 0.999 * carry.digest + _digest(timestep)
        return _Scan(state, timestep, length, faults, digest), None

    carry, _ = jax.lax.scan(step, carry, (reset_keys[1:], action_keys[1:]))
    return carry.faults, carry.digest


def _moment_faults(
    spec: environment.EnvironmentSpec, timestep: types.TimeStep, length: jax.Array
) -> dict[str, jax.Array]:
    """Returns each rule's text, and whether this time step breaks it.

    Args:
      spec: what was promised.
      timestep: of one stream.
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
