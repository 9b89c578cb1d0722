"""Writes an episode as an animated GIF."""

import pathlib
from collections.abc import Sequence

import numpy as np
from PIL import Image

from podracers import environment as environment_lib
from podracers import errors


def require(
    environment: environment_lib.Environment | environment_lib.HostEnvironmentFactory,
) -> None:
    """Raises `errors.UserError` unless the environment, or its simulator, can be rendered."""
    if hasattr(environment, "render"):
        return
    if not hasattr(environment, "filmed"):
        raise errors.UserError(f"{environment.spec.name} has no `render`: no video of it")
    environment.filmed()


def save(
    frames: Sequence[np.ndarray], path: str | pathlib.Path, frames_per_second: float = 12.0
) -> None:
    """Writes frames as a GIF that loops, with a pause on the last frame.

    Args:
      frames: uint8 `[height, width, 3]`, as `evaluation.Evaluator.film` returns them.
      path: the GIF's path.
      frames_per_second: speed of the animation.

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
