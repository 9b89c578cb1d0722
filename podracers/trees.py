"""Leaves of pytrees by name; their shapes and dtypes in a form that files hold and people read."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracers import types


def name(path: tuple) -> str:
    """Returns a leaf's name for its path in a tree, such as `learner/params/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaves(tree: types.PyTree) -> dict[str, Any]:
    """Returns the leaves of a tree by name."""
    return {name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def structure(tree: types.PyTree) -> list[list[Any]]:
    """Returns `[name, shape, dtype]` of every leaf, as JSON can hold it."""
    return [
        [path, list(np.shape(leaf)), str(getattr(leaf, "dtype", type(leaf).__name__))]
        for path, leaf in leaves(tree).items()
    ]


def arranged(tree: types.PyTree, like: types.PyTree) -> types.PyTree:
    """Returns the leaves of a tree, by name, in the containers of `like`, also in empty ones.

    Leaves that the tree lacks are zeros.
    """
    by_name = leaves(tree)

    def leaf_at(path: tuple, like: Any) -> Any:
        known = name(path) in by_name
        return by_name[name(path)] if known else jnp.zeros(like.shape, like.dtype)

    return jax.tree_util.tree_map_with_path(leaf_at, like)


def differences(actual: list[list[Any]], expected: list[list[Any]]) -> list[str]:
    """Returns a phrase on each leaf in which two structures differ."""
    actual_leaves, expected_leaves = (
        {path: f"{dtype}{shape}" for path, shape, dtype in structure}
        for structure in (actual, expected)
    )
    return [
        f"leaf '{path}': expected {expected_leaves.get(path, 'none')}, "
        f"got {actual_leaves.get(path, 'none')}"
        for path in {**expected_leaves, **actual_leaves}
        if actual_leaves.get(path) != expected_leaves.get(path)
    ]
