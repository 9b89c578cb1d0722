"""What the adaptors of other libraries' environments share."""

import importlib
import importlib.util
import types as python_types

import jax
import jax.numpy as jnp

from podracers import errors, types


def optional_import(module: str, user: str) -> python_types.ModuleType:
    """Imports a module of an optional package, or says how to install it.

    Args:
      module: dotted name; its first part names both the package and the extra.
      user: what needs it, for the message.

    Raises:
      errors.UserError: the package is not installed.
    """
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        raise errors.UserError(
            f"{user} needs the package '{package}': pip install {package} (or the extra of this"
            f" project: pip install '.[{package}]')"
        )
    return importlib.import_module(module)


def strong(tree: types.PyTree) -> types.PyTree:
    """Returns `tree` without weak types, which would make the step after a reset recompile."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.asarray(leaf).dtype), tree)
