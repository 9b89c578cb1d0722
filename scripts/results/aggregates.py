"""How sure a mean over few runs is: bootstrap intervals over tasks x runs, and a test of agreement.

After Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice",
https://arxiv.org/abs/2108.13264: scores are resampled with replacement within each task (stratified
bootstrap), and a 95% interval goes from the 2.5th to the 97.5th percentile of what the resamples
reach. scipy does the resampling, which JAX needs anyway. The authors' package is not used: rliable
1.2.0 brings arch and statsmodels, and does not import with the releases that pip now puts beside it
(arch 7.2.0, statsmodels 0.15.0). Where it was made to run, it gave the same intervals, up to the
chance of resampling.

`N` tasks, `R` runs of each.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import stats

LEVEL = 0.95
_RESAMPLES = 10_000
_PROFILE_RESAMPLES = 2_000  # as the authors take for profiles
_TRIMMED = 0.25  # of the scores at either end


def mean(*tasks: np.ndarray, axis: int = -1) -> np.ndarray:
    """Returns the mean over tasks of the mean over runs."""
    return np.mean([np.mean(runs, axis) for runs in tasks], axis=0)


def median(*tasks: np.ndarray, axis: int = -1) -> np.ndarray:
    """Returns the median over tasks of the mean over runs."""
    return np.median([np.mean(runs, axis) for runs in tasks], axis=0)


def interquartile_mean(*tasks: np.ndarray, axis: int = -1) -> np.ndarray:
    """Returns the mean of the middle half of all runs of all tasks."""
    return stats.trim_mean(np.concatenate(tasks, axis=axis), _TRIMMED, axis=axis)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A statistic, and between which values it is likely to lie: None where a task has one run."""

    value: Any  # a number, or several, `[K]`
    interval: tuple[Any, Any] | None


def estimate(
    tasks: Sequence[Sequence[float]],
    statistic: Callable[..., np.ndarray] = mean,
    seed: int = 0,
) -> Estimate:
    """Returns a statistic over tasks and runs, with its stratified bootstrap interval.

    Args:
      tasks: scores, `[N, R]`; normalised, where there are several tasks.
      statistic: takes the scores of each task, `[..., R]`, and `axis`.
      seed: seed of the resampling.

    Raises:
      ValueError: there is no score, or tasks have different numbers of runs.
    """
    runs = {len(scores) for scores in tasks}
    if len(runs) != 1 or 0 in runs:
        raise ValueError(f"expected as many runs of each task, at least 1, got {sorted(runs)}")
    return _resampled([np.asarray(scores, float) for scores in tasks], statistic, seed)


def _resampled(
    arrays: Sequence[np.ndarray],
    statistic: Callable[..., np.ndarray],
    seed: int = 0,
    resamples: int = _RESAMPLES,
) -> Estimate:
    """Returns a statistic of arrays, `[..., R]`, each of which is resampled along its last axis."""
    value = statistic(*arrays)
    if any(array.shape[-1] == 1 for array in arrays):
        return Estimate(value, None)
    found = stats.bootstrap(
        arrays,
        statistic,
        n_resamples=resamples,
        vectorized=True,
        axis=-1,
        confidence_level=LEVEL,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Estimate(value, (found.low, found.high))


def improvement(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Estimate:
    """Returns how likely a run of one algorithm is to beat one of another: the mean over tasks.

    Args:
      pairs: the scores of both, `[R]` and `[R']`, for each task; ties count half.
    """

    def statistic(*arrays: np.ndarray, axis: int = -1) -> np.ndarray:
        del axis  # the last one
        halves = zip(arrays[::2], arrays[1::2])
        signs = [np.sign(one[..., :, None] - other[..., None, :]) for one, other in halves]
        return np.mean([0.5 + 0.5 * sign.mean((-2, -1)) for sign in signs], axis=0)

    return _resampled([np.asarray(runs, float) for pair in pairs for runs in pair], statistic)


def performance_profile(tasks: Sequence[Sequence[float]], scores: np.ndarray) -> Estimate:
    """Returns the share of runs above each score, `[K]`, as the mean over tasks.

    Args:
      tasks: normalised scores of each task, `[R]`; `R` may differ.
      scores: `[K]`.
    """
    above = [np.asarray(runs, float) > scores[:, None] for runs in tasks]  # [K, R] of each task
    return _resampled(above, mean, resamples=_PROFILE_RESAMPLES)


def summarize(tasks: Sequence[Sequence[float]]) -> dict[str, Estimate]:
    """Returns the statistics over tasks and runs, `[N, R]`, by name."""
    statistics = {"mean": mean, "median": median, "interquartile mean": interquartile_mean}
    return {name: estimate(tasks, statistic) for name, statistic in statistics.items()}


@dataclasses.dataclass(frozen=True)
class Sample:
    """What is known of the runs of one task: enough where only their summary is."""

    mean: float  # over runs
    standard_error: float  # of the mean; NaN with one run
    runs: int  # how many

    def student_interval(self) -> tuple[float, float] | None:
        """Returns the interval of Student's t for the mean; None with one run."""
        if self.runs < 2:
            return None
        width = float(stats.t.ppf((1 + LEVEL) / 2, self.runs - 1)) * self.standard_error
        return self.mean - width, self.mean + width


def sample(scores: Sequence[float]) -> Sample:
    """Returns the summary of the runs of one task."""
    runs = len(scores)
    error = float(np.std(scores, ddof=1)) / math.sqrt(runs) if runs > 1 else math.nan
    return Sample(float(np.mean(scores)), error, runs)


def p_of_equal_means(one: Sample, other: Sample) -> float | None:
    """Returns the p-value of Welch's t-test; None where a sample has one run.

    Where neither sample varies it is 1.0 for equal means, and 0.0 for different ones.
    """
    if min(one.runs, other.runs) < 2:
        return None
    if one.standard_error == other.standard_error == 0.0:
        return float(one.mean == other.mean)
    deviations = [math.sqrt(each.runs) * each.standard_error for each in (one, other)]
    tested = stats.ttest_ind_from_stats(
        one.mean, deviations[0], one.runs, other.mean, deviations[1], other.runs, equal_var=False
    )
    return float(tested.pvalue)
