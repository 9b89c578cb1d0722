"""What a run has learnt, loaded from its directory."""

import pathlib
from typing import NamedTuple

import jax

from podracers import errors, types
from podracers.training import checkpoint, experiment, run_directory


class TrainedPolicy(NamedTuple):
    """What acts: `parts.agent.act(params, ...)`.

    A population's parameters have a leading axis, one entry for each member.
    """

    settings: experiment.Experiment
    parts: experiment.Parts  # agent, environment, runner and evaluator, built
    step: int  # agent steps that it had learnt for
    params: types.PyTree  # on the first device


def load(path: str | pathlib.Path, best: bool = False) -> TrainedPolicy:
    """Returns what a run has learnt; nothing is written, and the run may go on meanwhile.

    Args:
      path: the run directory's path.
      best: the best evaluated checkpoint, not the newest.

    Raises:
      errors.UserError: there is no run, or no checkpoint of it yet.
    """
    directory = run_directory.RunDirectory(path)
    directory.require()
    settings = experiment.load([str(directory.config)], [])
    parts = settings.build()
    place = settings.checkpoint_directory
    return TrainedPolicy(settings, parts, *params(directory, parts, best, place))


def params(
    directory: run_directory.RunDirectory,
    parts: experiment.Parts,
    best: bool = False,
    place: str | None = None,
) -> tuple[int, types.PyTree]:
    """Returns the step and the acting parameters of a checkpoint (see `load`).

    Args:
      directory: the run directory.
      parts: the parts of its configuration, also where that is Python and no `config.gin`.
      best: the best evaluated checkpoint, not the newest.
      place: the experiment's `checkpoint_directory`.
    """

    def member(key):
        return parts.agent.actor_params(parts.agent.init_learner(key))

    population = parts.runner.population
    keys = jax.random.split(jax.random.key(0), population)
    shapes = jax.eval_shape(jax.vmap(member) if population > 1 else lambda k: member(k[0]), keys)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    template = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), shapes
    )
    checkpointer = checkpoint.Checkpointer(place or directory.checkpoints, read_only=True)
    restored = checkpointer.restore_params(template, best)
    if restored is None:
        raise errors.UserError(f"the run in '{directory.path}' has no checkpoint yet")
    return restored[0], restored[1]
