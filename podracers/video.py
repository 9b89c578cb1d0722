"""Writes an episode as an animated GIF."""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from podracers import environment as environment_lib
from podracers import errors

_Environment = environment_lib.Environment | environment_lib.HostEnvironmentFactory


def require(environment: _Environment) -> None:
    """Raises `errors.UserError` unless the environment, or its simulator, can draw."""
    if hasattr(environment, "render"):
        return
    if not hasattr(environment, "filmed"):
        raise errors.UserError(f"{environment.spec.name} has no `render`: no video of it")
    environment.filmed()


def save(
    environment: _Environment,
    states: Sequence[Any],
    path: str | pathlib.Path,
    frames_per_second: float = 12.0,
) -> None:
    """Draws an episode and writes it as a GIF that loops, with a pause on the last frame.

    Args:
      environment: one that has `render`.
      states: the arguments of `render`, on the host: states, or time steps of a host environment.
      path: the GIF's path.
      frames_per_second: the animation's speed.

    Raises:
      errors.UserError: the environment cannot be rendered, or the file not written.
    """
    require(environment)
    write([environment.render(state) for state in states], path, frames_per_second)


def write(
    frames: Sequence[np.ndarray], path: str | pathlib.Path, frames_per_second: float = 12.0
) -> None:
    """Writes pictures as a GIF that loops, with a pause on the last of them.

    Args:
      frames: uint8 `[height, width, 3]`.
      path: the GIF's path.
      frames_per_second: the animation's speed.

    Raises:
      errors.UserError: the file cannot be written.
    """
    images = [Image.fromarray(frame) for frame in frames]
    milliseconds = round(1000.0 / frames_per_second)
    durations = [milliseconds] * (len(images) - 1) + [1000]
    try:
        images[0].save(
            path, save_all=True, append_images=images[1:], duration=durations, loop=0, format="GIF"
        )
    except OSError as error:
        raise errors.UserError(f"cannot write the video '{path}': {error.strerror}") from error
