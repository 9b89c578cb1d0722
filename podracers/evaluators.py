"""Chooses the evaluator that suits an environment."""

from podracers import agent as agent_lib
from podracers import environment as environment_lib
from podracers import evaluation


def make(
    agent: agent_lib.Agent,
    environment: environment_lib.Environment | environment_lib.HostEnvironmentFactory,
    num_episodes: int,
    population: int = 1,
    max_steps: int | None = None,
) -> evaluation.Evaluator:
    """Returns an evaluator with `run(params, key) -> Episodes` (see `evaluation.Evaluator`)."""
    return evaluation.Evaluator(agent, environment, num_episodes, population, max_steps)
