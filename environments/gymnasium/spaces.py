"""Gymnasium's spaces as `dm_env` specs, and what passes through them. Worker processes run this.

An observation space becomes an array or a dict of arrays: `Tuple`s become dicts with the keys
`'0'`, `'1'` and so on. Numbers of 64 bits become those of 32 that JAX works with. Where a space
counts from `start`, the contract counts from 0.

An action space becomes one array, whatever it is made of: its parts, in the space's own order, are
the components of a discrete, a multi-discrete or a continuous action.

Axis legend: `B` streams. This module does not import JAX: worker processes start faster without.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from dm_env import specs
from gymnasium import spaces

from podracers import errors

ACTION_MASK = "action_mask"  # `podracers.environment.ACTION_MASK`, which comes with JAX

_NARROW = {
    np.dtype(np.float64): np.dtype(np.float32),
    np.dtype(np.int64): np.dtype(np.int32),
    np.dtype(np.uint64): np.dtype(np.uint32),
}
_NUMBERS = "biuf"  # kinds of dtypes: bool, signed, unsigned, floating


def observation_spec(space: Any, name: str) -> Any:
    """Returns the specs of an observation space, a tree of them for a `Dict` or a `Tuple`.

    Args:
      space: a Gymnasium space.
      name: the environment's name, for error messages.

    Raises:
      errors.UserError: there is a part that is no array of a fixed shape.
    """
    spec = _observation_spec(space, name, "")
    if isinstance(spec, dict) and isinstance(spec.get(ACTION_MASK), specs.Array):
        spec[ACTION_MASK] = specs.Array(spec[ACTION_MASK].shape, np.bool_, name=ACTION_MASK)
    return spec


def _observation_spec(space: Any, name: str, path: str) -> Any:
    label = path.strip("[]'") or "observation"
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        if not len(space.spaces):
            raise errors.UserError(f"{name}: its observation{path} is an empty {_kind(space)}")
        return {key: _observation_spec(s, name, f"{path}[{key!r}]") for key, s in _children(space)}
    if isinstance(space, spaces.Discrete):
        return specs.DiscreteArray(int(space.n), np.int32, name=label)
    if isinstance(space, spaces.MultiDiscrete):
        return specs.BoundedArray(space.shape, np.int32, 0, space.nvec - 1, name=label)
    if isinstance(space, spaces.MultiBinary):
        return specs.Array(space.shape, np.bool_, name=label)
    if isinstance(space, spaces.Box):
        return specs.Array(space.shape, _narrow(space.dtype), name=label)
    raise errors.UserError(
        f"{name}: its observation{path} is a {_kind(space)} space, and expected are Box, Discrete, "
        "MultiDiscrete, MultiBinary, and Dict and Tuple of these (a wrapper can leave it out)"
    )


class SpaceMismatch(errors.UserError):
    """An observation is no element of its space.

    Attributes:
      row: index of the observation in the batch.
    """

    def __init__(self, row: int, what: str, space: Any):
        super().__init__(f"{what}, and its space is {textwrap.shorten(repr(space), 200)}")
        self.row = row


def stack(space: Any, observations: Sequence[Any]) -> Any:
    """Returns the observations of `B` environments as `observation_spec` describes, `[B, ...]`.

    Args:
      space: a Gymnasium space.
      observations: `B` of its elements.

    Raises:
      SpaceMismatch: one of them is not of the shape or the kind that the space says, or does not
        fit into 32 bits.
    """
    batch = _stack(space, observations, "")
    if isinstance(batch, dict) and isinstance(batch.get(ACTION_MASK), np.ndarray):
        batch[ACTION_MASK] = batch[ACTION_MASK].astype(np.bool_)
    return batch


def _stack(space: Any, observations: Sequence[Any], path: str) -> Any:
    if isinstance(space, spaces.Dict):
        _check_keys(space, observations, path)
        return {
            key: _stack(
                child, [observation[key] for observation in observations], f"{path}[{key!r}]"
            )
            for key, child in space.spaces.items()
        }
    if isinstance(space, spaces.Tuple):
        _check_length(space, observations, path)
        return {
            str(i): _stack(child, [observation[i] for observation in observations], f"{path}[{i}]")
            for i, child in enumerate(space.spaces)
        }
    try:
        batch = np.stack(observations)
    except ValueError:
        batch = None  # of different shapes
    if batch is None or batch.shape[1:] != space.shape or batch.dtype.kind not in _NUMBERS:
        _check_arrays(space, observations, path)
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        return _cast(space, batch, np.dtype(np.int32), path, space.start)
    dtype = np.bool_ if isinstance(space, spaces.MultiBinary) else _narrow(space.dtype)
    return _cast(space, batch, np.dtype(dtype), path)


def _check_keys(space: spaces.Dict, observations: Sequence[Any], path: str) -> None:
    for row, observation in enumerate(observations):
        if not isinstance(observation, Mapping):
            kind = type(observation).__name__
            raise SpaceMismatch(row, f"observation{path} is of type {kind}", space)
        if observation.keys() != space.spaces.keys():
            raise SpaceMismatch(row, f"observation{path} has the keys {sorted(observation)}", space)


def _check_length(space: spaces.Tuple, observations: Sequence[Any], path: str) -> None:
    for row, observation in enumerate(observations):
        if not isinstance(observation, Sequence) or len(observation) != len(space.spaces):
            size = f" and length {len(observation)}" if hasattr(observation, "__len__") else ""
            kind = type(observation).__name__
            raise SpaceMismatch(row, f"observation{path} is of type {kind}{size}", space)


def _check_arrays(space: Any, observations: Sequence[Any], path: str) -> None:
    """Raises for the first observation that is no array of numbers of the space's shape."""
    for row, observation in enumerate(observations):
        try:
            array = np.asarray(observation)
        except ValueError as error:  # lists of different lengths
            raise SpaceMismatch(row, f"observation{path} is no array", space) from error
        if array.shape != space.shape:
            raise SpaceMismatch(row, f"observation{path} has the shape {array.shape}", space)
        if array.dtype.kind not in _NUMBERS:
            raise SpaceMismatch(row, f"observation{path} has the dtype {array.dtype}", space)


def _cast(
    space: Any, batch: np.ndarray, dtype: np.dtype, path: str, start: Any = None
) -> np.ndarray:
    shifted = batch if start is None else batch - start
    with np.errstate(invalid="ignore"):  # NaN, for one: it is found below
        narrow = shifted.astype(dtype, copy=False)
    # A wrapped counter or a fraction that is cut would go unnoticed: both look like any number.
    if dtype != batch.dtype and dtype.kind != "f" and not np.array_equal(narrow, shifted):
        row = int(np.argmax([np.any(a != b) for a, b in zip(narrow, shifted)]))
        what = f"observation{path} has the dtype {np.asarray(batch).dtype}"
        raise SpaceMismatch(row, f"{what}, with a number that does not fit into {dtype}", space)
    return narrow


def action_spec(space: Any, name: str) -> specs.BoundedArray:
    """Returns the spec of an action space: discrete, multi-discrete or continuous.

    Args:
      space: a Gymnasium space.
      name: the environment's name, for error messages.

    Raises:
      errors.UserError: it is none of these, or a continuous action has no bounds.
    """
    if isinstance(space, spaces.Discrete):
        return specs.DiscreteArray(int(space.n), np.int32, name="action")
    parts = list(_action_leaves(space))
    kinds = {_action_kind(part) for part in parts}
    if kinds == {"integer"}:
        num_values = np.concatenate([_num_values(part) for part in parts])
        return specs.BoundedArray(num_values.shape, np.int32, 0, num_values - 1, name="action")
    if kinds != {"float"}:
        raise errors.UserError(
            f"{name}: its action is a {_kind(space)} space of {_kinds(parts)}, and expected are "
            "Discrete, MultiDiscrete, MultiBinary and floating Box, or Dict and Tuple of one kind"
        )
    shape = space.shape if isinstance(space, spaces.Box) else (sum(_size(p) for p in parts),)
    low = np.concatenate([part.low.ravel() for part in parts]).reshape(shape).astype(np.float32)
    high = np.concatenate([part.high.ravel() for part in parts]).reshape(shape).astype(np.float32)
    for bound, which in ((low, "low"), (high, "high")):
        if not np.all(np.isfinite(bound)):
            value = bound[~np.isfinite(bound)][0]
            raise errors.UserError(
                f"{name}: a continuous action needs finite bounds, and its action space has "
                f"{which} {value} (bound it in a wrapper)"
            )
    return specs.BoundedArray(shape, np.float32, low, high, name="action")


def decode(space: Any, action: np.ndarray) -> Any:
    """Returns an element of the action space.

    Args:
      space: a Gymnasium space that `action_spec` takes.
      action: one environment's action, as `action_spec` describes.
    """
    if isinstance(space, spaces.Discrete):
        return np.int64(action) + space.start
    if isinstance(space, spaces.Box):
        # Bounds of 64 bits, rounded to 32, may lie outside of what they bound.
        return np.clip(action.astype(space.dtype), space.low, space.high).reshape(space.shape)
    if isinstance(space, spaces.MultiBinary):
        return action.astype(space.dtype).reshape(space.shape)
    if isinstance(space, spaces.MultiDiscrete):
        return action.astype(space.dtype).reshape(space.shape) + space.start
    sizes = [sum(_size(leaf) for leaf in _action_leaves(child)) for _, child in _children(space)]
    pieces = np.split(action, np.cumsum(sizes)[:-1])
    decoded = {
        key: decode(child, piece[0] if isinstance(child, spaces.Discrete) else piece)
        for (key, child), piece in zip(_children(space), pieces)
    }
    return decoded if isinstance(space, spaces.Dict) else tuple(decoded.values())


def _action_leaves(space: Any) -> Iterator[Any]:
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        for _, child in _children(space):
            yield from _action_leaves(child)
    else:
        yield space


def _action_kind(space: Any) -> str:
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        return "integer"
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return "float"
    return "unsupported"


def _num_values(space: Any) -> np.ndarray:
    """Returns how many values each part of an integer space has, flat."""
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


def _kind(space: Any) -> str:
    return type(space).__name__


def _kinds(parts: Sequence[Any]) -> str:
    names = {f"{_kind(p)} ({p.dtype})" if _kind(p) == "Box" else _kind(p) for p in parts}
    return " and ".join(sorted(names)) or "nothing"
