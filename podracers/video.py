"""Animated GIFs of episodes."""

import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from PIL import Image

from podracers import environment as environment_lib
from podracers import errors


def drawable(
    environment: environment_lib.AnyEnvironment,
) -> environment_lib.AnyEnvironment:
    """Returns the environment if it has `render`, else its form whose simulators draw.

    A JAX environment draws one picture, so that a fault is found before episodes are played.

    Raises:
      errors.UserError: nothing can be drawn, or `render` returns something else than a picture.
    """
    if hasattr(environment, "filmed") and not hasattr(environment, "render"):
        return environment.filmed()
    subject: Any = environment
    try:
        _ = subject.render
    except AttributeError as error:  # an error of a property may name a missing part
        path = environment_lib.name_of(environment)
        raise errors.UserError(f"{path} has no `render`: no video of it ({error})") from error
    if not environment_lib.is_host(environment):
        state, _ = jax.jit(environment.reset)(jax.random.key(0))
        draw(environment, jax.device_get(state))
    return environment


def draw(environment: Any, state: Any) -> np.ndarray:
    """Returns the picture that the method `render` of an environment draws; see `picture`."""
    return picture(environment, environment.render(state))


def picture(environment: Any, image: Any) -> np.ndarray:
    """Returns a picture that an environment has drawn, in NumPy.

    Raises:
      errors.UserError: it is not uint8 `[height, width, 3]`.
    """
    image = np.asarray(image)
    if image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3 and image.size:
        return image
    raise errors.UserError(
        f"{environment_lib.name_of(environment)}: render: expected uint8[height, width, 3], got "
        f"{image.dtype}{[*image.shape]}"
    )


def require_gif(path: str | pathlib.Path) -> None:
    """Raises a `UserError` unless the name of a video ends with `.gif`."""
    if pathlib.Path(path).suffix.lower() != ".gif":
        raise errors.UserError(f"a video is an animated GIF: expected a name in .gif, got '{path}'")


def save(
    frames: Sequence[np.ndarray], path: str | pathlib.Path, frames_per_second: float = 12.0
) -> None:
    """Writes frames, uint8 `[height, width, 3]`, as a GIF that loops, and pauses on the last one.

    Raises:
      errors.UserError: the name has another ending, or the file cannot be written.
    """
    require_gif(path)
    first, *rest = (Image.fromarray(frame) for frame in frames)
    durations = [round(1000.0 / frames_per_second)] * len(rest) + [1000]  # milliseconds
    options = {"append_images": rest, "duration": durations, "loop": 0, "format": "GIF"}
    with errors.file_errors(f"write the video '{path}'"):
        first.save(path, save_all=True, **options)
