"""Tests of animations."""

import jax
import numpy as np
import pytest
from PIL import Image

from environments import catch
from podracers import errors, video


class Sightless:
    """An environment that cannot be drawn."""

    spec = catch.Catch().spec


def _states(environment, count):
    state, _ = environment.reset(jax.random.key(0))
    return [jax.device_get(state._replace(ball_row=np.int32(row))) for row in range(count)]


def test_saves_a_frame_for_each_state_and_rests_on_the_last(tmp_path):
    environment = catch.Catch()
    states = _states(environment, 4)
    video.save(environment, states, tmp_path / "a.gif", frames_per_second=10.0)
    with Image.open(tmp_path / "a.gif") as image:
        assert image.n_frames == 4
        assert image.info["loop"] == 0
        durations = []
        for index in range(4):
            image.seek(index)
            durations.append(image.info["duration"])
            drawn = np.asarray(image.convert("RGB"), np.int32)
            # A GIF has a palette of 256 colours for each frame.
            assert np.abs(drawn - environment.render(states[index])).mean() < 4.0
    assert durations == [100, 100, 100, 1000]


def test_refuses_what_cannot_be_drawn(tmp_path):
    with pytest.raises(errors.UserError, match="has no `render`"):
        video.save(Sightless(), [], tmp_path / "a.gif")


def test_refuses_a_path_that_cannot_be_written(tmp_path):
    environment = catch.Catch()
    with pytest.raises(errors.UserError, match="No such file or directory"):
        video.save(environment, _states(environment, 1), tmp_path / "no" / "a.gif")
