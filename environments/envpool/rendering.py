"""Pictures of EnvPool's tasks, drawn from their observations.

Axis legend: `H` height, `W` width, `C` channels.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from dm_env import specs

from environments import cartpole, pendulum, rendering
from podracers import types

_LEAST_SIDE = 240  # pixels, of a picture
_LEAST_IMAGE = 32  # pixels; uint8 arrays that are smaller are symbols on a board
_PALETTE = (rendering.BLUE, rendering.ORANGE, rendering.INK, rendering.RED, rendering.GREEN)

Drawer = Callable[[Any], np.ndarray]  # of one observation: uint8 [H, W, 3]


def drawer(task_id: str, observation: types.PyTree) -> Drawer | None:
    """Returns what draws the observations of a task, or None where they show no picture.

    Args:
      task_id: one of EnvPool's.
      observation: its spec.
    """
    if task_id == "CartPole-v1":
        return _cartpole
    if task_id == "Pendulum-v1":
        return _pendulum
    if task_id.startswith("gfootball/"):
        return _minimap
    if not isinstance(observation, Mapping):
        draw = _array_drawer(observation)
        return None if draw is None else lambda array: draw(np.asarray(array))
    for key, part in observation.items():
        draw = _array_drawer(part)
        if draw is not None:
            return lambda tree, key=key, draw=draw: draw(np.asarray(tree[key]))
    return None


def _array_drawer(spec: Any) -> Drawer | None:
    """Returns what draws a single array: an image, or layers of a board with values in [0, 1]."""
    if not isinstance(spec, specs.Array) or len(spec.shape) != 3:
        return None
    if spec.dtype == np.uint8 and min(spec.shape[:2]) >= _LEAST_IMAGE:
        return _image if spec.shape[2] in (1, 3) else _newest_frame
    if spec.dtype == np.float32 and spec.shape[2] <= len(_PALETTE):
        return _board
    return None


def _image(image: np.ndarray) -> np.ndarray:
    """Enlarges `[H, W, 1]` or `[H, W, 3]` by a whole factor."""
    factor = max(1, math.ceil(_LEAST_SIDE / min(image.shape[:2])))
    image = np.broadcast_to(image, (*image.shape[:2], 3))
    return image.repeat(factor, axis=0).repeat(factor, axis=1)


def _newest_frame(image: np.ndarray) -> np.ndarray:
    """Draws the last channel of a stack, or the last layer of a map, in grey."""
    return _image(image[..., -1:])


def _minimap(layers: np.ndarray) -> np.ndarray:
    """Colours the teams, the ball and the active player of a football pitch, `[H, W, 4]`."""
    image = rendering.canvas(*layers.shape[:2])
    for layer, colour in zip(np.moveaxis(layers, -1, 0), _PALETTE):
        image[layer > 0] = colour
    return _image(rendering.finish(image))


def _board(layers: np.ndarray) -> np.ndarray:
    """Paints every cell in the colours of its layers, the rarest on top."""
    image, side = rendering.board(*layers.shape[:2], _LEAST_SIDE)
    coloured = list(zip(np.moveaxis(layers, -1, 0), _PALETTE))
    for layer, colour in sorted(coloured, key=lambda pair: -np.count_nonzero(pair[0])):
        for row, column in np.argwhere(layer > 0.0):
            size = 0.85 * side * math.sqrt(min(1.0, float(layer[row, column])))
            centre = rendering.cell_centre(row, column, side)
            rendering.box(image, centre, (size, size), colour)
    return rendering.finish(image)


def _cartpole(observation: np.ndarray) -> np.ndarray:
    return cartpole.CartPole().render(cartpole.State(*observation, time=0))


def _pendulum(observation: np.ndarray) -> np.ndarray:
    angle = math.atan2(float(observation[1]), float(observation[0]))
    return pendulum.Pendulum().render(pendulum.State(angle, observation[2], torque=0.0, time=0))
