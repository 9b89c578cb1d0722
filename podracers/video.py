"""Animated GIFs of episodes."""

import pathlib
from collections.abc import Sequence

import numpy as np
from PIL import Image

from podracers import environment as environment_lib
from podracers import errors


def drawable(
    environment: environment_lib.Environment | environment_lib.HostEnvironmentFactory,
) -> environment_lib.Environment | environment_lib.HostEnvironmentFactory:
    """Returns the environment if it has `render`, else its form whose simulators draw.

    Raises:
      errors.UserError: nothing can be drawn.
    """
    if hasattr(environment, "render"):
        return environment
    if not hasattr(environment, "filmed"):
        raise errors.UserError(f"{environment.spec.name} has no `render`: no video of it")
    return environment.filmed()


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
    first, *rest = (Image.fromarray(frame) for frame in frames)
    durations = [round(1000.0 / frames_per_second)] * len(rest) + [1000]  # milliseconds
    try:
        first.save(
            path, save_all=True, append_images=rest, duration=durations, loop=0, format="GIF"
        )
    except OSError as error:
        raise errors.UserError(f"cannot write the video '{path}': {error.strerror}") from error
