"""Running statistics agree with NumPy, however the data is split over calls and devices."""

import functools
import itertools

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


@pytest.mark.parametrize("num_devices", [1, 4])
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


def test_empty_statistics_only_clip_and_an_empty_batch_changes_nothing():
    statistics = preprocessing.init(specs.Array((2,), np.float32))
    normalized = preprocessing.normalize(statistics, jnp.array([3.0, -20.0]))
    np.testing.assert_allclose(normalized, [3.0, -10.0], rtol=1e-6)
    observation, weights = _data(num_batches=1)
    statistics = _run(1, observation, np.zeros_like(weights))
    jax.tree.map(np.testing.assert_array_equal, statistics, preprocessing.init(SPEC))


def _rewards(updates=4, length=5, batch=8):
    """Returns rewards and whether time steps are FIRST, `[U, T + 1, B]`, of one stream each."""
    rng = np.random.default_rng(1)
    steps = updates * length + 1
    first = rng.random((steps, batch)) < 0.25
    first[0] = True
    first[10] = True  # where the third rollout begins
    reward = np.where(first, 0.0, 2.0 + 3.0 * rng.normal(size=(steps, batch)))
    rows = np.arange(updates)[:, None] * length + np.arange(length + 1)
    return reward.astype(np.float32)[rows], first[rows], reward, first


def _slow_returns(reward, first, discount):
    """Returns the count and the variance of returns after each step, and the last ones `[B]`."""
    seen, running, out = [], np.zeros(reward.shape[1]), []
    for t in range(1, reward.shape[0]):
        for b in range(reward.shape[1]):
            if first[t, b]:
                running[b] = 0.0
                continue
            running[b] = discount * running[b] + reward[t, b]
            seen.append(running[b])
        out.append((len(seen), np.var(seen)))
    return out, running


@functools.cache
def _returns(num_devices):
    """Returns the statistics, the running returns and the rewards learnt from, of each update."""
    preprocess = preprocessing.Preprocess(return_discount=0.9)
    reward, first, _, _ = _rewards()

    def run(reward, first):
        def body(carry, rollout):
            reward, first = rollout
            step_type = jnp.where(first, types.FIRST, types.MID).astype(jnp.int8)
            timestep = types.TimeStep(reward, reward, jnp.ones_like(reward), step_type)
            learnt = preprocess.apply(carry[0], timestep).reward
            carry = preprocess.update_returns(*carry, timestep)
            return carry, (carry, learnt)

        zeros = types.TimeStep(*(jnp.zeros(reward.shape[1:]) for _ in range(4)))
        template = types.Rollout(zeros, (), (), ())
        carry = preprocess.init(SPEC), preprocess.init_memory(template)
        return jax.lax.scan(body, carry, (reward, first))[1]

    mesh = parallel.make_mesh(jax.devices()[:num_devices])
    split, rows = P(None, None, parallel.AXIS), P(None, parallel.AXIS)
    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=(split, split), out_specs=((P(), rows), split), check_vma=False
    )
    return jax.device_get(jax.jit(mapped)(reward, first))


@pytest.mark.parametrize("num_devices", [1, 4])
def test_rewards_are_divided_by_the_deviation_of_the_returns_before_them(num_devices):
    (statistics, running), learnt = _returns(num_devices)
    split, _, reward, first = _rewards()
    expected, last = _slow_returns(reward, first, 0.9)
    assert statistics.observation == ()
    variance = statistics.returns.squares / statistics.returns.count
    for update in range(4):
        count, known = expected[5 * update + 4]
        assert statistics.returns.count[update] == count
        np.testing.assert_allclose(variance[update], known, rtol=1e-4)
        factor = 1.0 if update == 0 else expected[5 * update - 1][1] ** -0.5
        np.testing.assert_allclose(learnt[update], factor * split[update], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(running[-1], last, rtol=1e-4, atol=1e-5)
    assert np.ptp(last) > 1.0  # episodes go on from one rollout to the next


def test_a_restarted_simulator_begins_a_return_anew():
    preprocess = preprocessing.Preprocess(return_discount=0.5)
    step_type = jnp.array([[types.FIRST, types.MID], [types.MID, types.MID]], jnp.int8)
    reward = jnp.array([[0.0, 7.0], [1.0, 1.0]])
    timestep = types.TimeStep(reward, reward, jnp.ones((2, 2)), step_type)
    mapped = jax.shard_map(
        lambda: preprocess.update_returns(preprocess.init(SPEC), jnp.array([8.0, 8.0]), timestep),
        mesh=parallel.make_mesh(jax.devices()[:1]),
        in_specs=(),
        out_specs=P(),
        check_vma=False,
    )
    statistics, running = jax.jit(mapped)()
    np.testing.assert_array_equal(running, [1.0, 5.0])
    np.testing.assert_allclose(statistics.returns.squares, 8.0)


def test_normalised_rewards_are_clipped_at_10_and_then_scaled():
    statistics = preprocessing.Statistics(jnp.float32(2.0), jnp.float32(0.0), jnp.float32(8.0))
    reward = jnp.array([-9.0, 1.0, 60.0])
    timestep = types.TimeStep(jnp.ones((3, 2)), reward, jnp.ones(3), jnp.ones(3, jnp.int8))
    normalizer = preprocessing.Normalizer((), statistics)
    preprocess = preprocessing.Preprocess(reward_scale=0.5, return_discount=0.9)
    np.testing.assert_allclose(preprocess.apply(normalizer, timestep).reward, [-2.25, 0.25, 5.0])


def test_each_image_is_shifted_by_one_of_all_shifts():
    """As if padded by its edge and cut out elsewhere; by its own key alone."""
    count, height, width = 300, 5, 7
    image = np.arange(height * width * 2, dtype=np.uint8).reshape(height, width, 2)
    keys = jax.random.split(jax.random.key(0), count)
    observation = {"image": np.tile(image, (count, 1, 1, 1)), "vector": np.ones((count, 3))}
    shift = jax.jit(preprocessing.random_shifts, static_argnums=1)
    shifted = shift(observation, 2, keys)
    assert shifted["image"].dtype == np.uint8
    np.testing.assert_array_equal(shifted["vector"], observation["vector"])
    padded = np.pad(image, ((2, 2), (2, 2), (0, 0)), mode="edge")
    candidates = [
        padded[top : top + height, left : left + width].tobytes()
        for top, left in itertools.product(range(5), repeat=2)
    ]
    counts = [
        [np.asarray(each).tobytes() for each in shifted["image"]].count(c) for c in candidates
    ]
    assert sum(counts) == count
    assert min(counts) >= 2 and max(counts) <= 26  # 12 of each are expected
    reordered = shift(observation, 2, keys[::-1])["image"]
    np.testing.assert_array_equal(reordered[::-1], shifted["image"])
