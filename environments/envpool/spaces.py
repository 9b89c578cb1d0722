"""Conversion of EnvPool's arrays to the contract: specs, layouts and dtypes, batched over streams.

Axis legend: `B` streams.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from dm_env import specs

from environments import adaptors
from podracers import environment, errors, types

_PLAYERS = -1  # EnvPool's marker of the axis of players
_LEGAL = "info:legal_action_mask"  # key of board and card games


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of an observation.

    Attributes:
      key: EnvPool's name of the array.
      spec: specification of the contract.
      is_mask: whether it is the action mask; at least one action is always legal.
    """

    key: str
    spec: specs.Array
    is_mask: bool = False

    def read(self, state: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the array as `spec` describes it, `[B, ...]`."""
        array = adaptors.channels_last(state[self.key])
        array = array.reshape(array.shape[0], *self.spec.shape)
        if self.is_mask:
            # Some of Jumanji's mazes begin without a legal move; any action ends the episode.
            return array | ~array.any(axis=-1, keepdims=True)
        return array.astype(self.spec.dtype, copy=False)


def actions(task_id: str, pool_spec: Any) -> adaptors.ActionCodec:
    """Returns the translation of a task's actions."""
    names = [name for name in pool_spec.action_array_spec if not name.endswith("env_id")]
    if len(names) != 1:
        raise errors.UserError(f"EnvPool's {task_id}: expected one array of actions, got {names}")
    inner = pool_spec.action_array_spec[names[0]]
    mask = pool_spec.state_array_spec.get(f"obs:{environment.ACTION_MASK}")
    mask_shape = None if mask is None else tuple(mask.shape)
    return adaptors.action_codec(
        task_id, _shape(inner), inner.dtype, inner.minimum, inner.maximum, mask_shape
    )


def observation(
    task_id: str, pool_spec: Any, codec: adaptors.ActionCodec, keys: Sequence[str] | None
) -> types.PyTree:
    """Returns a tree of `Leaf`: one, or a nested dict of them.

    The shape of a mask follows from the actions. `keys` are the parts of a dict to keep in addition
    to a mask; None for all.

    Raises:
      errors.UserError: a part does not exist.
    """
    tree: dict[str, Any] = {}
    for key, array in pool_spec.state_array_spec.items():
        head, *path = key.replace(".", ":").split(":")
        if head != "obs":
            continue
        if not path:
            tree = {"": _leaf(key, array, codec)}
            break
        parent = tree
        for part in path[:-1]:
            parent = parent.setdefault(part, {})
        parent[path[-1]] = _leaf(key, array, codec)
    if keys is not None:
        tree = _select(task_id, tree, keys)
    elif len(tree) == 1 and isinstance(next(iter(tree.values())), Leaf):
        part = next(iter(tree.values()))
        if _LEGAL not in pool_spec.state_array_spec:
            return part
        shape = environment.legal_values(codec.spec).shape
        mask = Leaf(_LEGAL, specs.Array(shape, bool, environment.ACTION_MASK), is_mask=True)
        return {"observation": part, environment.ACTION_MASK: mask}
    return tree


def numbers(pool_spec: Any) -> list[str]:
    """Returns the names of the entries of `info` that are one number, without `info:`."""
    return [
        key.removeprefix("info:")
        for key, array in pool_spec.state_array_spec.items()
        if key.startswith("info:") and _shape(array) == ()
    ]


def _leaf(key: str, array: Any, codec: adaptors.ActionCodec) -> Leaf:
    shape, dtype = _shape(array), np.dtype(array.dtype)
    name = key.rpartition(":")[2]
    if key == f"obs:{environment.ACTION_MASK}":
        shape = environment.legal_values(codec.spec).shape
        spec = specs.BoundedArray(shape, bool, False, True, name)
        return Leaf(key, spec, is_mask=True)
    if dtype == np.uint8:
        spec = specs.BoundedArray(shape, dtype, 0, 255, name)
        return Leaf(key, adaptors.channels_last_spec(spec))
    if name in ("obs", "direction") and dtype == np.int32 and shape == ():
        return Leaf(key, specs.DiscreteArray(int(np.max(array.maximum)) + 1, dtype, name))
    # Other bounds are ignored: many are the dtype's limits, and some are exceeded.
    narrow = {"float64": np.float32, "int64": np.int32}.get(dtype.name, dtype)
    return Leaf(key, specs.Array(shape, narrow, name))


def _shape(array: Any) -> tuple[int, ...]:
    """Returns the shape of one stream's part of one of EnvPool's arrays."""
    return tuple(size for size in array.shape if size != _PLAYERS)


def _select(task_id: str, tree: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    for key in keys:
        if key not in tree:
            near = "; it is one array" if "" in tree else errors.nearest(key, tree)
            raise errors.UserError(
                f"EnvPool.observation_keys: {task_id} has no part '{key}' in its observation{near}"
            )
    kept = {*keys, environment.ACTION_MASK}
    return {key: part for key, part in tree.items() if key in kept}
