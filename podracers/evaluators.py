"""Chooses the evaluator that suits an environment."""

from typing import Any

import jax
import numpy as np

from podracers import agent as agent_lib
from podracers import environment as environment_lib
from podracers import errors, evaluation, host_evaluation, types, video

Evaluator = evaluation.Evaluator | host_evaluation.HostEvaluator


def make(
    agent: agent_lib.Agent,
    environment: environment_lib.Environment | environment_lib.HostEnvironmentFactory,
    num_episodes: int | None = None,
    population: int = 1,
    max_steps: int | None = None,
    timeout: float | None = None,
) -> Evaluator:
    """Returns an evaluator (see `evaluation.Evaluator`).

    Its `run(params, key, stop)` returns episodes, or raises `evaluation.Stopped` soon after
    `stop()` became true, if it can stop. `timeout` is that of `host_evaluation.HostEvaluator`. None
    stands for the evaluator's own defaults.
    """
    options = {"num_episodes": num_episodes, "max_steps": max_steps}
    if not environment_lib.is_host(environment):
        return evaluation.Evaluator(agent, environment, population=population, **_given(**options))
    if population != 1:
        raise errors.UserError(
            f"{environment.spec.name} is stepped on the host, by one member: population = 1, got "
            f"{population}"
        )
    return host_evaluation.HostEvaluator(agent, environment, **_given(**options, timeout=timeout))


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def record(
    agent: agent_lib.Agent,
    environment: environment_lib.Environment | environment_lib.HostEnvironmentFactory,
    params: types.PyTree,
    key: jax.Array,
    max_steps: int | None = None,
) -> list[Any]:
    """Plays one episode and returns what `environment.render` takes, one for each moment of it.

    Args:
      agent: who acts.
      environment: what it acts in.
      params: of one member.
      key: of the episode: that of an evaluation gives the first of its episodes.
      max_steps: where to stop; None for the environment's own limit.
    """
    module = host_evaluation if environment_lib.is_host(environment) else evaluation
    return module.record(agent, environment, params, key, max_steps)


def film(
    agent: agent_lib.Agent,
    environment: environment_lib.Environment | environment_lib.HostEnvironmentFactory,
    params: types.PyTree,
    key: jax.Array,
    max_steps: int | None = None,
) -> list[np.ndarray]:
    """Plays the episode of `record`, and returns its pictures, uint8 `[height, width, 3]`.

    Raises:
      errors.UserError: the environment cannot be drawn.
    """
    if not hasattr(environment, "render") and hasattr(environment, "filmed"):
        return host_evaluation.film(agent, environment, params, key, max_steps)
    video.require(environment)
    moments = record(agent, environment, params, key, max_steps)
    return [environment.render(moment) for moment in moments]
