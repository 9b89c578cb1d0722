"""An experiment: an agent, an environment and a runner, and how long they run. gin's one root."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from podracers import agent as agent_lib
from podracers import environment as environment_lib
from podracers import errors, evaluation, precision, types
from podracers import runner as runner_lib
from podracers.training import check as check_lib
from podracers.training import config, storage, weights_and_biases

_SUPPLIED = {"spec", "agent", "environment"}  # what parts are built with, by name
_LEAST = {
    "total_steps": 1,
    "log_period": 1,
    "evaluation_episodes": 1,
    "greedy_evaluation_episodes": 0,
    "evaluation_max_steps": 1,
    "keep_latest": 1,
    "evaluation_period": 0,
    "checkpoint_period": 0,
    "keep_best": 0,
    "profile_update": 0,
}
_OPTIONAL = (
    "evaluation_episodes",
    "greedy_evaluation_episodes",
    "evaluation_max_steps",
    "profile_update",
)
_NOW = object()

RunnerClass = Callable[..., runner_lib.Runner]


class Parts(NamedTuple):
    """What an experiment is made of, built."""

    environment: environment_lib.Environment | environment_lib.HostEnvironmentFactory
    agent: agent_lib.Agent
    runner: runner_lib.Runner
    evaluator: evaluation.Evaluator
    greedy_evaluator: evaluation.Evaluator | None  # None where `evaluator` is greedy, or not wanted
    num_updates: int  # how many updates make `total_steps`

    def evaluate(
        self,
        params: types.PyTree,
        key: jax.Array,
        stop: Callable[[], bool] = lambda: False,
        share: tuple[int, int] = (0, 1),
    ) -> evaluation.Evaluation:
        """Returns what both evaluators find with one key; see `evaluation.Evaluator.run`."""
        episodes = self.evaluator.run(params, key, stop, share)
        greedy = self.greedy_evaluator
        return evaluation.Evaluation(episodes, greedy and greedy.run(params, key, stop, share))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Experiment:
    """Everything a run needs, resolved before anything is compiled. Periods count updates.

    Attributes:
      agent: a class, called with `spec=`.
      environment: a class, called without arguments: a JAX environment, or a factory of host
        environments (`environment.HostEnvironmentFactory`).
      runner: a class, called with `agent=` and `environment=`; or two, for environments in JAX and
        for those on the host.
      seed: seed of everything that is random.
      total_steps: agent steps over all environments; rounded up to whole updates.
      log_period: updates between two log lines; one dispatch of the runner.
      evaluation_period: updates between evaluations; 0 for one at the end only.
      evaluation_episodes: number of first episodes that each evaluation averages; None for 512 of a
        JAX environment, which plays them all at once, or 64 of one on the host.
      greedy_evaluation_episodes: number of episodes of the same evaluation that are played again,
        greedily, where the agent's evaluations sample (`greedy_evaluation`); None for all of them,
        0 for none, as where episodes are costly.
      evaluation_max_steps: agent steps after which an evaluated episode is cut; None for the
        environment's limit.
      checkpoint_period: updates between checkpoints, besides those at every evaluation and at the
        end; 0 for those alone.
      checkpoint_directory: an absolute path, or `gs://BUCKET/FOLDER`, for the checkpoints of this
        run alone. Every process has to see it, and writes its own part. None for `checkpoints` in
        the run directory, which process 0 writes.
      checkpoint_replay: whether checkpoints hold replay; without it they are small, and a run that
        is resumed begins with an empty one.
      keep_latest: number of the newest checkpoints to keep.
      keep_best: number of those with the best evaluations to keep besides.
      profile_update: the log period that this update is in is traced for the JAX profiler, into
        `profile` in the run directory; not the first period, which compiles. None for no trace.
      tracker: a service that a run is sent to besides: `@WeightsAndBiases()`; None for none.
      matmul_precision: of the agent's matrix products and convolutions, "default", "high" or
        "highest"; None for JAX's own default (see `precision.Precision`).
      compute_dtype: of its networks' encoders and cores, "float32" or "bfloat16"; parameters, heads
        and losses are float32.
    """

    agent: Callable[..., agent_lib.Agent]
    environment: Callable[[], environment_lib.Environment | environment_lib.HostEnvironmentFactory]
    runner: RunnerClass | tuple[RunnerClass, RunnerClass]
    seed: int
    total_steps: int | float  # `1e9` is how people write a billion; it becomes an int
    log_period: int = 10
    evaluation_period: int = 0
    evaluation_episodes: int | None = None
    greedy_evaluation_episodes: int | None = None
    evaluation_max_steps: int | None = None
    checkpoint_period: int = 0
    checkpoint_directory: str | None = None
    checkpoint_replay: bool = True
    keep_latest: int = 3
    keep_best: int = 1
    profile_update: int | None = None
    tracker: weights_and_biases.WeightsAndBiases | None = None
    matmul_precision: str | None = None
    compute_dtype: str = "float32"
    # What gin holds now: gin makes the parts, and they read it when they are built. A copy that
    # `dataclasses.replace` makes is of the same configuration.
    _state: dataclasses.InitVar[config.State] = _NOW

    def __post_init__(self, _state):
        object.__setattr__(self, "_state", config.snapshot() if _state is _NOW else _state)
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            # `1e6` is how people write a million steps.
            if isinstance(value, float) and value.is_integer():
                value = int(value)
                object.__setattr__(self, name, value)
            if name == "total_steps" and isinstance(value, int) and value > errors.INT32_MAX:
                continue  # the updates are counted on the device, not the agent steps
            errors.require_count(self, name, least)
        errors.require_count(self, "seed", 0)
        _ = self.precision  # which refuses names that do not exist
        if self.checkpoint_directory is not None:
            storage.check("Experiment.checkpoint_directory", self.checkpoint_directory)
        if not isinstance(self.checkpoint_replay, bool):
            raise errors.UserError(
                "Experiment.checkpoint_replay: expected True or False, got "
                f"{self.checkpoint_replay!r}"
            )
        if not isinstance(self.tracker, weights_and_biases.WeightsAndBiases | None):
            raise errors.UserError(
                f"Experiment.tracker: expected @WeightsAndBiases() or None, got {self.tracker!r}"
            )
        for name in ("agent", "environment", "runner"):
            value = getattr(self, name)
            classes = value if name == "runner" and isinstance(value, tuple) else (value,)
            if not all(map(callable, classes)):
                raise errors.UserError(
                    f"Experiment.{name}: expected a class, uncalled (`@module.Name`), got {value!r}"
                )
        if isinstance(self.runner, tuple) and len(self.runner) != 2:
            raise errors.UserError(
                "Experiment.runner: expected one class, or two, for environments in JAX and for "
                f"those on the host, got {len(self.runner)}"
            )

    @property
    def precision(self) -> precision.Precision:
        """What the agent computes with."""
        return precision.Precision(self.matmul_precision, self.compute_dtype)

    def runner_class(self) -> RunnerClass:
        """Returns the runner; of two, the one for this kind of environment."""
        if not isinstance(self.runner, tuple):
            return self.runner
        environment = self.environment
        if not isinstance(environment, type):  # a class says what it is without being called
            environment = _make("environment", environment, environment_lib.Environment)
        return self.runner[environment_lib.is_host(environment)]

    def build(self) -> Parts:
        """Builds the parts; nothing is compiled, and no device is touched.

        Raises:
          errors.UserError: a part refuses its settings, or is none.
        """
        with self.configured():
            return self._build()

    def configured(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which gin's configuration is the one of this experiment."""
        return config.using(self._state)

    def _build(self) -> Parts:
        environment = _make("environment", self.environment, environment_lib.Environment)
        _check_spec(environment)
        agent = _make("agent", self.agent, agent_lib.Agent, spec=environment.spec)
        arguments = {"agent": agent, "environment": environment}
        if self.precision != precision.DEFAULT:  # a runner may know no other
            arguments["precision"] = self.precision
        runner = _make("runner", self.runner_class(), runner_lib.Runner, **arguments)
        evaluator = evaluation.Evaluator(
            agent,
            environment,
            self.evaluation_episodes,
            runner.population,
            runner.population_values,
            self.evaluation_max_steps,
            runner.timeout,
            self.precision,
        )
        num_updates = -(-self.total_steps // runner.steps_per_update)
        if num_updates > errors.INT32_MAX:
            raise errors.UserError(
                f"Experiment.total_steps: expected at most {errors.INT32_MAX} updates of "
                f"{runner.steps_per_update} agent steps, got {self.total_steps}"
            )
        return Parts(
            environment, agent, runner, evaluator, self._greedy_evaluator(evaluator), num_updates
        )

    def _greedy_evaluator(self, evaluator: evaluation.Evaluator) -> evaluation.Evaluator | None:
        greedy = agent_lib.greedy(evaluator.agent)
        if greedy is None or self.greedy_evaluation_episodes == 0:
            return None
        count = self.greedy_evaluation_episodes or evaluator.num_episodes
        return dataclasses.replace(evaluator, agent=greedy, num_episodes=count)


def load(
    gin_files: Sequence[str],
    gin_bindings: Sequence[str],
    say: Callable[[str], None] = lambda line: None,
) -> Experiment:
    """Returns the experiment that .gin files and bindings describe (see `config.parse`).

    Where they leave the runner to the environment, it is chosen here, so that the configuration
    names the one that runs, and says nothing of the other.

    Args:
      gin_files: paths, relative to the working directory, or of shipped files (see `config.parse`).
      gin_bindings: `"name.parameter = value"` or `"MACRO = value"`; they win over the files.
      say: takes a line for each value that one of the files takes from another one before it.
    """
    taken = config.parse(gin_files, gin_bindings, Experiment)
    settings = config.call(Experiment)
    if isinstance(settings.runner, tuple):
        choice = f"RUNNER = @{config.name_of(settings.runner_class())}"
        taken = config.parse(gin_files, [*gin_bindings, choice], Experiment)
        settings = config.call(Experiment)
    for line in taken:
        say(line)
    return settings


def check(parts: Parts, seed: int) -> None:
    """Traces one update, so that parts that do not fit are refused before anything is written.

    What is traced here is not traced again when the run compiles it.

    Args:
      parts: an experiment's parts.
      seed: the experiment's seed.

    Raises:
      errors.UserError: the parts do not fit the devices or one another, or the environment breaks
        its contract. Exceptions of a part's own code are passed on as they are.
    """
    if not environment_lib.is_host(parts.environment):
        _check_environment(parts.environment)
    parts.runner.describe()  # the devices and their memory
    parts.runner.trace(seed)


def _check_environment(environment: environment_lib.Environment) -> None:
    # If the code of the environment itself fails, it has to fail here, with its traceback.
    state, _ = jax.eval_shape(environment.reset, jax.random.key(0))
    action = jax.ShapeDtypeStruct(environment.spec.action.shape, environment.spec.action.dtype)
    jax.eval_shape(environment.step, state, action)
    if faults := check_lib.trace_faults(environment, environment.spec):
        raise errors.UserError(f"environment {environment.spec.name}: {'; '.join(faults)}")


def _check_spec(environment: environment_lib.Environment) -> None:
    try:
        _ = environment.spec
    except errors.UserError as error:
        raise errors.UserError(errors.first_line(error)) from error
    faults, _ = check_lib.spec_faults(environment)
    if faults:
        raise errors.UserError(f"environment {type(environment).__name__}: {'; '.join(faults)}")


def _make(part: str, make: Callable[..., Any], protocol: type, **arguments: Any) -> Any:
    """Builds a part; what its constructor refuses is a mistake of the user."""
    name = getattr(make, "__name__", repr(make))
    kind = f"Experiment.{part}: {name} is not an {part}".replace("an runner", "a runner")
    try:
        made = make(**arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        message = errors.first_line(error)
        if isinstance(error, errors.UserError):
            raise errors.UserError(message) from error
        missing = _missing(name, message)
        if f"unexpected keyword argument '{next(iter(arguments), None)}'" in message:
            raise errors.UserError(f"{kind} (it takes no '{next(iter(arguments))}')") from error
        if missing & _SUPPLIED:
            raise errors.UserError(f"{kind} (it needs '{min(missing & _SUPPLIED)}')") from error
        if missing:
            names = ", ".join(f"{name}.{parameter}" for parameter in sorted(missing))
            raise errors.UserError(f"no value for {names}: bind it") from error
        raise errors.UserError(f"{part} {name}: {message}") from error
    if protocol is environment_lib.Environment and environment_lib.is_host(made):
        protocol = environment_lib.HostEnvironmentFactory
    lacking = [member for member in _members(protocol) if not check_lib.has(made, member)]
    if lacking:
        raise errors.UserError(f"{kind} (it has no `{'`, no `'.join(lacking)}`)")
    return made


def _missing(name: str, message: str) -> set[str]:
    """Returns the arguments that a call of `name` lacked, by Python's own message."""
    if not re.match(rf"{re.escape(name)}(\.__init__)?\(\) missing \d+ required .*: ", message):
        return set()
    return set(re.findall(r"'(\w+)'", message.rpartition(": ")[2]))


def _members(protocol: type) -> list[str]:
    return sorted(
        name for name in {**vars(protocol), **protocol.__annotations__} if not name.startswith("_")
    )
