"""Shared parts of adaptors: actions are translated, in NumPy and in JAX alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from environments import adaptors
from podracers import environment, errors

CASES = {
    # shape, dtype, minimum, maximum, shape of the mask; an action, and the inner action
    "discrete": ((), np.int32, 2, 5, (4,), 3, 5),
    "numbered by a float": ((), np.float64, 0.0, 2.0, None, 1, 1.0),
    "one part": ((1,), np.int64, 1, 3, (3,), 0, [1]),
    "one part of many agents": ((1,), np.int32, 0, 2, (1, 3), [1], [1]),
    "parts": ((3,), np.int32, [0, 1, 0], [1, 3, 3], (3, 4), [1, 2, 3], [1, 3, 3]),
    "joint": ((2,), np.int32, [0, 1], [1, 3], (2, 3), 5, [1, 3]),
    "parts without a mask": ((2, 1), np.int32, 0, [[1], [2]], None, [1, 2], [[1], [2]]),
    "continuous": ((2,), np.float64, -0.1, 0.3, None, [-0.1, 0.3], [-0.1, 0.3]),
}


@pytest.mark.parametrize("name", CASES)
def test_actions_are_translated_with_and_without_a_batch(name):
    *spec, action, expected = CASES[name]
    codec = adaptors.action_codec("Game", *spec)
    action = np.asarray(action, codec.spec.dtype)
    codec.spec.validate(action)
    inner = codec.decode(action)
    assert (inner.shape, inner.dtype) == (spec[0], spec[1])
    np.testing.assert_allclose(inner, expected, rtol=1e-6)
    assert np.all(inner >= codec.minimum) and np.all(inner <= codec.maximum)
    batch = codec.decode(np.stack([action] * 3))
    np.testing.assert_array_equal(batch, [inner] * 3)
    np.testing.assert_allclose(codec.decode(action, jnp), inner, rtol=1e-6)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((4, 84, 84), (84, 84, 4)),
        ((1, 12, 20), (12, 20, 1)),
        ((84, 84, 3), (84, 84, 3)),
        ((9, 9, 9), (9, 9, 9)),
        ((40, 30), (40, 30)),
    ],
)
def test_images_of_bytes_have_their_channels_last(shape, expected):
    batch = np.random.default_rng(0).integers(0, 256, (2, *shape), np.uint8)
    for tree in (batch, batch.astype(np.int16)):
        moved = adaptors.channels_last({"image": tree})["image"]
        spec = specs.BoundedArray(shape, tree.dtype, 0, 255, "image")
        spec = adaptors.channels_last_spec(spec)
        assert moved.shape[1:] == spec.shape == (expected if tree is batch else shape)
        assert (spec.name, spec.maximum) == ("image", 255)
        assert moved.strides == np.empty_like(moved, order="C").strides
    source = batch if shape == expected else batch.transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(adaptors.channels_last(batch), source)


def test_masks_follow_the_actions():
    by_name = {name: adaptors.action_codec(name, *case[:5]).spec for name, case in CASES.items()}
    shapes = {name: environment.legal_values(spec).shape for name, spec in by_name.items()}
    assert shapes["discrete"] == (4,) and shapes["joint"] == (6,)
    assert shapes["parts"] == (3, 4) and shapes["one part of many agents"] == (1, 3)


def test_a_value_beyond_the_mask_is_not_an_action():
    spec = adaptors.action_codec("Game", (3,), np.int32, 0, 9, (3, 9)).spec
    assert isinstance(spec, specs.BoundedArray) and spec.maximum.tolist() == [8, 8, 8]


class _Simulator:
    """Reads its model through a method that the constructor chooses, as MuJoCo Playground does."""

    def __init__(self):
        self.model = {"link": {"mass": jnp.ones(2), "parent": jnp.arange(2)}}
        self.step = self._step

    def _step(self):
        return self.model["link"]["mass"].sum()


def test_a_missing_library_is_named_without_the_options():
    message = "^Coinrun: it needs Qt; apt install qt$"
    with pytest.raises(errors.UserError, match=message), adaptors.options_of("Coinrun", {}):
        raise ImportError("it needs Qt; apt install qt\nmore")


def test_a_copy_of_a_simulator_reads_its_own_model():
    simulator = _Simulator()
    parameters = adaptors.parameters_of(simulator.model)
    assert [*parameters] == ["link.mass"]

    @jax.jit
    def step(factor):
        values = {"link.mass": factor * parameters["link.mass"]}
        return adaptors.with_parameters(simulator, "model", values).step()

    assert (float(step(3.0)), float(simulator.step())) == (6.0, 2.0)
