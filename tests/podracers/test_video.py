"""Tests of animations."""

import types

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from environments import catch, wrappers
from podracers import errors, video


def test_the_video_has_every_frame_and_a_pause_on_the_last(tmp_path):
    frames = [np.full((4, 6, 3), 60 * shade, np.uint8) for shade in range(4)]
    video.save(frames, tmp_path / "a.gif", frames_per_second=10.0)
    with Image.open(tmp_path / "a.gif") as image:
        assert (image.n_frames, image.info["loop"]) == (4, 0)
        for index, frame in enumerate(frames):
            image.seek(index)
            assert image.info["duration"] == (1000 if index == 3 else 100)
            np.testing.assert_allclose(np.asarray(image.convert("RGB")), frame, atol=4)
    for name, cause in {"no/a.gif": "No such file or directory", "a.mp4": "in .gif, got"}.items():
        with pytest.raises(errors.UserError, match=cause):
            video.save(frames, tmp_path / name)


def test_an_environment_without_render_is_refused():
    sightless = types.SimpleNamespace(spec=types.SimpleNamespace(name="Dark"))
    with pytest.raises(errors.UserError, match=r"Dark \(types\..*\) has no `render`"):
        video.drawable(sightless)

    class Blind(catch.Catch):
        @property
        def render(self):
            raise AttributeError("no lamp")

    with pytest.raises(errors.UserError, match=r"no video of it \(no lamp\)"):
        video.drawable(wrappers.TimeLimit(Blind(), 3))


@pytest.mark.parametrize("shape", [(4, 4), (4, 4, 4), (0, 4, 3)])
def test_a_wrong_picture_is_found_before_any_episode(shape):
    class Wrong(catch.Catch):
        def render(self, state):
            return jnp.zeros(shape, jnp.uint8)

    with pytest.raises(
        errors.UserError, match=r"Catch \(.*Wrong\): render: expected .*, got uint8\["
    ):
        video.drawable(Wrong())
