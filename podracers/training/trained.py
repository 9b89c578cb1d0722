"""Trained parameters, loaded from a run directory."""

import pathlib
from typing import NamedTuple

import jax

from podracers import errors, types
from podracers.checkpoints import checkpoint, storage
from podracers.training import config, experiment, run_directory


class TrainedPolicy(NamedTuple):
    """A trained agent, which acts by `parts.agent.act(params, ...)`.

    A population's parameters have a leading axis, one entry for each member.
    """

    settings: experiment.Experiment
    parts: experiment.Parts  # agent, environment, runner and evaluator, built
    step: int  # agent steps of training
    params: types.PyTree  # leaves on the first device


def load(path: str | pathlib.Path, best: bool = False) -> TrainedPolicy:
    """Returns the trained agent of a run, which may be running; nothing is written.

    The configuration of a run is code, which this executes (`params` reads a run without it).

    Args:
      path: the run directory's path.
      best: the best evaluated checkpoint, not the newest.

    Raises:
      errors.UserError: there is no run, or no checkpoint of it yet.
    """
    directory = open_run(path)
    directory.require_gin()
    settings = experiment.load([str(directory.config)], [])
    parts = settings.build()
    return TrainedPolicy(settings, parts, *params(directory, parts, best))


def open_run(path: str | pathlib.Path) -> run_directory.RunDirectory:
    """Returns a run directory, with the place of its checkpoints; its configuration is no code."""
    directory = run_directory.RunDirectory(path)
    directory.require()
    name = "Experiment.checkpoint_directory"
    place = config.read(directory.read_config(), str(directory.config)).get(name)
    if place is not None:
        storage.check(name, place)
        directory.checkpoints = storage.path(place)
    return directory


def params(
    directory: run_directory.RunDirectory | str | pathlib.Path,
    parts: experiment.Parts | None = None,
    best: bool = False,
) -> tuple[int, types.PyTree]:
    """Returns the step and the acting parameters of a checkpoint (see `load`).

    Args:
      directory: the run directory, or its path.
      parts: the parts of its configuration, which may be Python without `config.gin`. Without them
        nothing of the configuration is executed, and the parameters are nested dicts of NumPy
        arrays.
      best: the best evaluated checkpoint, not the newest.
    """
    if not isinstance(directory, run_directory.RunDirectory):
        directory = open_run(directory)
    checkpointer = checkpoint.Checkpointer(directory.checkpoints, read_only=True)
    restored = checkpointer.restore(parts and _template(parts), "params", best)
    if restored is None:
        raise errors.UserError(f"the run in '{directory.path}' has no checkpoint yet")
    return restored[:2]


def _template(parts: experiment.Parts) -> types.PyTree:
    """Returns the structure of the acting parameters, on the first device."""

    def init(key):
        return parts.agent.actor_params(parts.agent.init_learner(key))

    key = jax.random.key(0)
    if (population := parts.runner.population) > 1:
        init, key = jax.vmap(init), jax.random.split(key, population)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device),
        jax.eval_shape(init, key),
    )
