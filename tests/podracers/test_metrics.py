"""Tests of episode statistics, the detection of NaN, and summaries."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracers import metrics, parallel, types

P = jax.sharding.PartitionSpec


def _means(**values):
    return {name: types.Mean(jnp.float32(v), jnp.float32(1.0)) for name, v in values.items()}


def test_a_report_merges_means_and_names_the_first_bad_update():
    updates = [
        _means(good=1.0, bad=1.0),
        _means(good=2.0, bad=np.nan),
        _means(good=6.0, bad=1.0),
        _means(good=3.0, bad=np.inf),
    ]
    report = metrics.empty(updates[0])
    assert report.first_nonfinite["bad"] == metrics.NEVER
    for index, means in enumerate(updates):
        report = metrics.add(report, means, jnp.int32(10 + index))
    assert report.means["good"].result() == 3.0
    assert report.first_nonfinite["good"] == metrics.NEVER
    assert report.first_nonfinite["bad"] == 11
    assert jnp.isnan(report.means["bad"].result())


def test_a_mean_of_no_samples_is_not_reported():
    """If no episode ended, NaN is logged, and the run does not fail."""
    means = {"episode/return": types.Mean.of(jnp.zeros(3), jnp.zeros(3))}
    report = metrics.add(metrics.empty(means), means, jnp.int32(0))
    assert report.first_nonfinite["episode/return"] == metrics.NEVER


def test_members_of_a_population_are_checked_separately():
    means = {"x": types.Mean(jnp.array([1.0, jnp.nan, 2.0]), jnp.ones(3))}
    report = metrics.add(metrics.empty(means), means, jnp.int32(4))
    expected = [metrics.NEVER, 4, metrics.NEVER]
    np.testing.assert_array_equal(report.first_nonfinite["x"], expected)


def test_reduce_adds_shares_and_takes_the_earliest_bad_update():
    mesh = parallel.make_mesh(jax.devices()[:4])

    def run(total, count):
        means = {"x": types.Mean(total[0], count[0])}
        update = 5 - jax.lax.axis_index(parallel.AXIS)
        return metrics.sum_over_devices(metrics.add(metrics.empty(means), means, update))

    mapped = jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=P(parallel.AXIS), out_specs=P(), check_vma=False)
    )
    count = jnp.array([1.0, 0.0, 2.0, 1.0])
    report = mapped(jnp.array([1.0, 0.0, 4.0, 7.0]), count)
    assert report.means["x"].result() == 3.0
    assert report.first_nonfinite["x"] == metrics.NEVER
    report = mapped(jnp.array([1.0, jnp.nan, jnp.inf, 7.0]), count)
    assert report.first_nonfinite["x"] == 3


@pytest.mark.parametrize("flush_every", [1, 7, 40])
def test_episode_statistics_equal_a_slow_loop(flush_every):
    rng = np.random.default_rng(0)
    length, batch = 40, 5
    reward = rng.normal(size=(length, batch)).astype(np.float32)
    step_type = np.full((length, batch), types.MID, np.int8)
    for b in range(batch):
        for t in range(length):
            if t and step_type[t - 1, b] == types.LAST:
                step_type[t, b], reward[t, b] = types.FIRST, 0.0
            elif rng.random() < 0.25:
                step_type[t, b] = types.LAST
    ones = np.ones((length, batch), np.float32)
    timestep = types.TimeStep(ones, reward, ones, step_type)

    expected = []
    for b in range(batch):
        episode = []
        for t in range(length):
            if step_type[t, b] == types.FIRST:
                episode = []
                continue
            episode.append(reward[t, b])
            if step_type[t, b] == types.LAST:
                expected.append((sum(episode), len(episode)))

    track = jax.jit(metrics.EpisodeStatistics.track)
    statistics = metrics.EpisodeStatistics.init(batch)
    flushed = []
    for t in range(length):
        statistics = track(statistics, jax.tree.map(lambda x, t=t: x[t], timestep))
        if (t + 1) % flush_every == 0 or t + 1 == length:
            statistics, means = statistics.flush()
            flushed.append(means)
    assert len(expected) > 20
    for name, column in (("episode/return", 0), ("episode/length", 1)):
        total = sum(float(means[name].total) for means in flushed)
        count = sum(float(means[name].count) for means in flushed)
        assert count == len(expected)
        np.testing.assert_allclose(total, sum(row[column] for row in expected), rtol=1e-5)


def test_summarize_one_seed():
    means = {"x": types.Mean(np.float32(6.0), np.float32(4.0)), "y": types.Mean(0.0, 0.0)}
    logged = metrics.summarize(means, [])
    assert logged["x"] == 1.5
    assert math.isnan(logged["y"])
    assert all(type(value) is float for value in logged.values())


def test_summarize_a_population():
    mean = types.Mean(np.array([2.0, 12.0, 0.0]), np.array([2.0, 3.0, 0.0]))
    logged = metrics.summarize({"x": mean}, [7, 8, 9])
    assert list(logged) == ["x", "x/std", "x/seed_7", "x/seed_8", "x/seed_9"]
    assert (logged["x"], logged["x/std"]) == (2.5, 1.5)
    assert (logged["x/seed_7"], logged["x/seed_8"]) == (1.0, 4.0)
    assert math.isnan(logged["x/seed_9"])
    logged = metrics.summarize({"x": types.Mean(np.zeros(2), np.zeros(2))}, [0, 1])
    assert len(logged) == 4
    assert all(math.isnan(value) for value in logged.values())
