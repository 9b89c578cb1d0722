"""A rule in a file, apart from the run that it was learnt in."""

import dataclasses
import json
import pathlib
import zipfile

import jax
import numpy as np

from agents.meta.lpg import rule as rule_lib
from podracers import errors, types

_OPTIONS = "options"  # the entry that holds the fields of `Rule`, as JSON


def save(path: str | pathlib.Path, rule: rule_lib.Rule, params: types.PyTree) -> None:
    """Writes a rule as `.npz`: an array for each parameter, named by its path, and its options."""
    arrays = {
        jax.tree_util.keystr(name, simple=True, separator="/"): np.asarray(leaf)
        for name, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    with open(path, "wb") as file:
        np.savez(file, **arrays, **{_OPTIONS: json.dumps(dataclasses.asdict(rule))})


def load(path: str | pathlib.Path | None = None) -> tuple[rule_lib.Rule, types.PyTree]:
    """Returns a rule and its parameters, in NumPy; without a path, None for random ones.

    Raises:
      errors.UserError: there is no such file, or it is no rule, or of another rule.
    """
    if path is None:
        return rule_lib.Rule(), None
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        rule = rule_lib.Rule(**json.loads(str(arrays.pop(_OPTIONS))))
    except FileNotFoundError as error:
        raise errors.UserError(f"there is no rule '{path}'") from error
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise errors.UserError(f"'{path}' is not the file of a rule") from error
    shapes = jax.eval_shape(lambda: rule.init(jax.random.key(0)))
    leaves = []
    for name, shape in jax.tree_util.tree_leaves_with_path(shapes):
        entry = jax.tree_util.keystr(name, simple=True, separator="/")
        found = arrays.pop(entry, None)
        if found is None or found.shape != shape.shape:
            came = "nothing" if found is None else found.shape
            raise errors.UserError(
                f"'{path}' is of another rule: expected '{entry}' of shape {shape.shape}, got "
                f"{came}"
            )
        leaves.append(found)
    return rule, jax.tree.unflatten(jax.tree.structure(shapes), leaves)
