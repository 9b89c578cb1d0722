"""Trained parameters, loaded from a run directory."""

import pathlib
from typing import Any, NamedTuple

import jax

from podracers import errors, population, types
from podracers.checkpoints import storage
from podracers.training import experiment, run_directory


class TrainedPolicy(NamedTuple):
    """A trained agent, which acts by `parts.agent.act(params, ...)`."""

    settings: experiment.Experiment
    parts: experiment.Parts  # agent, environment, runner and evaluator, built
    step: int  # agent steps of training
    params: types.PyTree  # leaves on the first device


def load(
    path: str | pathlib.Path,
    best: bool = False,
    member: int | None = None,
    step: int | None = None,
) -> TrainedPolicy:
    """Returns the trained agent of a run, which may be running; nothing is written.

    The configuration of a run is code, which this executes (`params` reads a run without it).
    `best` takes the best evaluated checkpoint, and `step` that of an agent step, not the newest;
    `member`, from 0, is one of a population.

    Raises:
      errors.UserError: there is no run, no checkpoint of it yet, or no such member or step.
    """
    policy = load_all(path, best, step)
    parts, size = policy.parts, policy.parts.runner.population
    if size == 1 and member in (None, 0):
        return policy
    if member is None or not 0 <= member < size:
        raise errors.UserError(f"member: expected one of '{path}', 0 to {size - 1}, got {member}")
    evaluator, params = parts.evaluator.member(policy.params, member)
    greedy = parts.greedy_evaluator and parts.greedy_evaluator.member(policy.params, member)[0]
    agent: Any = evaluator.agent  # a policy that learns, too
    parts = parts._replace(agent=agent, evaluator=evaluator, greedy_evaluator=greedy)
    return policy._replace(params=params, parts=parts)


def load_all(
    path: str | pathlib.Path, best: bool = False, step: int | None = None
) -> TrainedPolicy:
    """Returns the agent as `load`; parameters of a population have a leading axis of members."""
    directory = open_run(path)
    directory.require_gin()
    settings = experiment.load([str(directory.config)], [])
    parts = settings.build()
    return TrainedPolicy(settings, parts, *params(directory, parts, best, step))


def open_run(path: str | pathlib.Path) -> run_directory.RunDirectory:
    """Returns a run directory, with the place of its checkpoints; its configuration is no code."""
    directory = run_directory.RunDirectory(path)
    directory.require()
    name = "Experiment.checkpoint_directory"
    place = directory.read_values().get(name)
    if place is not None:
        storage.check(name, place)
        directory.checkpoints = storage.path(place)
    return directory


def params(
    directory: run_directory.RunDirectory | str | pathlib.Path,
    parts: experiment.Parts | None = None,
    best: bool = False,
    step: int | None = None,
) -> tuple[int, types.PyTree]:
    """Returns the step and the acting parameters of a checkpoint, by default the newest.

    `parts` are those of its configuration, which may be Python without `config.gin`. Without them
    nothing of the configuration is executed, and the parameters are nested dicts of NumPy arrays.
    """
    if not isinstance(directory, run_directory.RunDirectory):
        directory = open_run(directory)
    from podracers.checkpoints import checkpoint  # noqa: PLC0415 (orbax takes 0.4 s)

    checkpointer = checkpoint.Checkpointer(directory.checkpoints, read_only=True)
    restored = checkpointer.restore(parts and _template(parts), "params", best, only=step)
    if restored is None:
        raise errors.UserError(f"the run in '{directory.path}' has no checkpoint yet")
    return restored[:2]


def _template(parts: experiment.Parts) -> types.PyTree:
    """Returns the structure of the acting parameters, on the first device."""

    def init(key):
        return parts.agent.actor_params(parts.agent.init_learner(key))

    key = jax.random.key(0)
    if (size := parts.runner.population) > 1:
        init, key = jax.vmap(init), jax.random.split(key, size)
    shapes = jax.eval_shape(init, key)
    if getattr(parts.runner, "pbt_period", None) is not None:
        options = population.arrays(parts.runner.population_values)
        shapes = population.Acting(shapes, jax.eval_shape(lambda: options))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), shapes)
