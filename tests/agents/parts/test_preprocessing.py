"""Running statistics agree with NumPy, however the data is split over calls and devices.

Axis legend: `U` updates, `T` time, `B` streams.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from agents.parts import preprocessing
from podracers import parallel, types
from tests.agents import experience

SPEC = {
    "position": specs.Array((3,), np.float32),
    "nested": {"speed": specs.Array((), np.float64), "picture": specs.Array((2, 2), np.uint8)},
    "action_mask": specs.Array((4,), bool),
}
SHAPE = (3, 5, 8)  # [U, T, B]
P = jax.sharding.PartitionSpec
SPLIT = P(None, None, parallel.AXIS)
DEVICES = pytest.mark.parametrize("num_devices", [pytest.param(1, marks=pytest.mark.slow), 4])


def _run(num_devices, observation, weights):
    def run(observation, weights):
        def body(statistics, batch):
            return preprocessing.update(statistics, *batch), None

        return jax.lax.scan(body, preprocessing.init(SPEC), (observation, weights))[0]

    mapped = experience.on_devices(run, num_devices, (SPLIT, SPLIT))
    return jax.jit(mapped)(observation, weights)


@DEVICES
def test_statistics_agree_with_numpy(num_devices):
    rng = np.random.default_rng(0)
    # A large mean with a small deviation: naive sums of squares lose everything here.
    position = (5000.0 + rng.normal(size=(*SHAPE, 3))).astype(np.float32)
    speed = rng.normal(size=SHAPE).astype(np.float32)
    picture, mask = np.zeros((*SHAPE, 2, 2), np.uint8), np.ones((*SHAPE, 4), bool)
    weights = (rng.random(SHAPE) < 0.8).astype(np.float32)
    kept = weights > 0.0
    position[~kept] = np.nan
    nested = {"speed": speed, "picture": picture}
    observation = {"position": position, "nested": nested, "action_mask": mask}
    statistics = _run(num_devices, observation, weights)
    position, speed = position[kept].astype(np.float64), speed[kept].astype(np.float64)
    assert statistics.count == kept.sum()
    np.testing.assert_allclose(statistics.mean["position"], position.mean(0), rtol=1e-6)
    np.testing.assert_allclose(statistics.mean["nested"]["speed"], speed.mean(), atol=1e-6)
    variance = jax.tree.map(lambda x: x / statistics.count, statistics.squares)
    np.testing.assert_allclose(variance["position"], position.var(0), rtol=1e-3)
    np.testing.assert_allclose(variance["nested"]["speed"], speed.var(), rtol=1e-5)
    assert statistics.mean["action_mask"] is None
    assert statistics.mean["nested"]["picture"] is None
    # An empty batch changes nothing.
    empty = _run(num_devices, observation, np.zeros_like(weights))
    jax.tree.map(np.testing.assert_array_equal, empty, preprocessing.init(SPEC))


@pytest.mark.parametrize(("batch", "count"), [(1, 2**24), (1000, 2.0**40)])
def test_statistics_follow_the_observations_however_many_were_counted(batch, count):
    """Observations of variance 1 are followed by some of variance 4 and mean 3, in 2**17 batches.

    By then the earlier ones weigh exp(-1): float32 adds no small number to a large one.
    """
    merges = 2**17
    observation = jnp.array([1.0, 5.0])  # in turn

    def run(statistics):
        def body(index, statistics):
            row = observation[(index + jnp.arange(batch)) % 2]
            return preprocessing.update(statistics, row[None], jnp.ones((1, batch)))

        return jax.lax.fori_loop(0, merges, body, statistics)

    before = preprocessing.Statistics(*(jnp.float32(x) for x in (count, 0.0, count)))
    after = jax.jit(experience.on_devices(run, 1, (P(),)))(before)
    old = np.exp(-1.0)
    np.testing.assert_allclose(after.mean, 3.0 * (1.0 - old), rtol=0.02)
    variance = old * 1.0 + (1.0 - old) * 4.0 + old * (1.0 - old) * 9.0
    np.testing.assert_allclose(after.squares / after.count, variance, rtol=0.02)


def test_empty_statistics_only_clip():
    statistics = preprocessing.init(specs.Array((2,), np.float32))
    normalized = preprocessing.normalize(statistics, jnp.array([3.0, -20.0]))
    np.testing.assert_allclose(normalized, [3.0, -10.0], rtol=1e-6)


@pytest.mark.parametrize("normalize_observations", [False, True])
@pytest.mark.parametrize("return_discount", [None, 0.0])
def test_a_rollout_is_learnt_with_earlier_statistics_and_the_first_with_its_own(
    normalize_observations, return_discount
):
    preprocess = preprocessing.Preprocess(normalize_observations, return_discount=return_discount)
    rng = np.random.default_rng(0)
    observation = rng.normal(5.0, 3.0, size=(2, 6, 8)).astype(np.float32)  # [U, T + 1, B]
    reward = rng.normal(5.0, 100.0, size=(2, 6, 8)).astype(np.float32)

    def run(*rollouts):
        def body(carry, rollout):
            ones = jnp.ones_like(rollout[0])
            timestep = types.TimeStep(*rollout, ones, ones.astype(jnp.int8))
            learnt = preprocess.apply_to_rollout(carry[0], timestep)
            statistics = preprocess.update_statistics(carry[0], timestep)
            carry = preprocess.update_returns(statistics, carry[1], timestep)
            return carry, (learnt.observation, learnt.reward)

        running = () if return_discount is None else jnp.zeros(rollouts[0].shape[2:])
        carry = preprocess.init(specs.Array((), np.float32)), running
        return jax.lax.scan(body, carry, rollouts)[1]

    learnt = jax.jit(experience.on_devices(run, 4, (SPLIT, SPLIT), SPLIT))(observation, reward)
    counted = observation[0, :-1]
    if normalize_observations:
        observation = (observation - counted.mean()) / counted.std()
    if return_discount is not None:
        reward = reward / reward[0, 1:].std()
    for actual, expected in zip(learnt, (observation, reward), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@DEVICES
def test_rewards_are_divided_by_the_deviation_of_the_returns_before_them(num_devices):
    """Then they are clipped at 10 and scaled. Restarted simulators begin new episodes."""
    updates, length, batch = SHAPE
    rng = np.random.default_rng(1)
    first = rng.random((updates, length + 1, batch)) < 0.25
    reward = np.where(first, 0.0, 2.0 + 3.0 * rng.normal(size=first.shape)).astype(np.float32)
    preprocess = preprocessing.Preprocess(reward_scale=0.5, return_discount=0.9)

    def run(reward, first):
        def body(carry, rollout):
            reward, first = rollout
            step_type = jnp.where(first, types.FIRST, types.MID).astype(jnp.int8)
            timestep = types.TimeStep(reward, reward, jnp.ones_like(reward), step_type)
            learnt = preprocess.apply(carry[0], timestep).reward
            carry = preprocess.update_returns(*carry, timestep)
            return carry, (carry, learnt)

        template = types.Rollout(types.TimeStep(*[reward[0]] * 4), (), (), ())
        carry = preprocess.init(SPEC), preprocess.init_memory(template)
        return jax.lax.scan(body, carry, (reward, first))[1]

    out_specs = (P(), P(None, parallel.AXIS)), SPLIT
    mapped = experience.on_devices(run, num_devices, (SPLIT, SPLIT), out_specs)
    (statistics, running), learnt = jax.jit(mapped)(reward, first)
    assert statistics.observation == ()
    variance = statistics.returns.squares / statistics.returns.count
    seen, expected, factor = [], np.zeros(batch), 1.0
    for update in range(updates):
        scaled = 0.5 * np.clip(factor * reward[update], -10.0, 10.0)
        np.testing.assert_allclose(learnt[update], scaled, rtol=1e-4, atol=1e-6)
        expected[first[update, 0]] = 0.0
        for t in range(1, length + 1):
            expected = np.where(first[update, t], 0.0, 0.9 * expected + reward[update, t])
            seen += list(expected[~first[update, t]])
        assert statistics.returns.count[update] == len(seen)
        np.testing.assert_allclose(variance[update], np.var(seen), rtol=1e-4)
        np.testing.assert_allclose(running[update], expected, rtol=1e-4, atol=1e-5)
        factor = np.var(seen) ** -0.5


def test_each_image_is_shifted_by_one_of_all_shifts():
    """As if padded by its edge and cut out elsewhere; by its own key alone."""
    count, height, width = 300, 5, 7
    image = np.arange(height * width * 2, dtype=np.uint8).reshape(height, width, 2)
    keys = jax.random.split(jax.random.key(0), count)
    observation = {"image": np.tile(image, (count, 1, 1, 1)), "vector": np.ones((count, 3))}
    shift = jax.jit(preprocessing.random_shifts, static_argnums=1)
    shifted = jax.device_get(shift(observation, 2, keys))
    np.testing.assert_array_equal(shifted["vector"], observation["vector"])
    padded = np.pad(image, ((2, 2), (2, 2), (0, 0)), mode="edge")
    counts = [
        sum(
            np.array_equal(image, padded[top : top + height, left : left + width])
            for image in shifted["image"]
        )
        for top, left in itertools.product(range(5), repeat=2)
    ]
    assert sum(counts) == count
    assert min(counts) >= 2 and max(counts) <= 26  # 12 of each are expected
    reordered = shift(observation, 2, keys[::-1])["image"]
    np.testing.assert_array_equal(reordered[::-1], shifted["image"])
