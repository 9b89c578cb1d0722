"""Families of environments that are one program, and differ by parameters, which are arguments.

`Environment` fixes its parameters when it is built. Where every stream of a batch has parameters of
its own, as in meta-learning and curricula, they have to be data: drawn, carried and batched like a
state.

Axis legend: `E` environments with the same parameters, `F` rows, `A` actions.
"""

from typing import Any, Protocol, runtime_checkable

import jax

from podracers import environment, types

ROWS = "rows"  # [F] int32, rows of a table whose sum describes the state; see `TaskFamily`

# Observation entries of `environments.meta.lifetimes.Lifetimes`, beside rows and action mask.
REWARD = "reward"  # [E] float32
DISCOUNT = "discount"  # [E] float32
STEP_TYPE = "step_type"  # [E] int8
TASK = "task"  # int32, which of the kinds of tasks it is


@runtime_checkable
class TaskFamily(Protocol):
    """Environments of one stream each, without auto-reset, that share shapes.

    Observations are dicts. `ROWS` holds `F` rows of a table: a tabular agent adds up what stands
    there, so one row is a plain table, and several are a linear function of binary features. A row
    beyond the table (its number is `spec.observation[ROWS].maximum`) stands for none at all.
    `environment.ACTION_MASK` is `[A]`.
    """

    @property
    def spec(self) -> environment.EnvironmentSpec:
        """The shapes of every task of the family; `max_episode_steps` is that of the longest."""

    @property
    def task_names(self) -> tuple[str, ...]:
        """The names of the kinds of tasks."""

    def sample(self, key: jax.Array) -> Any:
        """Draws the parameters of a task; each kind is equally likely."""

    def task(self, params: Any) -> jax.Array:
        """Returns which of `task_names` it is, an int32 scalar."""

    def reset(self, params: Any, key: jax.Array) -> tuple[Any, types.TimeStep]:
        """Starts an episode."""

    def step(self, params: Any, state: Any, action: jax.Array) -> tuple[Any, types.TimeStep]:
        """Advances one step; what it returns for a state whose episode ended is thrown away."""

    def optimal_return(self, params: Any) -> float:
        """Returns the highest expected undiscounted return of an episode; on the host."""
