"""Tests of intervals and of tests of agreement: literals, and every resample that there is."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats


@pytest.fixture(scope="module")
def aggregates(tools):
    return tools("results.aggregates").aggregates


SCORES = [[0.0, 1.0, 2.0, 3.0], [10.0, 10.0, 10.0, 14.0], [5.0, 5.0, 5.0, 5.0]]


def test_statistics_over_tasks_and_runs(aggregates):
    def value(statistic):
        return aggregates.estimate(SCORES, statistic).value

    assert value(aggregates.mean) == pytest.approx((1.5 + 11.0 + 5.0) / 3)
    assert value(aggregates.median) == 5.0  # of the tasks' means
    # Of twelve scores in order, the three least and the three greatest are left out.
    assert value(aggregates.interquartile_mean) == pytest.approx((3 + 4 * 5 + 10) / 6)


def _exact(tasks, statistic):
    """Returns the percentiles over every resample of every task, each as likely as any other."""
    resamples = [list(itertools.product(runs, repeat=len(runs))) for runs in tasks]
    reached = [
        statistic(*(np.array(runs) for runs in chosen)) for chosen in itertools.product(*resamples)
    ]
    return np.percentile(reached, [2.5, 97.5])


@pytest.mark.parametrize("name", ["mean", "median", "interquartile_mean"])
def test_an_interval_is_what_all_resamples_reach(aggregates, name):
    tasks = [[0.0, 1.0, 5.0], [2.0, 2.5, 4.0]]
    statistic = getattr(aggregates, name)
    found = aggregates.estimate(tasks, statistic)
    np.testing.assert_allclose(found.interval, _exact(tasks, statistic), atol=0.11)
    assert found == aggregates.estimate(tasks, statistic)  # the same resamples again


def test_runs_are_resampled_within_their_task(aggregates):
    found = aggregates.estimate([[0.0, 0.0, 0.0], [100.0, 100.0, 100.0]])
    assert (found.value, found.interval) == (50.0, (50.0, 50.0))


def test_an_interval_of_two_or_three_runs_is_their_range_and_one_run_has_none(aggregates):
    assert aggregates.estimate([[3.0, 7.0]]).interval == (3.0, 7.0)
    assert aggregates.estimate([[3.0, 4.0, 7.0]]).interval == (3.0, 7.0)
    assert aggregates.estimate([[3.0], [5.0]]) == aggregates.Estimate(4.0, None)


def test_intervals_hold_the_mean_about_as_often_as_they_say(aggregates, monkeypatch):
    monkeypatch.setattr(aggregates, "_RESAMPLES", 500)
    draws = np.random.default_rng(0).normal(3.0, 2.0, (300, 30))
    held = [low <= 3.0 <= high for low, high in (aggregates.estimate([d]).interval for d in draws)]
    assert 0.90 < np.mean(held) < 0.98


@pytest.mark.parametrize("tasks", [[], [[]], [[1.0], [1.0, 2.0]]])
def test_tasks_without_as_many_runs_are_refused(aggregates, tasks):
    with pytest.raises(ValueError, match="expected as many runs of each task"):
        aggregates.estimate(tasks)


def test_students_interval(aggregates):
    known = aggregates.Sample(-177.0, 6.0, 3)
    # 4.302653 is the 97.5th percentile of Student's t with two degrees of freedom.
    assert known.student_interval() == pytest.approx((-177 - 25.815916, -177 + 25.815916))
    assert aggregates.sample([2.0]).student_interval() is None
    found = aggregates.sample([1.0, 2.0, 6.0])
    assert (found.mean, found.runs) == (3.0, 3)
    assert found.standard_error == pytest.approx(math.sqrt(7.0 / 3.0))


def test_equal_means_are_judged_by_welch(aggregates):
    one, other = [1.0, 2.0, 4.0, 4.5], [3.0, 7.0, 8.0]
    p = aggregates.p_of_equal_means(aggregates.sample(one), aggregates.sample(other))
    assert p == pytest.approx(stats.ttest_ind(one, other, equal_var=False).pvalue)


def test_equal_means_where_nothing_varies(aggregates):
    def p(one, other):
        return aggregates.p_of_equal_means(aggregates.sample(one), aggregates.sample(other))

    assert p([1.0, 1.0], [1.0, 1.0]) == 1.0
    assert p([1.0, 1.0], [0.9, 0.9]) == 0.0
    assert p([1.0], [0.9, 0.9]) is None
    assert 0.05 < p([500.0, 500.0, 500.0], [500.0, 499.0, 500.0]) < 1.0


def test_probability_of_improvement_counts_pairs(aggregates):
    # Of six pairs, four are won and one is a tie.
    one, other = [1.0, 3.0, 4.0], [1.0, 2.0]
    assert aggregates.improvement([(one, other)]).value == pytest.approx(4.5 / 6)
    assert aggregates.improvement([([2.0], [2.0])]) == aggregates.Estimate(0.5, None)
    found = aggregates.improvement([(one, other), ([0.0, 1.0], [5.0, 5.0])])
    assert found.value == pytest.approx(4.5 / 12)

    def chance(one, other):
        return np.mean([1.0 if a > b else 0.5 * (a == b) for a in one for b in other])

    np.testing.assert_allclose(found.interval, _exact([one, other], chance) / 2, atol=0.03)


def test_a_performance_profile_is_the_share_of_runs_above_each_score(aggregates):
    tasks = [[0.0, 0.5, 1.0], [0.5, 0.5, 2.0]]
    scores = np.array([-1.0, 0.0, 0.5, 1.5, 3.0])
    profile = aggregates.performance_profile(tasks, scores)
    np.testing.assert_allclose(profile.value, [1, 5 / 6, 2 / 6, 1 / 6, 0])
    for place, score in enumerate(scores):
        above = [np.array(runs) > score for runs in tasks]
        exact = _exact(above, lambda *each: np.mean(each))
        np.testing.assert_allclose([end[place] for end in profile.interval], exact, atol=0.17)
    assert aggregates.performance_profile([[1.0], [0.0, 2.0]], scores).interval is None
