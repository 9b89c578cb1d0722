"""Gymnasium's spaces as `dm_env` specs, and the conversion of their batches.

An observation space becomes an array or a dict of arrays, with the keys `'0'`, `'1'` and so on for
`Tuple`s, and the mask of illegal actions under `action_mask`. 64-bit numbers become 32-bit numbers.
Spaces that count from `start` become specs that count from 0. An action space becomes one array of
its parts, in the order of the space: a discrete, a multi-discrete or a continuous action.

Axis legend: `B` streams. This module does not import JAX: worker processes start faster without it.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from dm_env import specs
from gymnasium import spaces

from podracers import errors

ACTION_MASK = "action_mask"  # `podracers.environment.ACTION_MASK`; that module imports JAX

_NARROW = {
    np.dtype(np.float64): np.dtype(np.float32),
    np.dtype(np.int64): np.dtype(np.int32),
    np.dtype(np.uint64): np.dtype(np.uint32),
}
_INTEGERS = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


def observation_spec(space: Any, name: str, path: str = "") -> Any:
    """Returns the specs of an observation space, a tree of them for a `Dict` or a `Tuple`.

    Args:
      space: a Gymnasium space.
      name: the environment's name, for error messages.
      path: the place of the space in the observation, likewise.

    Raises:
      errors.UserError: a part is not an array of a fixed shape.
    """
    label = path.strip("[]'") or "observation"
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts = {key: observation_spec(s, name, f"{path}[{key!r}]") for key, s in _children(space)}
        if not path and isinstance(parts.get(ACTION_MASK), specs.Array):
            parts[ACTION_MASK] = specs.Array(parts[ACTION_MASK].shape, np.bool_, name=ACTION_MASK)
        return parts
    if isinstance(space, spaces.Discrete):
        return specs.DiscreteArray(int(space.n), np.int32, name=label)
    if isinstance(space, spaces.MultiDiscrete):
        from podracers import environment  # noqa: PLC0415  (imports JAX)

        maximum = space.nvec - 1
        return environment.MultiDiscreteArray(space.shape, np.int32, 0, maximum, name=label)
    if isinstance(space, spaces.MultiBinary):
        return specs.Array(space.shape, np.bool_, name=label)
    if isinstance(space, spaces.Box):
        return specs.Array(space.shape, _narrow(space.dtype), name=label)
    raise errors.UserError(
        f"{name}: its observation{path} is a {type(space).__name__} space, and expected are Box, "
        "Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of these"
    )


def read(space: Any, batch: Any, name: str, top: bool = True) -> Any:
    """Returns a batch of observations as `observation_spec` describes, `[B, ...]`.

    Args:
      space: the Gymnasium space of one environment.
      batch: an element of the batched space, as `gymnasium.vector` returns it.
      name: the environment's name, for error messages.
      top: whether this is the whole observation, whose part `action_mask` is a mask.

    Raises:
      errors.UserError: an integer does not fit into 32 bits.
    """
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts = batch if isinstance(batch, dict) else {str(i): x for i, x in enumerate(batch)}
        parts = {key: read(child, parts[key], name, False) for key, child in _children(space)}
        if top and isinstance(parts.get(ACTION_MASK), np.ndarray):
            parts[ACTION_MASK] = parts[ACTION_MASK].astype(np.bool_)
        return parts
    dtype = np.bool_ if isinstance(space, spaces.MultiBinary) else _narrow(space.dtype)
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        batch, dtype = batch - space.start, np.int32
    narrow = batch.astype(dtype, copy=False)
    # An overflow would be undetectable later.
    if batch.dtype.kind in "iu" and not np.array_equal(narrow, batch):
        raise errors.UserError(
            f"{name}: an observation has a number that does not fit into {np.dtype(dtype)}"
        )
    return narrow


def action_spec(space: Any, name: str) -> specs.BoundedArray:
    """Returns the spec of an action space: discrete, multi-discrete or continuous.

    Args:
      space: a Gymnasium space.
      name: the environment's name, for error messages.

    Raises:
      errors.UserError: the space is none of these.
    """
    if isinstance(space, spaces.Discrete):
        return specs.DiscreteArray(int(space.n), np.int32, name="action")
    parts = list(_action_leaves(space))
    if parts and all(isinstance(part, _INTEGERS) for part in parts):
        num_values = np.concatenate([_num_values(part) for part in parts])
        return specs.BoundedArray(num_values.shape, np.int32, 0, num_values - 1, name="action")
    if not parts or not all(np.issubdtype(part.dtype, np.floating) for part in parts):
        kinds = sorted({f"{type(part).__name__} ({part.dtype})" for part in parts})
        raise errors.UserError(
            f"{name}: its action is a {type(space).__name__} space of {' and '.join(kinds)}; "
            "expected integer spaces, or floating Boxes, or Dict and Tuple of one kind"
        )
    shape = space.shape if isinstance(space, spaces.Box) else (sum(_size(p) for p in parts),)
    low = np.concatenate([part.low.ravel() for part in parts]).reshape(shape).astype(np.float32)
    high = np.concatenate([part.high.ravel() for part in parts]).reshape(shape).astype(np.float32)
    return specs.BoundedArray(shape, np.float32, low, high, name="action")


def decode(space: Any, action: np.ndarray) -> Any:
    """Returns an element of the batched action space, for `gymnasium.vector`.

    Args:
      space: a Gymnasium space that `action_spec` accepts.
      action: `[B, ...]`, as `action_spec` describes.
    """
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        sizes = [sum(map(_size, _action_leaves(child))) for _, child in _children(space)]
        pieces = np.split(action, np.cumsum(sizes)[:-1], axis=1)
        decoded = {key: decode(part, x) for (key, part), x in zip(_children(space), pieces)}
        return decoded if isinstance(space, spaces.Dict) else tuple(decoded.values())
    action = action.astype(space.dtype).reshape(-1, *space.shape)
    if isinstance(space, spaces.Box):
        # 64-bit bounds, rounded to 32 bits, may lie outside the space.
        return np.clip(action, space.low, space.high)
    return action if isinstance(space, spaces.MultiBinary) else action + space.start


def _action_leaves(space: Any) -> Iterator[Any]:
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        for _, child in _children(space):
            yield from _action_leaves(child)
    else:
        yield space


def _num_values(space: Any) -> np.ndarray:
    """Returns the number of values of each part of an integer space, flat."""
    if hasattr(space, "nvec"):
        return np.asarray(space.nvec).ravel()
    return np.full((_size(space),), space.n if space.shape == () else 2)


def _size(space: Any) -> int:
    return int(np.prod(space.shape, dtype=np.int64))


def _children(space: Any) -> list[tuple[str, Any]]:
    if hasattr(space.spaces, "items"):
        return list(space.spaces.items())
    return [(str(i), child) for i, child in enumerate(space.spaces)]


def _narrow(dtype: Any) -> np.dtype:
    return _NARROW.get(np.dtype(dtype), np.dtype(dtype))
