"""Tests of animations."""

import numpy as np
from PIL import Image

from podracers import video


def test_the_video_has_every_frame_and_a_pause_on_the_last(tmp_path):
    frames = [np.full((4, 6, 3), 60 * shade, np.uint8) for shade in range(4)]
    video.save(frames, tmp_path / "a.gif", frames_per_second=10.0)
    with Image.open(tmp_path / "a.gif") as image:
        assert (image.n_frames, image.info["loop"]) == (4, 0)
        for index, frame in enumerate(frames):
            image.seek(index)
            assert image.info["duration"] == (1000 if index == 3 else 100)
            np.testing.assert_allclose(np.asarray(image.convert("RGB")), frame, atol=4)
