"""Shared parts of the adaptors of other libraries' environments.

Axis legend: `B` streams, `A` values of an action, `D` parts of a multi-discrete action, `H` `W` `C`
height, width and channels of an image.
"""

import contextlib
import copy
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import math
import types as python_types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from podracers import environment, errors, types


class KeyedState(NamedTuple):
    """State of one stream whose steps draw random numbers."""

    inner: Any  # the library's state
    key: jax.Array  # [] typed key of the episode


class CountedState(NamedTuple):
    """State of one stream with a time limit of this project."""

    inner: Any  # the library's state
    steps: jax.Array  # [] int32, steps taken in this episode
    metrics: dict[str, jax.Array] = {}  # noqa: RUF012  (of the episode so far; nothing writes into it)


@dataclasses.dataclass(frozen=True, eq=False)
class Adaptor:
    """Base of the adaptors of JAX libraries, which define `_make`.

    Attributes:
      name: registered name of the environment.
      options: the library's options, by name.
    """

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        errors.require_types(self)

    def _make(self) -> Any:
        """Returns the library's environment, with its parameters if they are separate."""
        raise NotImplementedError

    @functools.cached_property
    def _built(self) -> Any:
        # The first access may be under a trace, and imports and constructors create arrays.
        with jax.ensure_compile_time_eval():
            return self._make()


@dataclasses.dataclass(frozen=True, eq=False)
class ActionCodec:
    """Translates the contract's actions into another library's actions; `action_codec` makes it.

    Attributes:
      spec: action specification of the contract.
      minimum: lower bounds of the inner action, of its shape and dtype.
      maximum: upper bounds, of the same shape.
      joint: number of values of each part, if one flat integer encodes all parts; else empty.
    """

    spec: specs.BoundedArray
    minimum: np.ndarray
    maximum: np.ndarray
    joint: tuple[int, ...] = ()

    def decode(self, action: Any, xp: python_types.ModuleType = np) -> Any:
        """Returns the inner action `[..., *inner]` for an action `[..., *spec.shape]`.

        `xp` is `numpy` or `jax.numpy`.
        """
        action = xp.asarray(action)
        batch = action.shape[: action.ndim - len(self.spec.shape)]
        if self.joint:
            action = xp.stack(xp.unravel_index(action, self.joint), axis=-1)
        action = xp.reshape(action, (*batch, *self.minimum.shape)).astype(self.minimum.dtype)
        if self.spec.dtype.kind == "f":
            # 64-bit bounds, rounded to 32 bits, may lie outside the interval.
            return xp.clip(action, self.minimum, self.maximum)
        return action + self.minimum


def action_spec(space: Any) -> specs.BoundedArray:
    """Converts an action space of gymnax or of JaxMARL."""
    if hasattr(space, "n"):
        return specs.DiscreteArray(int(space.n), name="action")
    low, high = (np.full(space.shape, bound, np.float32) for bound in (space.low, space.high))
    return specs.BoundedArray(space.shape, np.float32, low, high, name="action")


def action_codec(
    name: str,
    shape: tuple[int, ...],
    dtype: Any,
    minimum: Any,
    maximum: Any,
    mask_shape: tuple[int, ...] | None,
) -> ActionCodec:
    """Returns the translation of actions with an array spec of another library.

    A scalar is a discrete action, a float array a continuous one, and an integer array a
    multi-discrete one, or one flat discrete action if the mask covers the joint choice. Bounds
    broadcast to `shape`; `mask_shape` is None without a mask.

    Raises:
      errors.UserError: a part of an integer action has more values than int32.
    """
    dtype = np.dtype(dtype)
    minimum, maximum = (np.broadcast_to(b, shape).astype(dtype) for b in (minimum, maximum))
    if dtype.kind == "f" and shape:
        with np.errstate(over="ignore"):  # infinite bounds are a fault of the spec
            bounds = (minimum.astype(np.float32), maximum.astype(np.float32))
        spec = specs.BoundedArray(shape, np.float32, *bounds, name="action")
        return ActionCodec(spec, minimum, maximum)
    sizes = (maximum.astype(np.int64) - minimum.astype(np.int64) + 1).ravel()
    joint = len(sizes) > 1 and mask_shape == tuple(sizes.tolist())
    single = len(sizes) == 1 and mask_shape in (None, (int(sizes[0]),))
    is_flat = joint or single or not shape
    most = math.prod(sizes.tolist()) if is_flat else sizes.max(initial=0)
    errors.require_int32(most, f"{name}: number of values of its action")
    if is_flat:
        spec = specs.DiscreteArray(most, np.int32, "action")
        parts = tuple(sizes.tolist()) if joint else ()
        return ActionCodec(spec, minimum, maximum, parts)
    highest = sizes - 1
    if mask_shape is not None:
        # The spec of Jumanji's MultiCVRP has one node more than its mask.
        highest = np.minimum(highest, mask_shape[-1] - 1)
    spec = specs.BoundedArray(highest.shape, np.int32, 0, highest.astype(np.int32), "action")
    return ActionCodec(spec, minimum, maximum)


@contextlib.contextmanager
def options_of(
    name: str, options: Mapping[str, Any], known: Iterable[str] | None = None
) -> Iterator[None]:
    """Turns exceptions of another library's constructor into an `errors.UserError`.

    The constructor has the options `known`; None where they are already compared.
    """
    for option in options:
        errors.require_known(f"{name} has no option", option, options if known is None else known)
    try:
        yield
    except ImportError as error:  # its message names the library and how to install it
        raise errors.UserError(f"{name}: {errors.first_line(error)}") from error
    except Exception as error:
        raise errors.UserError(
            f"{name} cannot be made with options {dict(options)}: {errors.one_line(error)}"
        ) from error


def optional_import(module: str, user: str, name: str | None = None) -> python_types.ModuleType:
    """Imports a module of an optional package, which pip calls `name`: by default as Python does.

    Raises:
      errors.UserError: the package is not installed.
    """
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        name = name or package
        raise errors.UserError(f"{user} needs the package {name}: pip install {name}")
    return importlib.import_module(module)


def _is_channels_first(shape: tuple[int, ...], dtype: Any) -> bool:
    """Returns whether an array is an image `[C, H, W]`: bytes, and the first axis is the smallest.

    Numbers of other dtypes may be boards with any axes; encoders refuse large ones.
    """
    return dtype == np.uint8 and len(shape) == 3 and shape[0] < min(shape[1:])


def channels_last_spec(tree: types.PyTree) -> types.PyTree:
    """Returns specs `[H, W, C]` in place of specs of images `[C, H, W]`."""

    def moved(spec: specs.Array) -> specs.Array:
        is_first = _is_channels_first(spec.shape, spec.dtype)
        return spec.replace(shape=(*spec.shape[1:], spec.shape[0])) if is_first else spec

    return jax.tree.map(moved, tree)


def channels_last(tree: types.PyTree) -> types.PyTree:
    """Returns a batch, whose leaves are NumPy arrays `[B, ...]`, as `channels_last_spec`."""

    def moved(leaf: np.ndarray) -> np.ndarray:
        if not _is_channels_first(leaf.shape[1:], leaf.dtype):
            return leaf
        # With one channel the view counts as contiguous, but JAX transposes an array with its
        # strides: on an H100's host, 0.9 ms for 32 frames.
        return np.moveaxis(leaf, 1, -1).copy()

    return jax.tree.map(moved, tree)


def image_of(spec: environment.EnvironmentSpec) -> Callable[[types.TimeStep], np.ndarray]:
    """Returns a function that draws a time step of one environment from its image observation.

    An image is uint8 `[H, W]` or `[H, W, C]` with at least 12 pixels per side. The last channel of
    a stack of frames is drawn in grey. The picture is uint8 `[H, W, 3]`, enlarged by an integer
    factor to at least 240 pixels per side.

    Raises:
      AttributeError: the observation is not an image, so the environment has no `render`.
    """
    part = spec.observation
    is_image = (
        isinstance(part, specs.Array) and part.dtype == np.uint8 and len(part.shape) in (2, 3)
    )
    if not is_image or min(part.shape[:2]) < 12:
        raise AttributeError(f"{spec.name} does not observe an image")

    def draw(timestep: types.TimeStep) -> np.ndarray:
        image = np.atleast_3d(np.asarray(timestep.observation))
        image = image if image.shape[2] == 3 else image[..., -1:]
        image = np.broadcast_to(image, (*image.shape[:2], 3))
        factor = max(1, math.ceil(240 / min(image.shape[:2])))
        return image.repeat(factor, axis=0).repeat(factor, axis=1)

    return draw


def parameters_of(model: types.PyTree) -> dict[str, jax.Array]:
    """Returns the float arrays of a simulator's model by path, such as `link.inertia.mass`."""
    leaves, _ = jax.tree.flatten_with_path(model)
    return {
        _dotted(path): leaf
        for path, leaf in leaves
        if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
    }


def with_parameters(simulator: Any, attribute: str, values: Mapping[str, jax.Array]) -> Any:
    """Returns a copy of a simulator with other arrays in its model; it shares everything else.

    The model is an attribute of the simulator. The values, by path as in `parameters_of`, may be
    traced.
    """
    model = jax.tree.map_with_path(
        lambda path, leaf: values.get(_dotted(path), leaf), getattr(simulator, attribute)
    )
    result = copy.copy(simulator)
    for name, value in vars(simulator).items():
        if inspect.ismethod(value) and value.__self__ is simulator:
            setattr(result, name, python_types.MethodType(value.__func__, result))
    setattr(result, attribute, model)
    return result


def _dotted(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def plain(observation: Any) -> types.PyTree:
    """Returns nested dicts for nested mappings, named tuples and dataclasses; or an array."""
    if hasattr(observation, "_asdict"):
        observation = observation._asdict()
    elif dataclasses.is_dataclass(observation):
        fields = dataclasses.fields(observation)
        observation = {field.name: getattr(observation, field.name) for field in fields}
    if isinstance(observation, Mapping):
        return {key: plain(child) for key, child in observation.items()}
    return observation


def strong(tree: types.PyTree) -> types.PyTree:
    """Returns `tree` without weak types, which would cause a recompilation after a reset."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.asarray(leaf).dtype), tree)
