"""Running statistics agree with NumPy, however the data is split over calls and devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from agents import preprocessing
from podracers import parallel, types

SPEC = {
    "position": specs.Array((3,), np.float32),
    "nested": {"speed": specs.Array((), np.float64), "picture": specs.Array((2, 2), np.uint8)},
    "action_mask": specs.Array((4,), bool),
}
P = jax.sharding.PartitionSpec


def _data(num_batches=3, length=5, batch=8):
    rng = np.random.default_rng(0)
    shape = (num_batches, length, batch)
    observation = {
        # A large mean with a small deviation: naive sums of squares lose everything here.
        "position": (5000.0 + rng.normal(size=(*shape, 3))).astype(np.float32),
        "nested": {
            "speed": rng.normal(size=shape).astype(np.float32),
            "picture": rng.integers(0, 255, (*shape, 2, 2)).astype(np.uint8),
        },
        "action_mask": rng.random((*shape, 4)) < 0.5,
    }
    weights = (rng.random(shape) < 0.8).astype(np.float32)
    observation["position"][weights == 0.0] = np.nan
    return observation, weights


def _run(num_devices, observation, weights):
    mesh = parallel.make_mesh(jax.devices()[:num_devices])
    split = P(None, None, parallel.AXIS)

    def run(observation, weights):
        def body(statistics, batch):
            return preprocessing.update(statistics, *batch), None

        statistics = preprocessing.init(SPEC)
        return jax.lax.scan(body, statistics, (observation, weights))[0]

    mapped = jax.shard_map(run, mesh=mesh, in_specs=(split, split), out_specs=P(), check_vma=False)
    return jax.jit(mapped)(observation, weights)


@functools.cache
def _statistics(num_devices):
    return _run(num_devices, *_data())


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_statistics_agree_with_numpy(num_devices):
    observation, weights = _data()
    statistics = _statistics(num_devices)
    kept = weights > 0.0
    position = observation["position"][kept].astype(np.float64)
    speed = observation["nested"]["speed"][kept].astype(np.float64)
    assert statistics.count == kept.sum()
    np.testing.assert_allclose(statistics.mean["position"], position.mean(0), rtol=1e-6)
    np.testing.assert_allclose(statistics.mean["nested"]["speed"], speed.mean(), atol=1e-6)
    variance = jax.tree.map(lambda x: x / statistics.count, statistics.squares)
    np.testing.assert_allclose(variance["position"], position.var(0), rtol=1e-3)
    np.testing.assert_allclose(variance["nested"]["speed"], speed.var(), rtol=1e-5)
    assert statistics.mean["action_mask"] is None
    assert statistics.mean["nested"]["picture"] is None


def test_normalize_gives_unit_variance_and_leaves_other_dtypes_alone():
    observation, weights = _data()
    normalized = preprocessing.normalize(_statistics(1), observation)
    position = np.asarray(normalized["position"])[weights > 0.0]
    np.testing.assert_allclose(position.mean(0), 0.0, atol=2e-3)
    np.testing.assert_allclose(position.std(0), 1.0, rtol=2e-3)
    assert normalized["nested"]["picture"] is observation["nested"]["picture"]
    assert normalized["action_mask"] is observation["action_mask"]


def test_before_any_data_observations_pass_through_clipped():
    statistics = preprocessing.init(specs.Array((2,), np.float32))
    normalized = preprocessing.normalize(statistics, jnp.array([3.0, -20.0]), clip=5.0)
    np.testing.assert_allclose(normalized, [3.0, -5.0], rtol=1e-6)


def test_an_empty_batch_changes_nothing():
    observation, weights = _data(num_batches=1)
    statistics = _run(1, observation, np.zeros_like(weights))
    jax.tree.map(np.testing.assert_array_equal, statistics, preprocessing.init(SPEC))


def test_rewards_are_scaled_and_then_clipped():
    reward = jnp.array([-9.0, 1.0, 4.0])
    timestep = types.TimeStep(jnp.ones((3, 2)), reward, jnp.ones(3), jnp.ones(3, jnp.int8))
    scaled = preprocessing.Preprocess(reward_scale=0.5).apply((), timestep)
    np.testing.assert_array_equal(scaled.reward, [-4.5, 0.5, 2.0])
    assert scaled.observation is timestep.observation
    clipped = preprocessing.Preprocess(reward_scale=0.5, reward_clip=1.0).apply((), timestep)
    np.testing.assert_array_equal(clipped.reward, [-1.0, 0.5, 1.0])
