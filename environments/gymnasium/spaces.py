"""Gymnasium's spaces as `dm_env` specs, and the conversion of their batches.

An observation space becomes an array or a dict of arrays, with the keys `'0'`, `'1'` and so on for
`Tuple`s, and the mask of illegal actions under `action_mask`. 64-bit numbers become 32-bit numbers.
Spaces that count from `start` become specs that count from 0. An action space becomes one array of
its parts, in the order of the space: a discrete, a multi-discrete or a continuous action.

Axis legend: `B` streams. This module does not import JAX: worker processes start faster without it.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from dm_env import specs
from gymnasium import spaces

from podracers import errors

ACTION_MASK = "action_mask"  # `podracers.environment.ACTION_MASK`; that module imports JAX

_INTEGERS = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


def observation_spec(space: Any, name: str, path: str = "") -> Any:
    """Returns the specs of an observation space, a tree of them for a `Dict` or a `Tuple`.

    Error messages have the environment's `name`, and the `path` of the space in the observation.

    Raises:
      errors.UserError: a part is not an array of a fixed shape.
    """
    label = path.strip("[]'") or "observation"
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts = {key: observation_spec(s, name, f"{path}[{key!r}]") for key, s in _children(space)}
        if not path and isinstance(parts.get(ACTION_MASK), specs.Array):
            parts[ACTION_MASK] = specs.Array(parts[ACTION_MASK].shape, np.bool_, name=ACTION_MASK)
        return parts
    if isinstance(space, _INTEGERS):
        most = np.max(_num_values(space), initial=0)
        errors.require_int32(most, f"{name}: number of values of its observation{path}")
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
        f"{name}: its observation{path} is a {errors.path_of(space)}, and expected are Gymnasium's "
        "Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of these"
    )


def read(space: Any, values: Sequence[Any] | np.ndarray, name: str, top: bool = True) -> Any:
    """Returns a batch of observations as `observation_spec` describes, `[B, ...]`.

    Args:
      space: the Gymnasium space of one environment.
      values: `B` elements of the space; integers may have another dtype.
      name: a noun for the values, in error messages.
      top: whether this is the whole observation, whose part `action_mask` is a mask.

    Raises:
      errors.UserError: the parts, the shape or the dtype is not that of the space, or a number lies
        outside of it or does not fit into 32 bits. Bounds of a `Box` are not compared.
    """
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        keys = list(space.spaces) if isinstance(space, spaces.Dict) else range(len(space))
        try:
            columns = [[value[key] for value in values] for key in keys]
        except (LookupError, TypeError) as error:
            raise _unlike(f"a {type(space).__name__} of {[*keys]}", values, name) from error
        parts = {
            key: read(child, column, f"{name}[{key!r}]", False)
            for (key, child), column in zip(_children(space), columns)
        }
        if top and isinstance(parts.get(ACTION_MASK), np.ndarray):
            parts[ACTION_MASK] = parts[ACTION_MASK].astype(np.bool_)
        return parts
    is_binary = isinstance(space, spaces.MultiBinary)
    dtype = _narrow(np.bool_ if is_binary else space.dtype)
    try:
        batch = np.array(values)
    except ValueError:  # shapes differ between environments
        batch = np.empty((), np.object_)
    kinds = "biuf" if dtype.kind == "f" else "biu"
    if batch.shape[1:] != space.shape or batch.dtype.kind not in kinds:
        raise _unlike(f"{space.dtype}{[*space.shape]}", values, name)
    limits: Any = dtype
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        limits, index = f"its {type(space).__name__} space", batch - space.start
        wrong = (index < 0) | (index >= _num_values(space).reshape(space.shape))
        narrow = index.astype(np.int32)
    elif batch.dtype == dtype:
        return batch
    else:
        with np.errstate(over="ignore"):  # it is an error below
            narrow = batch.astype(dtype)
        wrong = np.isinf(narrow) & np.isfinite(batch) if dtype.kind == "f" else narrow != batch
    if np.any(wrong):
        raise errors.UserError(f"{name}: the value {batch[wrong][0]} lies outside of {limits}")
    return narrow


def _unlike(expected: str, values: Sequence[Any] | np.ndarray, name: str) -> errors.UserError:
    """Returns the error for values of which some are not as expected."""

    def describe(value: Any) -> str:
        if hasattr(value, "dtype"):
            return f"{value.dtype}{[*value.shape]}"
        size = [len(value)] if isinstance(value, Sequence) else ""
        return f"{type(value).__name__}{[*value] if isinstance(value, dict) else size}"

    got = " and ".join(sorted(set(map(describe, values))))
    return errors.UserError(f"{name}: expected {expected}, got {got}")


def action_spec(space: Any, name: str) -> specs.BoundedArray:
    """Returns the spec of an action space: discrete, multi-discrete or continuous.

    Raises:
      errors.UserError: the space is none of these.
    """
    parts = list(_action_leaves(space))
    if parts and all(isinstance(part, _INTEGERS) for part in parts):
        num_values = np.concatenate([_num_values(part) for part in parts])
        errors.require_int32(num_values.max(), f"{name}: number of values of its action")
        if isinstance(space, spaces.Discrete):
            return specs.DiscreteArray(int(space.n), np.int32, name="action")
        return specs.BoundedArray(num_values.shape, np.int32, 0, num_values - 1, name="action")
    if not parts or not all(
        isinstance(x, spaces.Box) and np.dtype(x.dtype).kind == "f" for x in parts
    ):
        kinds = {f"{errors.path_of(part)} ({getattr(part, 'dtype', None)})" for part in parts}
        raise errors.UserError(
            f"{name}: expected an action of Discrete, MultiDiscrete and MultiBinary spaces, or of "
            f"floating Boxes, or Dict and Tuple of one kind; got {' and '.join(sorted(kinds))}"
        )
    shape = space.shape if isinstance(space, spaces.Box) else (-1,)
    low = np.concatenate([part.low.ravel() for part in parts]).reshape(shape).astype(np.float32)
    high = np.concatenate([part.high.ravel() for part in parts]).reshape(shape).astype(np.float32)
    return specs.BoundedArray(low.shape, np.float32, low, high, name="action")


def decode(space: Any, action: np.ndarray) -> Any:
    """Returns an element of the batched action space for actions `[B, ...]` of `action_spec`."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        sizes = [
            sum(math.prod(leaf.shape) for leaf in _action_leaves(child))
            for _, child in _children(space)
        ]
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
    return np.full(math.prod(space.shape), space.n if space.shape == () else 2)


def _children(space: Any) -> list[tuple[str, Any]]:
    if hasattr(space.spaces, "items"):
        return list(space.spaces.items())
    return [(str(i), child) for i, child in enumerate(space.spaces)]


def _narrow(dtype: Any) -> np.dtype:
    dtype = np.dtype(dtype)
    return np.dtype(f"{dtype.kind}4") if dtype.itemsize == 8 else dtype
