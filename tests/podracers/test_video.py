"""Tests of animations."""

import jax
import numpy as np
import pytest
from PIL import Image

from environments import catch
from podracers import errors, video


def test_saves_every_frame_and_rests_on_the_last(tmp_path):
    environment = catch.Catch()
    state, _ = jax.device_get(environment.reset(jax.random.key(0)))
    rows = [state._replace(ball_row=np.int32(row)) for row in range(4)]
    frames = [environment.render(each) for each in rows]
    video.save(frames, tmp_path / "a.gif", frames_per_second=10.0)
    with Image.open(tmp_path / "a.gif") as image:
        assert (image.n_frames, image.info["loop"]) == (4, 0)
        durations = []
        for index, frame in enumerate(frames):
            image.seek(index)
            durations.append(image.info["duration"])
            # A GIF has a palette of 256 colours for each frame.
            assert np.abs(np.asarray(image.convert("RGB"), np.int32) - frame).mean() < 4.0
    assert durations == [100, 100, 100, 1000]
    with pytest.raises(errors.UserError, match="No such file or directory"):
        video.save(frames, tmp_path / "no" / "a.gif")


def test_refuses_an_environment_without_render():
    class Sightless:
        spec = catch.Catch().spec

    with pytest.raises(errors.UserError, match="has no `render`"):
        video.require(Sightless())
