"""Statistics over a few runs: means, bootstrap intervals over tasks x runs, tests of equal means.

After Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice",
https://arxiv.org/abs/2108.13264: scores are resampled with replacement within each task (stratified
bootstrap); a 95% interval spans the 2.5th to the 97.5th percentile of the resampled statistic. The
authors' package rliable 1.2.0 does not import with current releases of its dependencies.

`R` runs of a task.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

MIN_TASKS = 3  # fewer tasks have no mean over tasks
_LEVEL = 0.95
_RESAMPLES = 10_000
_TRIMMED = 0.25  # share of the scores at either end

Interval = tuple[Any, Any] | None  # None if a task has one run


def interquartile_mean(*tasks: np.ndarray, axis: int = -1) -> np.ndarray:
    """Returns the mean of the middle half of all runs of all tasks."""
    return stats.trim_mean(np.concatenate(tasks, axis=axis), _TRIMMED, axis=axis)


def bootstrap(
    tasks: Sequence[Sequence[Any]], statistic: Callable[..., np.ndarray]
) -> tuple[Any, Interval]:
    """Returns a statistic over tasks and runs, with its stratified bootstrap interval.

    Scores are `[R]`, or `[R, K]` for `K` statistics, of each task; `R` may differ. The statistic
    takes the scores of each task, and `axis`.
    """
    arrays = [np.asarray(scores, float) for scores in tasks]
    value = statistic(*arrays, axis=0)
    if any(len(array) == 1 for array in arrays):
        return value, None
    interval = stats.bootstrap(
        arrays,
        statistic,
        n_resamples=_RESAMPLES,
        vectorized=True,
        axis=0,
        confidence_level=_LEVEL,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return value, (interval.low, interval.high)


class Sample(NamedTuple):
    """Summary of the runs of one task, or of `K` points of them."""

    mean: Any  # float, or `[K]`
    standard_error: Any  # standard error of the mean; NaN with one run
    runs: int  # how many

    @classmethod
    def of(cls, scores: Sequence[float] | np.ndarray) -> "Sample":
        """Returns the summary of scores, `[R]` or `[R, K]`."""
        runs = len(scores)
        error = np.std(scores, axis=0, ddof=1) / math.sqrt(runs) if runs > 1 else math.nan
        return cls(np.mean(scores, axis=0), error, runs)

    def interval(self) -> Interval:
        """Returns Student's 95% interval of the mean."""
        if self.runs < 2:
            return None
        width = stats.t.ppf((1 + _LEVEL) / 2, self.runs - 1) * self.standard_error
        return self.mean - width, self.mean + width


def p_of_equal_means(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Returns the p-value of Welch's t-test; None if a sample has one run.

    If neither sample varies it is 1.0 for equal means, and 0.0 for different ones.
    """
    if min(len(one), len(other)) < 2:
        return None
    if np.ptp(one) == np.ptp(other) == 0.0:
        return float(one[0] == other[0])
    return float(stats.ttest_ind(one, other, equal_var=False).pvalue)
