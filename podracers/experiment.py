"""An experiment: an agent, an environment and a runner, and how long they run. gin's one root."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from podracers import agent as agent_lib
from podracers import config, errors, evaluation
from podracers import environment as environment_lib
from podracers import runner as runner_lib

_LEAST = {
    "total_steps": 1,
    "log_period": 1,
    "evaluation_episodes": 1,
    "keep_latest": 1,
    "evaluation_period": 0,
    "checkpoint_period": 0,
    "keep_best": 0,
}


class Parts(NamedTuple):
    """What an experiment is made of, built."""

    environment: environment_lib.Environment
    agent: agent_lib.Agent
    runner: runner_lib.Runner
    evaluator: evaluation.Evaluator
    num_updates: int  # how many updates make `total_steps`


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Experiment:
    """Everything a run needs, resolved before anything is compiled. Periods count updates.

    Attributes:
      agent: a class, called with `spec=`.
      environment: a class, called without arguments.
      runner: a class, called with `agent=` and `environment=`.
      seed: of everything that is random.
      total_steps: agent steps over all environments; rounded up to whole updates.
      log_period: updates between two log lines; one dispatch of the runner.
      evaluation_period: updates between evaluations; 0 for one at the end only.
      evaluation_episodes: how many first episodes each evaluation averages.
      evaluation_max_steps: where an evaluated episode is cut; None for the environment's limit.
      checkpoint_period: updates between checkpoints, besides those at every evaluation and at the
        end; 0 for those alone.
      keep_latest: how many of the newest checkpoints to keep.
      keep_best: how many of those with the best evaluations to keep besides.
    """

    agent: Callable[..., agent_lib.Agent]
    environment: Callable[[], environment_lib.Environment]
    runner: Callable[..., runner_lib.Runner]
    seed: int
    total_steps: int
    log_period: int = 10
    evaluation_period: int = 0
    evaluation_episodes: int = 64
    evaluation_max_steps: int | None = None
    checkpoint_period: int = 0
    keep_latest: int = 3
    keep_best: int = 1

    def __post_init__(self):
        for name, least in _LEAST.items():
            value = getattr(self, name)
            # `1e6` is how people write a million steps.
            if isinstance(value, float) and value.is_integer():
                object.__setattr__(self, name, int(value))
            elif not isinstance(value, int) or isinstance(value, bool):
                raise errors.UserError(f"Experiment.{name}: expected an integer, got {value!r}")
            if getattr(self, name) < least:
                raise errors.UserError(
                    f"Experiment.{name}: expected at least {least}, got {value!r}"
                )
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**31:
            raise errors.UserError(
                f"Experiment.seed: expected an integer in [0, 2**31), got {self.seed!r}"
            )
        for name in ("agent", "environment", "runner"):
            if not callable(getattr(self, name)):
                raise errors.UserError(
                    f"Experiment.{name}: expected a class, uncalled (`@module.Name`), got "
                    f"{getattr(self, name)!r}"
                )

    def build(self) -> Parts:
        """Builds the parts; nothing is compiled yet.

        Raises:
          errors.UserError: a part refuses its settings, or the parts do not fit.
        """
        environment = _make("environment", self.environment)
        if not hasattr(environment, "spec"):
            raise errors.UserError(
                f"Experiment.environment: {type(environment).__name__} is not an environment (it "
                "has no `spec`)"
            )
        agent = _make("agent", self.agent, spec=environment.spec)
        runner = _make("runner", self.runner, agent=agent, environment=environment)
        evaluator = evaluation.Evaluator(
            agent,
            environment,
            self.evaluation_episodes,
            runner.population,
            self.evaluation_max_steps,
        )
        num_updates = -(-self.total_steps // runner.steps_per_update)
        return Parts(environment, agent, runner, evaluator, num_updates)


def load(gin_files, gin_bindings) -> Experiment:
    """Returns the experiment that .gin files and bindings describe (see `config.parse`)."""
    config.parse(gin_files, gin_bindings, Experiment)
    values = config.bindings(Experiment)
    missing = [
        field.name
        for field in dataclasses.fields(Experiment)
        if field.default is dataclasses.MISSING and field.name not in values
    ]
    if missing:
        names = ", ".join(f"Experiment.{name}" for name in missing)
        raise errors.UserError(f"no value for {names}: bind it in a .gin file or a binding")
    return config.call(Experiment)


def _make(part: str, make: Callable, **arguments):
    """Builds a part; what its constructor refuses is a mistake of the user."""
    try:
        return make(**arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        name = getattr(make, "__name__", repr(make))
        message = config.first_line(error)
        shown = message if isinstance(error, errors.UserError) else f"{part} {name}: {message}"
        raise errors.UserError(shown) from error
