"""Shapes and dtypes of pytrees, in a form that files hold and people read."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracers import types


def structure(tree: types.PyTree) -> list[list[Any]]:
    """Returns `[path, shape, dtype]` of every leaf, as JSON can hold it."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [
        [
            _name(path),
            list(np.shape(leaf)),
            str(leaf.dtype) if hasattr(leaf, "dtype") else type(leaf).__name__,
        ]
        for path, leaf in leaves
    ]


def arranged(tree: types.PyTree, like: types.PyTree) -> types.PyTree:
    """Returns the leaves of a tree, by path, in the containers of `like`, also in empty ones.

    Leaves that the tree lacks are zeros.
    """
    leaves = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}

    def leaf_at(path: tuple, like: Any) -> Any:
        name = _name(path)
        return leaves[name] if name in leaves else jnp.zeros(like.shape, like.dtype)

    return jax.tree_util.tree_map_with_path(leaf_at, like)


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def differences(found: list[list[Any]], expected: list[list[Any]]) -> list[str]:
    """Returns a phrase on each leaf in which two structures differ."""
    found_leaves, expected_leaves = (
        {path: f"{dtype}{shape}" for path, shape, dtype in structure}
        for structure in (found, expected)
    )
    return [
        f"leaf '{path}': expected {expected_leaves.get(path, 'none')}, "
        f"got {found_leaves.get(path, 'none')}"
        for path in {**expected_leaves, **found_leaves}
        if found_leaves.get(path) != expected_leaves.get(path)
    ]
