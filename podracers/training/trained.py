"""Trained parameters, loaded from a run directory."""

import pathlib
from typing import NamedTuple

import jax

from podracers import errors, types
from podracers.training import checkpoint, experiment, run_directory, storage


class TrainedPolicy(NamedTuple):
    """A trained agent, which acts by `parts.agent.act(params, ...)`.

    A population's parameters have a leading axis, one entry for each member.
    """

    settings: experiment.Experiment
    parts: experiment.Parts  # agent, environment, runner and evaluator, built
    step: int  # agent steps of training
    params: types.PyTree  # on the first device


def load(path: str | pathlib.Path, best: bool = False) -> TrainedPolicy:
    """Returns the trained agent of a run, which may be running; nothing is written.

    Args:
      path: the run directory's path.
      best: the best evaluated checkpoint, not the newest.

    Raises:
      errors.UserError: there is no run, or no checkpoint of it yet.
    """
    directory = run_directory.RunDirectory(path)
    directory.require()
    settings = experiment.load([str(directory.config)], [])
    if (place := settings.checkpoint_directory) is not None:
        directory.checkpoints = storage.path(place)
    parts = settings.build()
    return TrainedPolicy(settings, parts, *params(directory, parts, best))


def params(
    directory: run_directory.RunDirectory, parts: experiment.Parts, best: bool = False
) -> tuple[int, types.PyTree]:
    """Returns the step and the acting parameters of a checkpoint (see `load`).

    Args:
      directory: the run directory.
      parts: the parts of its configuration, which may be Python without `config.gin`.
      best: the best evaluated checkpoint, not the newest.
    """

    def init(key):
        return parts.agent.actor_params(parts.agent.init_learner(key))

    key = jax.random.key(0)
    if (population := parts.runner.population) > 1:
        init, key = jax.vmap(init), jax.random.split(key, population)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    template = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device),
        jax.eval_shape(init, key),
    )
    checkpointer = checkpoint.Checkpointer(directory.checkpoints, read_only=True)
    restored = checkpointer.restore_params(template, best)
    if restored is None:
        raise errors.UserError(f"the run in '{directory.path}' has no checkpoint yet")
    return restored[:2]
