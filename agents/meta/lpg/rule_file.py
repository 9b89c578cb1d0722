"""Files of LPG's rule: its options and parameters, without the state of a run."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
from flax import traverse_util

from agents.meta.lpg import rule as rule_lib
from agents.meta.rules import interface
from podracers import errors, types

_OPTIONS = "options"  # the entry that holds the fields of `Rule`, as JSON


def save(path: str | pathlib.Path, rule: rule_lib.Rule, params: types.PyTree) -> None:
    """Writes a rule as `.npz`: an array for each parameter, named by its path, and its options.

    Raises:
      errors.UserError: the file cannot be written.
    """
    entries = jax.tree.map(np.asarray, traverse_util.flatten_dict(params, sep="/"))
    entries[_OPTIONS] = json.dumps(dataclasses.asdict(rule))
    with errors.file_errors(f"write '{path}'"), open(path, "wb") as file:
        np.savez(file, **entries)


def load(path: str | pathlib.Path | None = None) -> tuple[rule_lib.Rule, types.PyTree | None]:
    """Returns a rule and its parameters, in NumPy; without a path, None for random ones.

    Raises:
      errors.UserError: the file is missing, cannot be read, or holds another rule.
    """
    if path is None:
        return rule_lib.Rule(), None

    def parse(arrays: interface.Arrays) -> tuple[rule_lib.Rule, dict[str, tuple[int, ...]]]:
        rule = rule_lib.Rule(**json.loads(str(arrays.pop(_OPTIONS))))
        params = jax.eval_shape(rule.init, jax.random.key(0))
        shapes = jax.tree.map(lambda x: x.shape, traverse_util.flatten_dict(params, sep="/"))
        return rule, shapes

    rule, params = interface.read_file(path, parse)
    return rule, traverse_util.unflatten_dict(params, sep="/")
