"""Checks the contract of an environment or an agent: podracers-check NAME.

NAME is MODULE.Class, in JAX or on the host, or an id of a library: `CartPole-v1` of Gymnasium or
EnvPool, `envpool:Pong-v5`, `jumanji:Snake-v1`, `my_games:Game-v0` (Gymnasium's, registered by
`my_games`). Prints the specification and each stage with its time, and then `ok`, or the faults,
one a line, with exit code 2. With --environment, MODULE.Class is an agent: it has to learn the same
on two devices as on one. A machine without two devices shows two fake ones.

MODULE.Class is a class or a function of a module in the working directory or elsewhere on Python's
path; it is called without arguments; an agent is called with `spec=`.
"""

import contextlib
import functools
import importlib
import os
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from dm_env import specs

from podracers import agent_contract, contract, environment, errors, host_contract
from podracers.commands import command_line
from podracers.training import config

_CLASSES = (
    *("Brax", "Craftax", "EnvPool", "Gymnasium"),
    *("Gymnax", "JaxMARL", "Jumanji", "Pgx", "Playground", "XMiniGrid"),
)
_ADAPTORS = {name.lower(): name for name in _CLASSES}  # names of classes by module


def main() -> int:
    """Parses the command line, checks the environment or the agent, and prints the faults."""
    parser = command_line.Parser(description=__doc__)
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("--environment", metavar="NAME", help="in JAX; checks an agent")
    arguments = parser.parse_args()
    name, task_name = arguments.name, arguments.environment
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", 2)
    command_line.use_compilation_cache()
    if task_name is not None:
        task = _environment(task_name)
        agent_contract.check_agent(_call(name, spec=task.spec), task, stage=_stage)
        faults = []
    else:
        faults = _environment_faults(name)
    for fault in faults:
        print(f"{name}: {fault}")
    if not faults:
        print("ok")
    return errors.UserError.exit_code if faults else 0


def _environment_faults(name: str) -> list[str]:
    """Prints an environment's specification and the stages of its check; returns its faults."""
    candidate, again = _environment(name), _environment(name)
    if faults := contract.static_faults(candidate):
        return faults
    print("\n".join(_described(candidate.spec)))
    if not environment.is_host(candidate):
        return contract.environment_faults(candidate, again=again, stage=_stage)
    faults = host_contract.environment_faults(candidate, again=again, stage=_stage)
    if not faults:
        with _stage("two seeds with equal actions"):
            recordings = host_contract.equal_actions(candidate)
        different = host_contract.num_different(recordings)
        total = len(recordings) * host_contract.NUM_STREAMS
        ends = sum(np.sum(recording.timestep.last()) for recording in recordings)
        cuts = sum(np.sum(recording.timestep.truncated()) for recording in recordings)
        print(f"different streams: {different} of {total}; {ends} episodes ended, {cuts} truncated")
    return faults


@contextlib.contextmanager
def _stage(name: str) -> Iterator[None]:
    """Prints the name of a stage as it begins, and its time as it ends."""
    print(f"{name} ... ", end="", flush=True)
    began = time.perf_counter()
    try:
        yield
    finally:
        print(f"{time.perf_counter() - began:.1f} s", flush=True)


def _described(spec: environment.EnvironmentSpec) -> list[str]:
    """Returns a line for each part of a specification, as networks receive it, and for metrics."""
    parts, _ = jax.tree.flatten_with_path(environment.without_state(spec.observation))
    rows = [(f"observation{jax.tree_util.keystr(path)}", part) for path, part in parts]
    agents = f", {spec.num_agents} agents, each of which has" if spec.num_agents > 1 else ""
    agents += ", two players in turn" if spec.players == 2 else ""
    lines = [f"{spec.name}: time limit {spec.max_episode_steps or 'none'}{agents}"]
    for path, part in [*rows, ("action", spec.action)]:
        words = [f"{part.dtype}{[*part.shape]}"]
        if path == f"observation['{environment.ACTION_MASK}']":
            words.append("mask of legal actions")
        elif path == f"observation['{environment.ACTIVE}']":
            words.append("false where the agent is out")
        elif isinstance(part, specs.DiscreteArray):
            words.append(f"{part.num_values} values")
        elif isinstance(part, specs.BoundedArray):
            low, high = np.unique(part.minimum), np.unique(part.maximum)
            note = ", not the same for each component" if max(low.size, high.size) > 1 else ""
            words.append(f"from {low[0]:g} to {high[-1]:g}{note}")
        if path != "action" and environment.num_values(part) is not None:
            words.append("one-hot")
        lines.append(f"  {path}: {', '.join(words)}")
    if spec.metrics:
        lines.append(f"  metrics: {', '.join(spec.metrics)}")
    return lines


def _environment(name: str) -> Any:
    """Returns the environment of a dotted name, or of an id with or without its library.

    Raises:
      errors.UserError: there is no such class or id.
    """
    if "." in name and all(part.isidentifier() for part in name.split(".")):
        return _call(name)
    if ":" not in name:
        known = {
            "gymnasium": importlib.import_module("gymnasium").registry,
            "envpool": importlib.import_module("envpool").list_all_envs(),
        }
        library = next((suite for suite, ids in known.items() if name in ids), None)
        if library is None:
            near = errors.nearest(name, {task for ids in known.values() for task in ids})
            raise errors.UserError(
                "expected MODULE.Class, such as environments.catch.Catch, or an id of Gymnasium "
                f"or EnvPool: '{name}'{near}"
            )
        name = f"{library}:{name}"
    library, _, task_id = name.partition(":")
    if library not in _ADAPTORS:
        library, task_id = "gymnasium", name
    return _call(f"environments.{library}.{_ADAPTORS[library]}", task_id)


def _call(name: str, *arguments: Any, **options: Any) -> Any:
    """Returns the result of the class or the function with a dotted name."""
    module_name, _, attribute = name.rpartition(".")
    if not module_name:
        raise errors.UserError(f"expected MODULE.Class, such as environments.catch.Catch: '{name}'")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        raise config.explained(error, f"'{name}'") from error
    if not hasattr(module, attribute):
        near = errors.nearest(attribute, vars(module))
        raise errors.UserError(f"the module {module_name} has no '{attribute}'{near}")
    make = getattr(module, attribute)
    if hasattr(make, "init_learner") and not options:
        raise errors.UserError(f"{name} is an agent: name a JAX environment by --environment")
    with config.user_errors(f"{name}({', '.join(options)})"):
        return make(*arguments, **options)


command = functools.partial(command_line.run, main)
