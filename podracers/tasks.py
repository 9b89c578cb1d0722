"""Families of environments with one program and different parameters, which are arguments.

The parameters of an `Environment` are fixed when it is constructed. In meta-learning and curricula,
each stream of a batch has its own parameters, which are sampled, carried and batched like a state.

Axis legend: `E` environments with the same parameters, `F` rows, `A` actions.
"""

from typing import Any, Protocol, runtime_checkable

import jax

from podracers import environment, types

ROWS = "rows"  # [F] int32, rows of a table whose sum describes the state; see `TaskFamily`

# Observation entries of `environments.meta.lifetimes.Lifetimes`, besides rows and action mask.
REWARD = "reward"  # [E] float32
DISCOUNT = "discount"  # [E] float32
STEP_TYPE = "step_type"  # [E] int8
TASK = "task"  # int32, index of the kind of task


@runtime_checkable
class TaskFamily(Protocol):
    """Environments of one stream each, without auto-reset, with equal shapes.

    Observations are dicts. `ROWS` holds `F` rows of a table, whose sum is a tabular agent's output:
    one row is a plain table, several are a linear function of binary features. The row number
    `spec.observation[ROWS].maximum`, one past the table, denotes no row.
    `environment.ACTION_MASK` is `[A]`.
    """

    @property
    def spec(self) -> environment.EnvironmentSpec:
        """The shapes of all tasks; `max_episode_steps` is the longest task's."""

    @property
    def task_names(self) -> tuple[str, ...]:
        """The names of the kinds of tasks."""

    def sample(self, key: jax.Array) -> Any:
        """Samples the parameters of a task; all kinds are equally likely."""

    def task(self, params: Any) -> jax.Array:
        """Returns the index of the task's kind in `task_names`, an int32 scalar."""

    def reset(self, params: Any, key: jax.Array) -> tuple[Any, types.TimeStep]:
        """Starts an episode."""

    def step(self, params: Any, state: Any, action: jax.Array) -> tuple[Any, types.TimeStep]:
        """Advances one step; results after the end of an episode are discarded."""

    def optimal_return(self, params: Any) -> float:
        """Returns the highest expected undiscounted return of an episode; on the host."""
