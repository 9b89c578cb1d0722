"""An experiment: agent, environment, runner and length of a run; the only root of gin."""

import dataclasses
import inspect
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podracers import agent as agent_lib
from podracers import contract, errors, evaluation, leaks, precision, types
from podracers import environment as environment_lib
from podracers import runner as runner_lib
from podracers.checkpoints import storage
from podracers.training import config, loggers

_NUM_EVALUATIONS = 20  # about as many in a run, if no option counts the updates between them
_MOST_EPISODES = 1_000_000  # limit of an evaluation; a JAX environment plays them at once

RunnerClass = Callable[..., runner_lib.Runner]


class Parts(NamedTuple):
    """The parts of an experiment, built."""

    environment: environment_lib.AnyEnvironment
    agent: agent_lib.Agent
    runner: runner_lib.Runner
    evaluator: evaluation.Evaluator
    greedy_evaluator: evaluation.Evaluator | None  # None if `evaluator` is greedy, or no episodes
    num_updates: int  # enough for `total_steps`

    def evaluate(
        self, params: types.PyTree, key: jax.Array, **options: Any
    ) -> evaluation.Evaluation:
        """Returns the results of both evaluators, with the arguments of `Evaluator.run`."""
        evaluators = filter(None, (self.evaluator, self.greedy_evaluator))
        return evaluation.Evaluation(*(x.run(params, key, **options) for x in evaluators))

    def lower_evaluation(self, params: types.PyTree) -> list[jax.stages.Lowered]:
        """Returns the programs of both evaluators for parameters of these `evaluation.shapes`."""
        evaluators = filter(None, (self.evaluator, self.greedy_evaluator))
        return [program for x in evaluators if (program := x.lower(params)) is not None]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Experiment:
    """Configuration of a run, resolved before anything is compiled. Periods count updates.

    Attributes:
      agent: class, called with `spec=`.
      environment: class, called without arguments: a JAX environment, or a factory of host
        environments (`environment.HostEnvironmentFactory`).
      runner: class, called with `agent=` and `environment=`; or two classes, for JAX environments
        and for host environments.
      seed: seed of all random numbers.
      total_steps: agent steps over all environments; rounded up to whole updates.
      log_period: updates between two log lines.
      evaluation_period: updates between evaluations; 0 for a single one at the end; None for a
        multiple of `log_period` that gives about twenty, of which those are left out before which
        evaluations have taken more agent steps than training.
      evaluation_episodes: number of first episodes that each evaluation averages; None for 512 of a
        JAX environment, which runs them in parallel, or 64 of a host environment.
      greedy_evaluation_episodes: number of episodes of an evaluation that are repeated with greedy
        actions, if the agent's evaluations sample (`greedy_evaluation`); None for all of them.
      evaluation_max_steps: agent steps after which an evaluated episode is cut; None for the
        environment's limit.
      checkpoint_period: updates between checkpoints, in addition to those at every evaluation and
        at the end; 0 for no additional ones; None for one every five minutes.
      checkpoint_directory: absolute path, or `gs://BUCKET/FOLDER`, for the checkpoints of this run
        only. Every process must see it, and writes its own part. None for `checkpoints` in the run
        directory, which every process must see then.
      checkpoint_replay: whether checkpoints contain replay; without it they are small, and a
        resumed run starts with empty replay.
      keep_latest: number of latest checkpoints to keep.
      keep_best: number of checkpoints with the best evaluations to keep in addition.
      profile_update: an update whose log period the JAX profiler traces, into `profile` in the run
        directory; not in the first period, which compiles. None for no trace.
      on_log: function that process 0 calls with each log line, numbers by name with `step`. It may
        add numbers, which are logged, and return True to end the run, as after its last update. A
        resumed run calls it for later lines only.
      initial_run: directory of another run, whose parameters and statistics of observations this
        one begins with, from the newest checkpoint; `{seed}` in it stands for `seed`. Optimizer,
        counters and replay begin anew. A resumed run does not read it.
      initial_best: take its best evaluated checkpoint, not the newest.
      initial_parts: nodes of the tree of parameters to take alone, such as `('encoder',)`; also
        `'normalizer'`, the statistics. None for everything.
      tracker: additional service that receives the run's metrics: `@WeightsAndBiases()`, or None.
      matmul_precision: see `precision.Precision`, as for `compute_dtype`.
      compute_dtype: dtype of encoders and cores.
    """

    agent: Callable[..., agent_lib.Agent]
    environment: Callable[[], environment_lib.AnyEnvironment]
    runner: RunnerClass | tuple[RunnerClass, RunnerClass]
    seed: int
    total_steps: numbers.Integral  # number of any size; `1e9` becomes an int
    log_period: int = 10
    evaluation_period: int | None = None
    evaluation_episodes: int | None = None
    greedy_evaluation_episodes: int | None = None
    evaluation_max_steps: int | None = None
    checkpoint_period: int | None = None
    checkpoint_directory: str | None = None
    checkpoint_replay: bool = True
    keep_latest: int = 3
    keep_best: int = 1
    profile_update: int | None = None
    on_log: Callable[[dict[str, float]], bool | None] | None = None
    initial_run: str | None = None
    initial_best: bool = False
    initial_parts: tuple[str, ...] | None = None
    tracker: loggers.WeightsAndBiases | None = None
    matmul_precision: str | None = None
    compute_dtype: str = "float32"
    # Set by `load`. A copy by `dataclasses.replace` keeps the texts, and may have other options.
    _texts: config.Texts = dataclasses.field(default_factory=config.Texts, repr=False)
    _is_loaded: bool = dataclasses.field(default=False, init=False, repr=False)

    def __post_init__(self):
        if isinstance(self.total_steps, float) and self.total_steps.is_integer():
            object.__setattr__(self, "total_steps", int(self.total_steps))
        errors.require_types(self)
        if int(self.total_steps) < 1:  # `build` compares its updates with int32
            raise errors.UserError(
                f"Experiment.total_steps: expected a positive int, got {self.total_steps}"
            )
        errors.require_count(self, "log_period", "evaluation_max_steps", "keep_latest")
        errors.require_count(self, "evaluation_episodes", most=_MOST_EPISODES)
        errors.require_count(self, "greedy_evaluation_episodes", least=0, most=_MOST_EPISODES)
        periods = "evaluation_period", "checkpoint_period", "profile_update"
        errors.require_count(self, *periods, "seed", "keep_best", least=0)
        _ = self.precision  # refuses unknown names
        precision.require_32_bits()
        if self.checkpoint_directory is not None:
            storage.check("Experiment.checkpoint_directory", self.checkpoint_directory)

    def updates_between_evaluations(self, num_updates: int) -> int:
        """Returns `evaluation_period`, or the period of about twenty evaluations; 0 for none."""
        if self.evaluation_period is not None:
            return self.evaluation_period
        periods = num_updates / self.log_period
        return self.log_period * (max(1, round(periods / _NUM_EVALUATIONS)) if periods > 1 else 0)

    @property
    def precision(self) -> precision.Precision:
        """Precision of the agent's computations."""
        return precision.Precision(self.matmul_precision, self.compute_dtype)

    def runner_class(self) -> RunnerClass:
        """Returns the runner's class; of two, the one for this kind of environment."""
        if not isinstance(self.runner, tuple):
            return self.runner
        environment = inspect.unwrap(self.environment)
        if not isinstance(environment, type):  # the kind of a class is known without a call
            environment = _make("environment", self.environment, environment_lib.Environment)
        return self.runner[environment_lib.is_host(environment)]

    def build(self) -> Parts:
        """Builds the parts; nothing is compiled, and no device is touched.

        Raises:
          errors.UserError: a part refuses its options, or lacks a member of its protocol.
        """
        environment = _make("environment", self.environment, environment_lib.Environment)
        with config.user_errors("Experiment.environment"):
            spec = environment.spec
        environment_lib.refuse(environment, contract.spec_faults(environment))
        agent = _make("agent", self.agent, agent_lib.Agent, spec=spec)
        arguments = {"agent": agent, "environment": environment}
        if self.precision != precision.DEFAULT:  # other runners need not know the argument
            arguments["precision"] = self.precision
        runner = _make("runner", self.runner_class(), runner_lib.Runner, **arguments)
        evaluator = evaluation.Evaluator(
            agent,
            getattr(environment, "evaluation_environment", environment),
            self.evaluation_episodes,
            runner.population,
            runner.population_values,
            self.evaluation_max_steps,
            runner.timeout,
            self.precision,
        )
        greedy = agent_lib.greedy(agent)
        greedy_evaluator = None
        if greedy is not None and self.greedy_evaluation_episodes != 0:
            count = self.greedy_evaluation_episodes or evaluator.count
            greedy_evaluator = dataclasses.replace(evaluator, agent=greedy, num_episodes=count)
        num_updates = -(-self.total_steps // runner.steps_per_update)
        if num_updates > errors.INT32_MAX:
            raise errors.UserError(
                f"Experiment.total_steps: expected at most {errors.INT32_MAX} updates of "
                f"{runner.steps_per_update} agent steps, got {self.total_steps}"
            )
        if self.profile_update is not None and self.profile_update >= num_updates:
            raise errors.UserError(
                f"Experiment.profile_update: expected less than {num_updates}, the updates of "
                f"the run; got {self.profile_update}"
            )
        # Agents make their network at its first use: here, where its options are refused.
        for policy in filter(None, (agent, greedy)):
            jax.eval_shape(lambda agent=policy: agent.init_actor(jnp.zeros(1, jnp.int32), 1))
        return Parts(environment, agent, runner, evaluator, greedy_evaluator, num_updates)

    def text(self) -> str:
        """Returns the text of `config.gin`; an empty one where Python set or replaced options."""
        return self._texts.bindings if self._is_loaded else ""

    @property
    def texts(self) -> config.Texts:
        """The configuration that was loaded, also if Python replaced options since."""
        return self._texts


def load(gin_files: Sequence[str], gin_bindings: Sequence[str] = ()) -> Experiment:
    """Returns the experiment that .gin files and bindings describe (see `config.Configuration`).

    If they leave the runner to the environment, it is chosen here, so that the configuration names
    one runner and no option of the other.

    Raises:
      errors.UserError: see `config.Configuration`; or a part refuses its options.
    """
    with config.LOCK:
        configuration = config.Configuration(gin_files, gin_bindings, Experiment)
        settings: Experiment = configuration.make()
        if isinstance(settings.runner, tuple):
            configuration.choose("runner", settings.runner.index(settings.runner_class()))
            settings = configuration.make()
        object.__setattr__(settings, "_texts", configuration.texts())
        object.__setattr__(settings, "_is_loaded", True)
    return settings


def check(parts: Parts, seed: int, tracker: loggers.WeightsAndBiases | None = None) -> None:
    """Traces one update, so that parts that do not fit are refused before anything is written.

    The run does not trace it again when it compiles the update.

    Raises:
      errors.UserError: the parts do not fit the devices or one another, the run is too short to
        learn, the environment breaks its contract, or the tracker's package is missing. Exceptions
        of a part's own code are passed on unchanged.
    """
    if tracker is not None:
        loggers.require_wandb()
    environment, agent, runner = parts.environment, parts.agent, parts.runner
    with leaks.refused(environment, agent):
        if not environment_lib.is_host(environment):
            environment_lib.refuse(environment, contract.trace_faults(environment))
        if hasattr(agent, "check_run"):
            num_streams = runner.num_envs * environment.spec.num_agents
            agent.check_run(num_streams, runner.rollout_length, parts.num_updates)
        runner.describe()  # checks the devices and their memory
        runner.trace(seed)


def _make(part: str, make: Callable[..., Any], protocol: type, **arguments: Any) -> Any:
    """Builds a part, and checks the types of its options and the members of its protocol."""
    errors.refuse_bound(make, **arguments)
    with config.user_errors(f"Experiment.{part}"):
        part_built = make(**arguments)
    if dataclasses.is_dataclass(part_built):
        errors.require_types(part_built)
    if protocol is environment_lib.Environment and environment_lib.is_host(part_built):
        protocol = environment_lib.HostEnvironmentFactory
    if missing := contract.missing_members(part_built, protocol):
        raise errors.UserError(
            f"Experiment.{part}: expected {protocol.__name__}, got {errors.path_of(make)}, "
            f"which has no {', '.join(missing)}"
        )
    return part_built
