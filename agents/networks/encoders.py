"""Encoders: from an observation to a vector of features.

An encoder is a Flax module that maps an observation (an array or a nested dict, one leading axis)
to features. It uses every leaf except those of reserved keys: convolutional encoders take one leaf
as the image; all others are flattened and concatenated.

Axis legend: `N` rows, `F` features, `H` `W` `C` height, width and channels.
"""

import functools
import math
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from agents.backends import layouts
from agents.networks import layers
from podracers import environment, errors, types

_MAX_CHANNELS = 16  # a side this short holds the channels, if the other axes are twice as long
_EXTENDED = {"observation", "previous_action", "previous_reward"}  # see `agents.parts.inputs`
_ACTIVATIONS = ("elu", "gelu", "relu", "silu", "tanh")  # names in `jax.nn`


def without_mask(observation: types.PyTree) -> types.PyTree:
    """Returns the observation without reserved keys, such as the action mask."""
    if not isinstance(observation, dict):
        return observation
    return {k: v for k, v in observation.items() if k not in environment.RESERVED}


def select(observation: types.PyTree, keys: Sequence[str] | None) -> types.PyTree:
    """Returns the parts `keys` of a dict observation, or everything if they are None.

    The previous action and reward stay beside the parts, see `agents.parts.inputs`; so do features,
    which are an array.
    """
    if keys is None or not isinstance(observation, dict):
        return observation
    if set(observation) == _EXTENDED:
        return observation | {"observation": select(observation["observation"], keys)}
    return {key: observation[key] for key in keys}


def require_parts(spec: environment.EnvironmentSpec, **options: Sequence[str] | None) -> None:
    """Raises errors.UserError unless the keys of `options`, by name, are parts of observations."""
    parts = without_mask(spec.observation)
    if isinstance(parts, dict) and set(parts) == _EXTENDED:
        parts = parts["observation"]
    for option, keys in options.items():
        if keys is not None and not isinstance(parts, dict):
            raise errors.UserError(
                f"{option}: expected None, because {spec.name} observes one array, got {keys!r}"
            )
        for key in keys or ():
            errors.require_known(f"{option}: the observation of {spec.name} has no", key, parts)


def split_image(observation: types.PyTree) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns the image `[N, H, W, C]` and the vector `[N, F]` of an observation `[N, ...]`.

    Either is None where there is none. The image is the only leaf of rank three, or else the only
    one of rank two (`[H, W]`, without channels). Its bytes are not converted, packed ones
    (`layouts.pack`) neither. Other dtypes, and all those of the vector, pass `layers.as_floats`;
    bytes in the vector are divided by 255.
    """
    leaves = jax.tree.leaves(without_mask(observation))
    image = None
    for rank in (3, 2):
        fitting = [i for i, leaf in enumerate(leaves) if leaf.ndim == rank + 1]
        if fitting:
            image = leaves.pop(fitting[0]) if len(fitting) == 1 else None
            break
    if image is not None:
        image = image if image.ndim == 4 else image[..., None]
        image = image if layouts.is_bytes(image) else layers.as_floats(image)
    return image, _flatten(leaves)


def _flatten(leaves: Sequence[jax.Array]) -> jax.Array | None:
    flat = [layers.as_floats(leaf).reshape(leaf.shape[0], -1) for leaf in leaves]
    return jnp.concatenate(flat, axis=-1) if flat else None


def _as_vector(observation: types.PyTree) -> jax.Array:
    vector = _flatten(jax.tree.leaves(without_mask(observation)))
    if vector is None or not vector.shape[-1]:
        raise errors.UserError(
            "the observation has no part that the encoder reads (a mask is none): add a constant"
        )
    return vector


def image_or_error(observation: types.PyTree, encoder: str):
    """Returns the image and the vector of `split_image`; `encoder` is a name for the message.

    Raises:
      UserError: there is no image, or another axis than the last has the channels.
    """
    image, vector = split_image(observation)
    if image is None:
        shapes = [leaf.shape[1:] for leaf in jax.tree.leaves(without_mask(observation))]
        raise errors.UserError(
            f"{encoder} needs exactly one image, of shape [height, width, channels] or "
            f"[height, width], in the observation; its shapes are {shapes}; use MLP for vectors"
        )
    *sides, channels = shape = layouts.image_shape(image)
    if min(sides) <= _MAX_CHANNELS and min(max(sides), channels) >= 2 * _MAX_CHANNELS:
        raise errors.UserError(
            f"{encoder}: channels seem to be axis {sides.index(min(sides))} of the image "
            f"{[*shape]}, expected [height, width, channels]; transpose it in a wrapper"
        )
    return image, vector


def _features(trunk: nn.Module, image: jax.Array, recompute: bool = False) -> jax.Array:
    """Returns the trunk's outputs, flattened to `[N, F]`; see `layouts.on_images`."""
    return layouts.on_images(trunk, image, recompute).reshape(image.shape[0], -1)


def _join(features: jax.Array, vector: jax.Array | None) -> jax.Array:
    return features if vector is None else jnp.concatenate([features, vector], axis=-1)


class MLP(nn.Module):
    """Dense layers, with the activation after each of them.

    Images are flattened.

    Attributes:
      hidden_sizes: size of each layer; the last is that of the features.
      activation: activation function, "tanh", "relu", "elu", "gelu" or "silu".
      layer_norm: whether each layer is normalised before its activation, see `layers.activate`.
    """

    hidden_sizes: Sequence[int] = (64, 64)
    activation: str = "tanh"
    layer_norm: bool = False

    @nn.compact
    def __call__(self, observation):
        """Returns features `[N, hidden_sizes[-1]]`."""
        errors.require_known("no activation", self.activation, _ACTIVATIONS)
        activation = getattr(jax.nn, self.activation)
        features = _as_vector(observation)
        return layers.mlp(features, self.hidden_sizes, activation, layer_norm=self.layer_norm)


class SimBa(nn.Module):
    """Residual blocks of two dense layers, with layer normalisation before each and after all.

    Lee et al., "SimBa: Simplicity Bias for Scaling Up Parameters in Deep Reinforcement Learning",
    2024, https://arxiv.org/abs/2410.09754. Matrices are orthogonal, with the variance of the
    published ones. Observations should be normalised (`normalize_observations` of agents), as
    there. Images are flattened.

    Attributes:
      size: number of features; within a block four times as many.
      num_blocks: number of blocks.
    """

    size: int = 512
    num_blocks: int = 2

    @nn.compact
    def __call__(self, observation):
        """Returns features `[N, size]`."""
        features = _as_vector(observation)
        features = layers.Dense(self.size, scale=1.0)(features)
        for _ in range(self.num_blocks):
            wide = layers.Dense(4 * self.size, scale=2.0 * math.sqrt(2.0))(_normalize(features))
            features = features + layers.Dense(self.size)(jax.nn.relu(wide))
        return _normalize(features)


def _normalize(features: jax.Array) -> jax.Array:
    return layers.activate(features, lambda x: x, layer_norm=True)


class _Convolutions(nn.Module):
    """Convolutions `(channels, kernel, stride)` with a ReLU after each of them."""

    sizes: Sequence[tuple[int, int, int]]
    padding: str
    layer_norm: bool

    @nn.compact
    def __call__(self, images):
        for channels, kernel, stride in self.sizes:
            images = layers.Conv(channels, kernel, stride, self.padding)(images)
            images = layers.activate(images, layouts.relu, self.layer_norm)
        return images


class _ResidualSections(nn.Module):
    """Sections of a convolution, a pooling and two residual blocks."""

    channels: Sequence[int]
    layer_norm: bool

    @nn.compact
    def __call__(self, images):
        for channels in self.channels:
            images = layers.Conv(channels, pool=True)(images)
            for _ in range(2):
                block = images
                for _ in range(2):
                    block = layers.activate(block, layouts.relu, self.layer_norm)
                    block = layers.Conv(channels)(block)
                images = images + block
        return layers.activate(images, layouts.relu, self.layer_norm)


class CNN(nn.Module):
    """A small convolutional network for grids, then dense layers, with a ReLU after each.

    Attributes:
      channels: number of channels of each convolution.
      kernel: side of every kernel.
      hidden_sizes: sizes of the dense layers.
      strides: stride of each convolution; by default all 1.
      padding: "SAME" or "VALID".
      layer_norm: whether each layer is normalised before its ReLU, see `layers.activate`.
    """

    channels: Sequence[int] = (32, 32)
    kernel: int = 3
    hidden_sizes: Sequence[int] = (128,)
    strides: Sequence[int] | None = None
    padding: str = "SAME"
    layer_norm: bool = False

    @nn.compact
    def __call__(self, observation):
        """Returns features `[N, hidden_sizes[-1]]`; the vector joins before the dense layers."""
        image, vector = image_or_error(observation, "CNN")
        strides = self.strides or (1,) * len(self.channels)
        if len(strides) != len(self.channels):
            raise errors.UserError(
                f"CNN needs one stride for each of channels {tuple(self.channels)}, "
                f"got strides {tuple(strides)}"
            )
        if self.padding not in ("SAME", "VALID"):
            raise errors.UserError(f"CNN.padding: expected 'SAME' or 'VALID', got {self.padding!r}")
        sizes = zip(self.channels, (self.kernel,) * len(strides), strides)
        trunk = _Convolutions(tuple(sizes), self.padding, self.layer_norm)
        features = _join(_features(trunk, image), vector)
        return layers.mlp(features, self.hidden_sizes, jax.nn.relu, layer_norm=self.layer_norm)


class OneHot(nn.Module):
    """One-hot codes of all integers of an observation, then another encoder.

    A grid `[H, W]` of numbers that stand for kinds (of pieces, of cells) becomes an image
    `[H, W, num_values]`; another number, a vector `[num_values]`. Booleans stay.

    The code of a place in the grid or image is a plane `[H, W]`: a channel of the image, after the
    others. The code of a place outside the image is zero.

    Attributes:
      encoder: module of this file, applied to the codes.
      num_values: number of distinct values; others are coded as zeros. None codes places alone.
      minimum: the lowest value.
      ignored: names of entries of the observation, at any depth, that are left out.
      places: names of entries, at any depth, that are places: integers `[..., 2]` (row, column), or
        dicts of integers `row` and `col`. Their planes have this order.
    """

    encoder: nn.Module
    num_values: int | None = None
    minimum: int = 0
    ignored: Sequence[str] = ()
    places: Sequence[str] = ()
    reads_integers = True  # see `network.Composed`

    def __post_init__(self):
        errors.require_count(self, "num_values")
        super().__post_init__()

    @nn.compact
    def __call__(self, observation):
        """Returns the features of the other encoder."""
        observation = without_mask(observation)
        leaves = jax.tree_util.tree_leaves_with_path(observation)
        names = {getattr(key, "key", "") for path, _ in leaves for key in path}
        for option in ("ignored", "places"):
            for name in getattr(self, option):
                errors.require_known(f"OneHot.{option}: the observation has no", name, names)
        observation = _without(observation, self.ignored)
        places = [place for name in self.places for place in _places(observation, name)]
        codes = jax.tree.map(self._codes, _without(observation, self.places))
        if not places:
            return self.encoder(codes)
        image, vector = image_or_error(codes, "OneHot")
        planes = [_paint(row, col, image.shape[1:3]) for row, col in places]
        image = jnp.concatenate([layers.as_floats(image), *planes], axis=-1)
        return self.encoder({"image": image, "vector": vector})

    def _codes(self, leaf: jax.Array) -> jax.Array:
        if self.num_values is None or not jnp.issubdtype(leaf.dtype, jnp.integer):
            return leaf
        codes = jax.nn.one_hot(leaf.astype(jnp.int32) - self.minimum, self.num_values)
        return codes.reshape(*leaf.shape[:3], -1)  # channels have codes one after the other


def _without(observation: types.PyTree, names: Sequence[str]) -> types.PyTree:
    if not isinstance(observation, dict):
        return observation
    return {k: _without(v, names) for k, v in observation.items() if k not in names}


def _places(observation: types.PyTree, name: str) -> list[tuple[jax.Array, jax.Array]]:
    """Returns rows and columns `[N, ...]` of the entries with this name, see `OneHot.places`."""
    if not isinstance(observation, dict):
        return []
    if name not in observation:
        return [place for entry in observation.values() for place in _places(entry, name)]
    place = observation[name]
    if not isinstance(place, dict):
        place = {"row": place[..., 0], "col": place[..., 1]} if place.shape[-1] == 2 else {}
    parts = [part for part in place.values() if jnp.issubdtype(part.dtype, jnp.integer)]
    if set(place) != {"row", "col"} or len(parts) != 2:
        raise errors.UserError(
            f"OneHot.places: expected '{name}' to be integers [..., 2], or integers 'row' and 'col'"
        )
    return [(place["row"], place["col"])]


def _paint(row: jax.Array, col: jax.Array, size: tuple[int, ...]) -> jax.Array:
    """Returns planes `[N, H, W, K]` for `K` places, `[N, ...]`, each 1 in its place and else 0."""
    row, col = (x.reshape(len(x), 1, 1, -1).astype(jnp.int32) for x in (row, col))
    rows, cols = (jnp.arange(length) for length in size)
    return ((rows[:, None, None] == row) & (cols[:, None] == col)).astype(jnp.float32)


class ValuePropagation(nn.Module):
    """Values that spread over a grid from cell to cell, read around one place, for mazes.

    Nardelli et al., "Value Propagation Networks", 2019, https://arxiv.org/abs/1805.11199 (MVProp).
    Convolutions give each cell a reward `r` and a propagation `p`, both in [0, 1]. Each step raises
    a cell's value to `r + p (v - r)`, where `v` is the largest value of the four cells beside it.

    Attributes:
      place: channel of the image that is 1 in the place to read, such as the agent's plane.
      num_steps: number of steps, the largest distance over which values spread.
      num_maps: number of values of a cell, `M`.
      channels: number of channels of the convolution before rewards and propagation.
      hidden_sizes: sizes of the ReLU layers after the values.
    """

    place: int
    num_steps: int = 20
    num_maps: int = 4
    channels: int = 16
    hidden_sizes: Sequence[int] = (64,)

    def __post_init__(self):
        errors.require_count(self, "place", least=0)
        errors.require_count(self, "num_steps", "num_maps", "channels")
        super().__post_init__()

    @nn.compact
    def __call__(self, observation):
        """Returns features `[N, hidden_sizes[-1]]`; the vector joins before the dense layers."""
        image, vector = image_or_error(observation, "ValuePropagation")
        if self.place >= image.shape[-1]:
            raise errors.UserError(
                f"ValuePropagation.place: expected a channel below {image.shape[-1]}, got "
                f"{self.place}"
            )
        trunk = _Convolutions(((self.channels, 3, 1),), "SAME", layer_norm=False)
        cells = layers.Dense(2 * self.num_maps)(layouts.on_images(trunk, image))
        reward, spread = jnp.split(jnp.moveaxis(cells, 0, 2), 2, axis=-1)  # [H, W, N, M]
        reward = jax.nn.sigmoid(reward)
        spread = jax.nn.sigmoid(spread + 2.0)  # initially 0.9: gradients reach far

        # On CPU the derivative is five times faster if it computes the maxima again.
        @jax.checkpoint
        def step(values, _):
            around = functools.reduce(jnp.maximum, _beside(values))
            raised = reward + spread * (around - reward)
            return jnp.where(raised > values, raised, values), None

        values, _ = jax.lax.scan(step, reward, length=self.num_steps)
        place = jnp.moveaxis(layers.as_floats(image)[..., self.place, None], 0, 2)
        read = [jnp.sum(x * place, axis=(0, 1)) for x in (values, *_beside(values))]
        read = jnp.stack(read, axis=-1)  # [N, M, 5]
        features = jnp.concatenate([read, _normalize(read)], axis=-1).reshape(len(image), -1)
        return layers.mlp(_join(features, vector), self.hidden_sizes, jax.nn.relu)


def _beside(cells: jax.Array) -> list[jax.Array]:
    """Returns the cells above, to the left, to the right and below `[H, W, ...]`; 0 outside."""
    height, width = cells.shape[:2]
    padded = jnp.pad(cells, ((1, 1), (1, 1)) + ((0, 0),) * (cells.ndim - 2))
    corners = ((0, 1), (1, 0), (1, 2), (2, 1))
    return [padded[row : row + height, col : col + width] for row, col in corners]


class DeepSets(nn.Module):
    """Layers that treat all items alike, with a ReLU after each of them.

    Zaheer et al., "Deep Sets", 2017, https://arxiv.org/abs/1703.06114. Each leaf `[K, ...]` has an
    entry for each of `K` items. A layer sees an item and the mean over all items.

    Attributes:
      hidden_sizes: number of features of an item after each layer.
    """

    hidden_sizes: Sequence[int] = (64, 64)

    @nn.compact
    def __call__(self, observation):
        """Returns features `[N, K * hidden_sizes[-1]]`."""
        leaves = jax.tree.leaves(without_mask(observation))
        is_items = all(leaf.ndim > 1 and leaf.size for leaf in leaves)
        if len({leaf.shape[1:2] for leaf in leaves}) != 1 or not is_items:
            shapes = [leaf.shape[1:] for leaf in leaves]
            raise errors.UserError(f"DeepSets needs leaves [items, ...]; the shapes are {shapes}")
        leaves = [layers.as_floats(leaf).reshape(*leaf.shape[:2], -1) for leaf in leaves]
        items = jnp.concatenate(leaves, axis=-1)
        for size in self.hidden_sizes:
            mean = jnp.mean(items, axis=1, keepdims=True)
            items = jax.nn.relu(layers.Dense(size)(items) + layers.Dense(size)(mean))
        return items.reshape(len(items), -1)


class NatureCNN(nn.Module):
    """Three convolutions and a dense layer.

    Mnih et al., "Human-level control through deep reinforcement learning",
    https://doi.org/10.1038/nature14236.

    Attributes:
      hidden: size of the dense layer.
      layer_norm: whether each layer is normalised before its ReLU, see `layers.activate`.
    """

    hidden: int = 512
    layer_norm: bool = False
    packs_frames = True  # see `layouts.pack`

    @nn.compact
    def __call__(self, observation):
        """Returns features `[N, hidden]`, and after them the vector of the observation."""
        image, vector = image_or_error(observation, "NatureCNN")
        trunk = _Convolutions(((32, 8, 4), (64, 4, 2), (64, 3, 1)), "VALID", self.layer_norm)
        features = _features(trunk, image)
        features = layers.mlp(features, (self.hidden,), jax.nn.relu, layer_norm=self.layer_norm)
        return _join(features, vector)


class ImpalaResNet(nn.Module):
    """Residual blocks with pooling, and a dense layer.

    Espeholt et al., "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner
    Architectures", https://arxiv.org/abs/1802.01561.

    Attributes:
      channels: number of channels of each section (convolution, pooling, two residual blocks).
      hidden: size of the dense layer.
      layer_norm: whether the inputs of each ReLU are normalised, see `layers.activate`.
    """

    channels: Sequence[int] = (16, 32, 32)
    hidden: int = 256
    layer_norm: bool = False

    @nn.compact
    def __call__(self, observation):
        """Returns features `[N, hidden]`, and after them the vector of the observation."""
        image, vector = image_or_error(observation, "ImpalaResNet")
        trunk = _ResidualSections(self.channels, self.layer_norm)
        features = _features(trunk, image, recompute=True)
        features = layers.mlp(features, (self.hidden,), jax.nn.relu, layer_norm=self.layer_norm)
        return _join(features, vector)
