"""Metrics on the device: mergeable means, episode statistics, and a check for NaN.

Axis legend: `P` population (absent where it is 1), `B` streams.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracers import environment, parallel, types

NEVER = 2**31 - 1  # replaces the index of an update: the metric was always finite
OBSERVATION = "an observation is NaN or infinite"  # a fault only where it reaches a metric
FAULTS = (*types.RULES, OBSERVATION)


class Report(NamedTuple):
    """Metrics over several updates, which a runner returns."""

    means: dict[str, types.Mean]
    first_nonfinite: dict[str, jax.Array]  # int32: the first update whose metric was not finite
    first_fault: jax.Array  # int32 [R]: the first update whose rollout had each of `FAULTS`

    def record(self) -> dict[str, Any]:
        """Returns the report as JSON can hold it."""
        return jax.tree.map(lambda x: np.asarray(x).tolist(), self._asdict())

    @classmethod
    def recorded(cls, record: Mapping[str, Any]) -> "Report":
        """Returns the report of a `record`, bit for bit."""
        array: Any = np.asarray
        means = {
            name: types.Mean(array(total, np.float32), array(count, np.float32))
            for name, (total, count) in record["means"].items()
        }
        first = {name: array(x, np.int32) for name, x in record["first_nonfinite"].items()}
        return cls(means, first, array(record["first_fault"], np.int32))


class Diagnostics(NamedTuple):
    """Timings on the host since the previous call, and the bottleneck."""

    values: dict[str, float]  # keys are names in the log
    verdict: str  # one line on the bottleneck; empty if it is unknown


def of_update(
    means: dict[str, types.Mean], timestep: types.TimeStep, update: jax.Array, players: int = 1
) -> Report:
    """Returns the report of one update, whose rollout has the time steps `[T + 1, B]`."""

    def first(is_bad: jax.Array) -> jax.Array:
        return jnp.where(is_bad, update.astype(jnp.int32), NEVER)

    # The first row is the last one of the previous rollout, or the first reset.
    begins = timestep.first()[:1] | (update == 0)
    fresh = jnp.concatenate([begins, timestep.last()[:-1]])
    faults = list(types.broken_rules(timestep, fresh, players).values())
    # Without states of environments, which may have infinite numbers.
    parts = jax.tree.leaves(environment.without_state(timestep.observation))
    parts = [part for part in parts if jnp.issubdtype(part.dtype, jnp.inexact)]
    faults += [jnp.array([jnp.any(~jnp.isfinite(part)) for part in parts])]
    return Report(
        means,
        {name: first(~jnp.isfinite(mean.total)) for name, mean in means.items()},
        first(jnp.stack([jnp.any(fault) for fault in faults])),
    )


def empty(shapes: Report) -> Report:
    """Returns the report of no update, on the host, for metrics of these names and shapes."""
    means, *firsts = shapes
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), means)
    never = jax.tree.map(lambda x: np.full(x.shape, NEVER, np.int32), firsts)
    return Report(zeros, *never)


@jax.jit  # one program, in place of one for each number
def merge(report: Report, other: Report) -> Report:
    """Returns the report over the updates of both."""
    return Report(
        jax.tree.map(jnp.add, report.means, other.means),
        *jax.tree.map(jnp.minimum, report[1:], other[1:]),
    )


def sum_over_devices(report: Report) -> Report:
    """Returns the report of all devices; runs under the mapped axis, once per fetch."""
    return Report(parallel.global_sum(report.means), *jax.lax.pmin(report[1:], parallel.AXIS))


class EpisodeStatistics(NamedTuple):
    """Running episodes, and episodes ended since the last `flush`; all `[B]` float32."""

    running_return: jax.Array
    running_length: jax.Array  # agent steps
    ended_return: jax.Array  # sum over ended episodes
    ended_length: jax.Array  # sum over ended episodes
    ended: jax.Array  # number of ended episodes
    # Over ended episodes, by name, without those whose number is NaN; none after `flush`, so
    # checkpoints do not depend on them.
    ended_metrics: dict[str, types.Mean]

    @classmethod
    def init(cls, num_streams: int) -> "EpisodeStatistics":
        """Returns the statistics of `B` streams that have just begun."""
        names = cls._fields[:-1]
        zeros = {name: jnp.zeros((num_streams,), jnp.float32) for name in names}
        return cls(**zeros, ended_metrics={})

    def with_metrics(self, names: Iterable[str]) -> "EpisodeStatistics":
        """Returns the statistics that also add up the metrics of these names."""
        zero = types.Mean(jnp.zeros_like(self.ended), jnp.zeros_like(self.ended))
        return self._replace(ended_metrics=dict.fromkeys(names, zero) | self.ended_metrics)

    def track(self, timestep: types.TimeStep) -> "EpisodeStatistics":
        """Adds one time step `[B]`; rewards are the environment's own, never clipped."""
        first, is_last = timestep.first(), timestep.last()
        last = is_last.astype(jnp.float32)
        running_return = jnp.where(first, 0.0, self.running_return + timestep.reward)
        running_length = jnp.where(first, 0.0, self.running_length + 1.0)
        return EpisodeStatistics(
            running_return=running_return,
            running_length=running_length,
            ended_return=self.ended_return + last * running_return,
            ended_length=self.ended_length + last * running_length,
            ended=self.ended + last,
            ended_metrics={
                name: mean.merge(_present(timestep.metrics[name], is_last))
                for name, mean in self.ended_metrics.items()
            },
        )

    def track_rollout(self, timestep: types.TimeStep) -> "EpisodeStatistics":
        """Adds the time steps `[T + 1, B]` of a rollout; the first of them was added before.

        If that is FIRST, the episode starts again, as after the restart of a simulator.
        """
        first = timestep.step_type[0] == types.FIRST
        began = self._replace(
            running_return=jnp.where(first, 0.0, self.running_return),
            running_length=jnp.where(first, 0.0, self.running_length),
        )
        # Without observations, which a scan would copy.
        arrived = jax.tree.map(lambda x: x[1:], timestep._replace(observation=()))
        ended, _ = jax.lax.scan(lambda carry, x: (carry.track(x), None), began, arrived)
        return ended

    def flush(self) -> tuple["EpisodeStatistics", dict[str, types.Mean]]:
        """Returns the metrics of the episodes that ended, and the statistics without them."""
        ended = jnp.sum(self.ended)
        totals = {"return": self.ended_return, "length": self.ended_length}
        means = {f"episode/{name}": types.Mean(jnp.sum(x), ended) for name, x in totals.items()}
        for name, mean in self.ended_metrics.items():
            means[f"episode/{name}"] = jax.tree.map(jnp.sum, mean)
        zero = jnp.zeros_like(self.ended)
        flushed = self._replace(ended_return=zero, ended_length=zero, ended=zero, ended_metrics={})
        return flushed, means


def _present(metric: jax.Array, is_last: jax.Array) -> types.Mean:
    """Returns the numbers `[B]` of episodes that end, without NaN: such an episode has none."""
    counts = is_last & ~jnp.isnan(metric)
    return types.Mean(jnp.where(counts, metric, 0.0), counts.astype(jnp.float32))


def label(name: str, values: np.ndarray, seeds: Sequence[int]) -> dict[str, float]:
    """Returns the logged values of a metric, a scalar or `[P]` with the members' seeds.

    These are `{name: value}`, or `name` and `name/std` over the members that have a value, and
    `name/seed_<seed>` of each member.
    """
    if not seeds:
        return {name: float(values)}
    present = values[~np.isnan(values)]
    mean, std = (np.mean(present), np.std(present)) if present.size else (math.nan, math.nan)
    logged = {name: float(mean), f"{name}/std": float(std)}
    return logged | {f"{name}/seed_{seed}": float(v) for seed, v in zip(seeds, values)}


def summarize(means: dict[str, types.Mean], seeds: Sequence[int]) -> dict[str, float]:
    """Returns fetched metrics as they are logged (see `label`); NaN where nothing was counted."""
    logged = {}
    for name, (total, count) in means.items():
        value = np.where(count > 0.0, total / np.maximum(count, 1e-30), math.nan)
        logged |= label(name, value, seeds)
    return logged
