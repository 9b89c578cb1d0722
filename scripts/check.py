"""Checks the contract of an environment or an agent: python scripts/check.py MODULE.Class.

Lists the faults of an environment, one a line, with exit code 2; prints nothing if there are none.
With --environment, MODULE.Class is an agent: it has to learn the same on two devices as on one. A
machine without two devices shows two fake ones.

MODULE.Class is a class or a function of a module in the working directory or elsewhere on Python's
path; it is called without arguments, and that of an agent with `spec=`.
"""

import importlib
import inspect
import os
import pkgutil
from collections.abc import Callable
from typing import Any

import jax

from podracers import command_line, errors
from podracers.training import check, config


def main() -> int:
    """Parses the command line, checks the environment or the agent, and prints the faults."""
    parser = command_line.Parser(description=__doc__)
    parser.add_argument("name", metavar="MODULE.Class")
    parser.add_argument("--environment", metavar="MODULE.Class", help="in JAX; checks an agent")
    arguments = parser.parse_args()
    name, task_name = arguments.name, arguments.environment
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", 2)
    command_line.use_compilation_cache()
    if task_name is None:
        candidate = _made(name)
        if hasattr(candidate, "init_learner"):
            raise errors.UserError(f"{name} is an agent: name a JAX environment by --environment")
        faults = check.environment_faults(candidate)
    else:
        make, task = _imported(name), _made(task_name)
        with config.user_errors(name):
            agent = make(spec=task.spec)
        check.check_agent(agent, task)
        faults = []
    for fault in faults:
        print(f"{name}: {fault}")
    return errors.UserError.exit_code if faults else 0


def _made(name: str) -> Any:
    """Returns the result of a class or a function that is called without arguments."""
    make = _imported(name)
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise errors.UserError(
            f"{name} is called without arguments: {error}; name a function that returns the "
            "environment"
        ) from error
    with config.user_errors(name):
        return make()


def _imported(name: str) -> Callable[[], Any]:
    """Returns the class or the function with a dotted name."""
    module_name, _, attribute = name.rpartition(".")
    if not module_name:
        raise errors.UserError(f"expected MODULE.Class, such as environments.catch.Catch: '{name}'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        near = _nearest_module(error.name) if f"{module_name}.".startswith(f"{error.name}.") else ""
        raise errors.UserError(f"'{name}': {error}{near}") from error
    except (ImportError, SyntaxError) as error:
        raise errors.UserError(f"'{name}': {errors.one_line(error)}") from error
    if not callable(made := getattr(module, attribute, None)):
        known = [each for each, value in vars(module).items() if isinstance(value, type)]
        near = errors.nearest(attribute, known)
        raise errors.UserError(f"the module {module_name} has no class '{attribute}'{near}")
    return made


def _nearest_module(name: str) -> str:
    """Returns the end of a message, with the module nearest to one that does not exist."""
    package, _, module = name.rpartition(".")
    folders = getattr(importlib.import_module(package), "__path__", []) if package else None
    return errors.nearest(module, [each.name for each in pkgutil.iter_modules(folders)])


if __name__ == "__main__":
    command_line.run(main)
