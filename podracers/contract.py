"""The contract of environments (`podracers.types`), checked for their authors and before a run.

Each stage needs the stages before it: members and spec; shapes and dtypes of the outputs of `reset`
and `step`; one key twice; a picture; values in episodes of a random policy. `host_contract` has the
stages of host environments.

Axis legend: `B` environments, `T` steps.
"""

import contextlib
import dataclasses
import functools
import inspect
import pickle
import random
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from podracers import environment, errors, leaks, parallel, precision, trees, types, video

_NUM_STREAMS = 8

Stage = Callable[[str], contextlib.AbstractContextManager[Any]]


def check_environment(candidate: Any, num_steps: int = 1000) -> None:
    """Raises an `errors.UserError`, one line with the faults (see `environment_faults`)."""
    again = None
    if isinstance(candidate, type):
        candidate, again = candidate(), candidate()
    environment.refuse(candidate, environment_faults(candidate, num_steps, again))


def environment_faults(
    candidate: Any,
    num_steps: int = 1000,
    again: Any = None,
    stage: Stage = contextlib.nullcontext,
) -> list[str]:
    """Returns the faults of the first stage that has any, one line each.

    Runs eight streams of random legal actions, batched and compiled as in a runner. Exceptions of
    the environment's own code are passed on unchanged.

    Args:
      candidate: an `Environment`.
      num_steps: steps of each stream; the time limit is checked if it is reached within them. With
        0, no episode is played.
      again: another instance of the environment, which has to be equal; None for `candidate`.
      stage: called with the name of each stage, for the context in which it runs.

    Raises:
      errors.UserError: the environment keeps an array that JAX traced (see `leaks.refused`).
    """
    if faults := static_faults(candidate):
        return faults
    if environment.is_host(candidate):
        return ["it runs on the host: `host_contract.environment_faults` checks it"]
    stages = {
        "shapes and dtypes of reset and step": lambda: trace_faults(candidate),
        "one key twice": lambda: _program_faults(candidate, again or candidate),
        "a picture": lambda: _render_faults(candidate),
    }
    if num_steps:
        name = f"{num_steps} random steps of {_NUM_STREAMS} streams, compiled"
        stages[name] = lambda: _rollout_faults(candidate, num_steps)
    for name, faults_of in stages.items():
        with stage(name), leaks.refused(candidate):
            if faults := faults_of():
                return faults
    return []


def static_faults(candidate: Any) -> list[str]:
    """Returns the faults of an environment's members and spec, on the host or not; runs nothing."""
    precision.require_32_bits()
    if dataclasses.is_dataclass(candidate):
        errors.require_types(candidate)
    is_host = environment.is_host(candidate)
    protocol = environment.HostEnvironmentFactory if is_host else environment.Environment
    if missing := missing_members(candidate, protocol):
        return [f"the environment has no {member}" for member in missing]
    return spec_faults(candidate)


def generators() -> dict[str, Any]:
    """Returns the states of the random generators that a whole process shares, by name."""
    return {
        "NumPy's global generator": pickle.dumps(np.random.get_state()),
        "Python's module `random`": random.getstate(),
    }


def seed_fault(
    before: Mapping[str, Any], otherwise: str = "it draws from a generator without a seed"
) -> str:
    """Returns the fault of an environment that plays other episodes with the same seed.

    `before` is the result of `generators` before it ran, and `otherwise` the likely cause where
    nothing has drawn from these.
    """
    used = [name for name, state in generators().items() if state != before[name]]
    cause = f"it draws from {' and '.join(used)}, not from its seed or key" if used else otherwise
    return f"one seed gives different episodes: {cause}"


def missing_members(part: Any, protocol: type) -> list[str]:
    """Returns the public members of a protocol that a part lacks."""
    members = {name for base in protocol.__mro__[:-1] for name in vars(base) if name[0] != "_"}
    # Statically, because a property may fail.
    return sorted(name for name in members if inspect.getattr_static(part, name, part) is part)


def spec_faults(candidate: environment.Environment) -> list[str]:
    """Returns the faults of the spec."""
    spec = candidate.spec
    if not isinstance(spec, environment.EnvironmentSpec):
        return [
            f"spec is a {errors.path_of(spec)}, not a podracers EnvironmentSpec (a Gym environment "
            "needs an adaptor: it steps on the host)"
        ]
    if faults := _agents_faults(spec):
        return faults
    faults = _metric_faults(spec.metrics)
    if spec.players not in (1, 2):
        faults.append(f"spec.players is {spec.players}, supported are 1, and 2 that move in turn")
    parts, _ = jax.tree.flatten_with_path(
        spec.observation, is_leaf=lambda node: not isinstance(node, dict)
    )
    for key_path, part in parts:
        path = f"observation{jax.tree_util.keystr(key_path)}"
        if not isinstance(part, specs.Array):
            kind = type(part).__name__
            faults.append(f"spec.{path} is a {kind}, not a dm_env.specs.Array or a dict of them")
        elif jax.dtypes.canonicalize_dtype(part.dtype) != part.dtype:
            faults.append(f"spec.{path} has dtype {part.dtype}, which JAX does not make by default")
    if fault := environment.action_fault(spec.action):
        return [*faults, f"spec.action {fault}"]
    if (mask := environment.action_mask(spec.observation)) is not None:
        if np.issubdtype(spec.action.dtype, np.floating):
            faults.append("spec.observation has an action_mask, but the action is continuous")
            return faults
        expected = environment.legal_values(spec.action).shape
        if isinstance(mask, dict) or (mask.shape, mask.dtype) != (expected, np.bool_):
            faults.append(f"spec.observation['action_mask'] must be bool{[*expected]}, not {mask}")
    return faults


def _agents_faults(spec: environment.EnvironmentSpec) -> list[str]:
    """Returns the fault of the number of agents, or of the key `active` of observations."""
    count, players = spec.num_agents, spec.players
    if not isinstance(count, int) or count < 1:
        return [f"spec.num_agents is {count!r}, expected 1, or more that act together"]
    if count > 1 and players != 1:
        return [f"spec.players is {players} and spec.num_agents is {count}: one of them must be 1"]
    part = spec.observation.get(environment.ACTIVE) if isinstance(spec.observation, dict) else None
    if part is None:
        return []
    if count == 1:
        return [
            "spec.observation has the key 'active', reserved for one of several agents that may be "
            "out: rename it"
        ]
    if isinstance(part, dict) or (part.shape, part.dtype) != ((), np.bool_):
        return [f"spec.observation['active'] must be bool[], not {part}"]
    return []


def _metric_faults(names: tuple[str, ...]) -> list[str]:
    """Returns the faults of the names of an environment's metrics."""
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        return [f"spec.metrics is {names!r}, not a tuple of names"]
    faults = []
    for index, name in enumerate(names):
        # A population adds `/std` and `/seed_N` to names.
        first = name.partition("/")[0]
        if not first.strip():
            faults.append(f"spec.metrics has the empty name {name!r}")
        elif first in environment.RESERVED_METRICS or name.startswith("greedy_"):
            faults.append(f"spec.metrics has the name {name!r}, which runners use")
        elif name in names[:index]:
            faults.append(f"spec.metrics has the name {name!r} twice")
    return faults


def trace_faults(candidate: environment.Environment) -> list[str]:
    """Returns the faults in the shapes and dtypes of the outputs of `reset` and `step`.

    Exceptions of the environment's own code are passed on unchanged.
    """
    try:
        return _trace_faults(candidate)
    except Exception:
        # A wrapper fails if the environment in it returns something else than a pair.
        inner: Any = getattr(candidate, "environment", None)
        if hasattr(inner, "step") and (faults := trace_faults(inner)):
            return faults
        raise


def _trace_faults(candidate: environment.Environment) -> list[str]:
    # The shape of a key: making one would compile two programs.
    reset = jax.eval_shape(candidate.reset, jax.eval_shape(lambda: jax.random.key(0)))
    if fault := _pair_fault("reset", "restart", reset):
        return [fault]
    step = jax.eval_shape(candidate.step, reset[0], _action_shape(candidate))
    if fault := _pair_fault("step", "transition", step):
        return [fault]
    axis = candidate.spec.agent_axis
    timestep = candidate.spec.timesteps(*axis)
    agents = f" (the first axis is that of {axis[0]} agents)" if axis else ""
    return [
        f"{where}: {difference}{agents * (where in ('reset', 'step'))}"
        for where, output, expected in (
            ("reset", reset[1], timestep),
            ("step", step[1], timestep),
            ("the state of step differs from that of reset", step[0], reset[0]),
        )
        for difference in trees.differences(*map(trees.structure, (output, expected)))
    ]


def _program_faults(*instances: environment.Environment) -> list[str]:
    """Returns the fault of two instances that differ; numbers of NumPy are part of a program."""
    before = generators()

    def program(candidate: environment.Environment) -> str:
        def play(key: jax.Array, action: jax.Array) -> Any:  # traced anew
            state, timestep = candidate.reset(key)
            return timestep, candidate.step(state, action)

        return jax.jit(play).lower(jax.random.key(0), _action_shape(candidate)).as_text()

    return [seed_fault(before)] if len(set(map(program, instances))) > 1 else []


def _action_shape(candidate: environment.Environment) -> jax.ShapeDtypeStruct:
    """Returns the shape of an action of one environment, of all its agents."""
    spec = candidate.spec
    return jax.ShapeDtypeStruct((*spec.agent_axis, *spec.action.shape), spec.action.dtype)


def _pair_fault(name: str, maker: str, output: Any) -> str | None:
    """Returns the fault of an output that is no pair of a state and a time step."""
    if isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], types.TimeStep):
        return None
    kinds, library = type(output).__name__, ""
    if type(output) is tuple:
        kinds = f"({', '.join(type(part).__name__ for part in output)})"
        library = {4: " as Gym's step does,", 5: " as Gymnasium's step does,"}.get(len(output), "")
    return f"{name} returned {kinds},{library} expected (state, TimeStep): see types.{maker}"


def _render_faults(candidate: environment.Environment) -> list[str]:
    """Returns the fault of the picture of one state, if the environment draws pictures."""
    try:
        if hasattr(candidate, "render"):
            video.drawable(candidate)
    except errors.UserError as error:
        return [str(error).removeprefix(f"{environment.name_of(candidate)}: ")]
    return []


def _rollout_faults(candidate: environment.Environment, num_steps: int) -> list[str]:
    """Returns the rules that a random policy's episodes break."""
    spec = candidate.spec

    def over_agents(function: Any, *axes: int | None) -> Any:
        return jax.vmap(function, axes) if spec.agent_axis else function

    draw = over_agents(functools.partial(environment.random_action, spec.action), 0, 0)
    rules = over_agents(functools.partial(timestep_faults, spec), 0, None)

    def rollout(key: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        # Keys are split before the scan: each use of the generator in it adds compile time.
        keys = jax.random.split(key, (num_steps + 1, 2))

        def step(carry: tuple, keys: jax.Array) -> tuple[tuple, Any]:
            state, timestep, length = carry
            key = jax.random.split(keys[0], spec.agent_axis) if spec.agent_axis else keys[0]
            action = draw(timestep.observation, key)
            stepped, fresh = candidate.step(state, action), candidate.reset(keys[1])
            before, ended = timestep, timestep.last().ravel()[0]
            state, timestep = jax.tree.map(lambda a, b: jnp.where(ended, a, b), fresh, stepped)
            length = jnp.where(ended, 0, length + 1)
            faults = rules(timestep, length)
            if spec.agent_axis:
                faults |= agents_faults(before, timestep)
            if observe := getattr(candidate, "observation_of", None):
                equal = jax.tree.map(jnp.allclose, observe(state), timestep.observation)
                equal = jnp.stack(jax.tree.leaves(equal))
                faults["observation_of returned another observation"] = ~jnp.all(equal)
            hashes = jnp.stack([parallel.hash_bits(leaf) for leaf in jax.tree.leaves(timestep)])
            return (state, timestep, length), (faults, hashes)

        state, timestep = candidate.reset(key)
        # The scan begins with a reset.
        ended = timestep._replace(step_type=jnp.full(spec.agent_axis, types.LAST, jnp.int8))
        return jax.lax.scan(step, (state, ended, jnp.int32(0)), keys)[1]  # [T]

    # The rollouts are short: compiling takes most of the time.
    options = {"xla_backend_optimization_level": 0} if parallel.platform() == "cpu" else None
    run = jax.jit(jax.vmap(rollout), compiler_options=options)
    keys, before = jax.random.split(jax.random.key(0), _NUM_STREAMS), generators()
    (faults, hashes), (_, others) = (jax.device_get(run(keys)) for _ in range(2))  # [B, T]
    broken = [text for text, occurred in faults.items() if np.any(occurred)]
    # A callback may draw while the program runs.
    return broken if np.array_equal(hashes, others) else [*broken, seed_fault(before)]


def agents_faults(before: types.TimeStep, after: types.TimeStep) -> dict[str, jax.Array]:
    """Returns each rule of several agents, and whether two time steps `[A]` in a row break it."""
    differs = jnp.any(after.step_type != after.step_type[0])
    faults = {"the agents of one environment have different step_types": differs}
    active, before_active = after.active(), before.active()
    if active is not None and before_active is not None:
        within = ~after.first()
        was = before_active | ~within
        faults["an agent is out (active is false) at FIRST"] = ~active & ~within
        faults["an agent that was out is active again"] = active & ~was
        faults["an agent goes out with a discount other than 0"] = (
            was & ~active & (after.discount != 0.0)
        )
        faults["an agent that was out has a reward other than 0"] = ~was & (after.reward != 0.0)
        if (mask := environment.action_mask(after.observation)) is not None:
            choices = jnp.sum(mask, axis=-1).reshape(len(active), -1).max(axis=-1)
            faults["an agent that is out has more than one legal action"] = ~active & (choices > 1)
    return faults


def timestep_faults(
    spec: environment.EnvironmentSpec, timestep: types.TimeStep, length: jax.Array
) -> dict[str, jax.Array]:
    """Returns each rule's text, and whether a time step of one stream breaks it.

    Its `length` is the number of steps since the reset, 0 if it came from `reset`.
    """
    last = timestep.last()
    faults = types.broken_rules(timestep, length == 0, spec.players)
    parts, _ = jax.tree.flatten_with_path(spec.observation)
    for (path, part), leaf in zip(parts, jax.tree.leaves(timestep.observation)):
        name = f"observation{jax.tree_util.keystr(path)}"
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            faults[f"{name} is NaN or infinite"] = ~jnp.all(jnp.isfinite(leaf))
        if isinstance(part, specs.BoundedArray):
            outside = (leaf < part.minimum) | (leaf > part.maximum)
            faults[f"{name} leaves the bounds of its spec"] = jnp.any(outside)
    for name, value in timestep.metrics.items():
        faults[f"the metric {name!r} of a LAST time step is infinite"] = last & jnp.isinf(value)
    if (mask := environment.action_mask(timestep.observation)) is not None:
        empty = ~jnp.all(jnp.any(mask, axis=-1)) & ~last  # the action at LAST is ignored
        faults["an action_mask has no legal action"] = empty
        beyond = mask & ~environment.legal_values(spec.action)
        faults["an action_mask allows a value beyond spec.action"] = jnp.any(beyond)
    if (limit := spec.max_episode_steps) is not None:
        text = f"an episode goes on after spec.max_episode_steps = {limit}"
        faults[text] = (length >= limit) & ~last
    return faults
