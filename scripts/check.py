"""Checks the contract of an environment or an agent: python scripts/check.py MODULE.Class.

Lists the faults of an environment, one a line, with exit code 2; prints nothing if there are none.
With --environment, MODULE.Class is an agent: it has to learn the same on two devices as on one. A
machine without two devices shows two fake ones.

MODULE.Class is a class or a function of a module in the working directory or elsewhere on Python's
path; it is called without arguments, and that of an agent with `spec=`.
"""

import importlib
import os
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
        faults = check.environment_faults(_made(name))
    else:
        task = _made(task_name)
        check.check_agent(_made(name, spec=task.spec), task)
        faults = []
    for fault in faults:
        print(f"{name}: {fault}")
    return errors.UserError.exit_code if faults else 0


def _made(name: str, **arguments: Any) -> Any:
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
    if hasattr(make, "init_learner") and not arguments:
        raise errors.UserError(f"{name} is an agent: name a JAX environment by --environment")
    with config.user_errors(f"{name}({', '.join(arguments)})"):
        return make(**arguments)


if __name__ == "__main__":
    command_line.run(main)
