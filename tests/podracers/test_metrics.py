"""Tests of episode statistics, the detection of NaN, and summaries."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracers import environment, metrics, parallel, types

P = jax.sharding.PartitionSpec


PASSES = "a discount is -1, which needs EnvironmentSpec.players = 2, or at a time step of reset"
NOT_LAST = "a time step other than LAST has a discount other than 1"


def _rollout(step_type=(types.MID, types.LAST, types.FIRST), reward=0.0, discount=1.0):
    """Returns the numbers of three time steps of two streams, of which the second is FIRST."""
    other = jnp.full((3,), types.MID).at[0].set(types.FIRST)
    step_type = jnp.stack([jnp.array(step_type), other], axis=1).astype(jnp.int8)
    numbers = jnp.ones(step_type.shape, jnp.float32)
    return types.TimeStep((), reward * numbers, discount * numbers, step_type)


_FAULTS = {
    "reset returned a step_type other than FIRST": [
        _rollout((types.MID, types.LAST, types.MID)),
        _rollout((types.MID, types.LAST, types.LAST)),
    ],
    "step returned a step_type other than MID or LAST": [
        _rollout((types.MID, types.FIRST, types.MID)),
        _rollout((types.MID, 77, types.MID)),
    ],
    "reset returned a reward other than 0": [_rollout(reward=jnp.array([[0.0], [1.0], [1.0]]))],
    NOT_LAST: [_rollout(discount=jnp.array([[1.0], [1.0], [0.0]]))],
    PASSES: [_rollout(discount=jnp.array([[1.0], [-1.0], [1.0]]))],
}


@pytest.mark.parametrize("rule", _FAULTS)
def test_a_report_names_the_rule_that_a_rollout_breaks(rule):
    """`test_contract.py` has a case of each rule."""
    for rollout in _FAULTS[rule]:
        first = metrics.of_update({}, rollout, jnp.int32(1)).first_fault
        assert dict(zip(types.RULES, first)) == dict.fromkeys(types.RULES, metrics.NEVER) | {
            rule: 1
        }


def test_a_discount_of_minus_one_is_allowed_in_a_game_of_two_but_not_at_first():
    for discount, expected in (([1.0, -1.0, 1.0], metrics.NEVER), ([1.0, 1.0, -1.0], 1)):
        rollout = _rollout(discount=jnp.array(discount)[:, None] * jnp.array([1.0, 1.0]))
        first = metrics.of_update({}, rollout, jnp.int32(1), players=2).first_fault
        assert first[types.RULES.index(PASSES)] == expected
        assert np.min(first) == expected


def test_a_report_names_an_observation_that_is_not_finite():
    """States of environments may have infinite numbers, and integers are finite."""
    bad, integers = jnp.full((3, 1, 2), jnp.inf), jnp.ones((3, 1), jnp.uint8)
    observations = [integers, {"x": integers, environment.STATE: bad}, {"x": integers, "y": bad}]
    for observation in observations:
        rollout = _rollout()._replace(observation=observation)
        first = metrics.of_update({}, rollout, jnp.int32(1)).first_fault
        faults = dict(zip(metrics.FAULTS, first, strict=True))
        assert (faults[metrics.OBSERVATION] == 1) == (observation is observations[-1])


def test_the_first_time_step_of_a_run_comes_from_a_reset():
    first = metrics.of_update({}, _rollout(), jnp.int32(0)).first_fault
    assert types.RULES[int(np.argmin(first))] == "reset returned a step_type other than FIRST"
    assert np.sum(first == 0) == 1


def test_a_report_merges_means_and_names_the_first_bad_update():
    """Members of a population are checked separately; a mean of no samples is not bad."""
    report = None
    for index, bad in enumerate([1.0, math.nan, 1.0, math.inf]):
        means = {
            "x": types.Mean(jnp.array([2.0 * index, bad]), jnp.ones(2)),
            "none": types.Mean.of(jnp.zeros(3), jnp.zeros(3)),
        }
        latest = metrics.of_update(means, _rollout(), jnp.int32(10 + index))
        report = metrics.merge(report or metrics.empty(latest), latest)
    np.testing.assert_array_equal(report.means["x"].result(), [3.0, math.nan])
    np.testing.assert_array_equal(report.first_nonfinite["x"], [metrics.NEVER, 11])
    assert report.first_nonfinite["none"] == metrics.NEVER
    np.testing.assert_array_equal(report.first_fault, metrics.NEVER)


def test_the_mean_of_many_updates_is_exact_to_one_percent():
    """Its total and its count are float32, beyond 2**24 at the end."""
    update = types.Mean(jnp.float32(0.3 * 1001.0), jnp.float32(1001.0))
    merged = jax.jit(
        lambda: jax.lax.fori_loop(0, 2**17, lambda _, mean: mean.merge(update), update)
    )
    np.testing.assert_allclose(merged().result(), 0.3, rtol=0.01)


def test_the_report_of_all_devices_has_sums_and_the_earliest_bad_update():
    mesh = parallel.make_mesh(jax.devices()[:4])

    def run(total, count):
        means = {"x": types.Mean(total[0], count[0])}
        update = 5 - jax.lax.axis_index(parallel.AXIS)
        rollout = _rollout(discount=jnp.where(update == 4, 5.0, 1.0))
        return metrics.sum_over_devices(metrics.of_update(means, rollout, update))

    mapped = parallel.mapped(run, mesh, P(parallel.AXIS), P())
    count = jnp.array([1.0, 0.0, 2.0, 1.0])
    report = mapped(jnp.array([1.0, 0.0, 4.0, 7.0]), count)
    assert (report.means["x"].result(), report.first_nonfinite["x"]) == (3.0, metrics.NEVER)
    report = mapped(jnp.array([1.0, jnp.nan, jnp.inf, 7.0]), count)
    assert report.first_nonfinite["x"] == 3
    assert dict(zip(types.RULES, report.first_fault))[NOT_LAST] == 4


@pytest.mark.parametrize("flush_every", [1, 7])
def test_episode_statistics_equal_a_slow_loop(flush_every):
    rng = np.random.default_rng(0)
    length, batch = 40, 5
    reward = rng.normal(size=(length, batch)).astype(np.float32)
    step_type = np.full((length, batch), types.MID, np.int8)
    metric = np.full((length, batch), np.nan, np.float32)  # ignored unless at LAST
    expected = []  # returns, lengths and metrics of ended episodes
    for b in range(batch):
        total, steps = 0.0, 0
        for t in range(length):
            if t and step_type[t - 1, b] == types.LAST:
                step_type[t, b], reward[t, b] = types.FIRST, 0.0
                total, steps = 0.0, 0
                continue
            total, steps = total + reward[t, b], steps + 1
            if rng.random() < 0.25:
                step_type[t, b], metric[t, b] = types.LAST, rng.normal()
                expected.append((total, steps, metric[t, b]))
    assert len(expected) > 20

    track = jax.jit(metrics.EpisodeStatistics.track)
    statistics = metrics.EpisodeStatistics.init(batch)
    totals, count = np.zeros(3), 0
    for t in range(length):
        numbers = reward[t], np.ones(batch, np.float32), step_type[t]
        timestep = types.TimeStep((), *numbers, {"own": metric[t]})
        statistics = track(statistics.with_metrics(["own"]), timestep)
        if (t + 1) % flush_every == 0 or t + 1 == length:
            statistics, means = statistics.flush()
            names = ("episode/return", "episode/length", "episode/own")
            assert means.keys() == set(names)
            totals += [means[name].total for name in names]
            count += means["episode/return"].count
            assert len({float(mean.count) for mean in means.values()}) == 1
    assert count == len(expected)
    np.testing.assert_allclose(totals, np.sum(expected, axis=0), rtol=1e-5)


def test_a_number_of_an_episode_that_is_not_finite_is_named():
    begun = metrics.EpisodeStatistics.init(2)
    rollout = _rollout()._replace(metrics={"own": jnp.full((3, 2), jnp.inf)})
    ended, means = begun.with_metrics(["own"]).track_rollout(rollout).flush()
    assert metrics.of_update(means, rollout, jnp.int32(7)).first_nonfinite["episode/own"] == 7
    # A checkpoint has the same parts whatever the environment reports.
    assert jax.tree.structure(ended) == jax.tree.structure(begun)


def test_summaries_of_one_seed_and_of_a_population():
    means = {"x": types.Mean(np.float32(6.0), np.float32(4.0)), "y": types.Mean(0.0, 0.0)}
    logged = metrics.summarize(means, [])
    assert logged["x"] == 1.5 and math.isnan(logged["y"])
    assert all(type(value) is float for value in logged.values())
    mean = types.Mean(np.array([2.0, 12.0, 0.0]), np.array([2.0, 3.0, 0.0]))
    logged = metrics.summarize({"x": mean}, [7, 8, 9])
    assert list(logged) == ["x", "x/std", "x/seed_7", "x/seed_8", "x/seed_9"]
    np.testing.assert_array_equal(list(logged.values()), [2.5, 1.5, 1.0, 4.0, math.nan])
    logged = metrics.summarize({"x": types.Mean(np.zeros(2), np.zeros(2))}, [0, 1])
    np.testing.assert_array_equal(list(logged.values()), [math.nan] * 4)
