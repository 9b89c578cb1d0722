"""Parameters that a run begins with, from a checkpoint of another run.

Leaves are matched by name: `params/...` in the field `params` of a learner or of its `train_state`,
and `normalizer/...` for the statistics of observations. So agents and runners may differ.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from podracers import errors, population, trees
from podracers.hosts import processes
from podracers.training import experiment as experiment_lib
from podracers.training import trained

_NAME = re.compile(r"learner/(?:train_state/)?((?:params|normalizer)/.+)")
_PARTS = "Experiment.initial_parts"


class InitialRun(NamedTuple):
    """Leaves of a learner, read from another run."""

    path: str  # run directory
    step: int  # agent steps of the checkpoint
    leaves: dict[str, np.ndarray]  # keys are names; members have an axis if `is_by_member`
    is_by_member: bool  # whether each member of a population begins with its own


def load(settings: experiment_lib.Experiment, parts: experiment_lib.Parts) -> InitialRun | None:
    """Returns the leaves that an experiment's runs begin with; None without `initial_run`.

    All processes call it, and read the same files.

    Raises:
      errors.UserError: there is no checkpoint, a leaf does not fit, a part is unknown, the agent
        has no `restart`, or the populations differ.
    """
    if settings.initial_run is None:
        return None
    path = settings.initial_run.replace("{seed}", str(settings.seed))
    if not hasattr(parts.agent, "restart"):
        raise errors.UserError(
            "Experiment.initial_run: expected an agent with the method `restart` (see "
            f"podracers/agent.py), got {errors.path_of(parts.agent)}"
        )
    expected = taken(jax.eval_shape(lambda: parts.runner.init(settings.seed)))
    for part in settings.initial_parts or ():
        if not any(_is_in(name, (part,)) for name in expected):
            known = {word for name in expected for word in name.split("/")}
            errors.require_known(f"{_PARTS}: there is no part", part, known - {part})
    place = processes.on_lead(lambda: str(trained.open_run(path).checkpoints))
    from podracers.checkpoints import checkpoint  # noqa: PLC0415 (orbax takes 0.4 s)

    checkpointer = checkpoint.Checkpointer(place, read_only=True)
    restored = checkpointer.restore(
        None,
        best=settings.initial_best,
        selects=lambda name: _is_in(_short(name), settings.initial_parts),
    )
    if restored is None:
        raise errors.UserError(f"Experiment.initial_run: the run in '{path}' has no checkpoint yet")
    step, tree, metadata = restored
    members, others = parts.runner.population, metadata["population"]
    if others not in (1, members):
        raise errors.UserError(
            f"Experiment.initial_run = '{path}': expected a population of "
            f"{' or '.join(map(str, sorted({1, members})))}, got {others}"
        )
    if others < members:  # the leaves have no axis of members
        expected = {name: jax.eval_shape(lambda x: x[0], leaf) for name, leaf in expected.items()}
    leaves, expected = (
        {name: leaf for name, leaf in tree_leaves.items() if _is_in(name, settings.initial_parts)}
        for tree_leaves in (taken(tree), expected)
    )
    if faults := trees.differences(trees.structure(leaves), trees.structure(expected)):
        raise errors.UserError(
            f"Experiment.initial_run = '{path}', step {step}: {faults[0]}; {_PARTS} = "
            "('encoder', ...) takes some parts alone"
        )
    return InitialRun(path, step, leaves, is_by_member=others > 1)


def begin(initial: InitialRun, parts: experiment_lib.Parts, state: Any) -> Any:
    """Returns a runner's state before the first update, donated, with another run's leaves."""

    def member(learner: Any, leaves: dict[str, jax.Array], values: Any) -> Any:
        def replaced(path: tuple, leaf: jax.Array) -> jax.Array:
            return leaves.get(_short(f"learner/{trees.name(path)}"), leaf)

        agent: Any = population.with_options(parts.agent, values)
        return agent.restart(jax.tree_util.tree_map_with_path(replaced, learner))

    values = population.arrays(parts.runner.population_values)
    if parts.runner.population > 1:
        member = jax.vmap(member, (0, 0 if initial.is_by_member else None, 0))
    shardings = jax.tree.map(lambda x: x.sharding, state.learner)
    restart = jax.jit(member, out_shardings=shardings, donate_argnums=0)
    return state._replace(learner=restart(state.learner, initial.leaves, values))


def taken(state: Any) -> dict[str, Any]:
    """Returns the leaves of a runner's state that another run may begin with, by name."""
    named = {_short(name): leaf for name, leaf in trees.leaves(state).items()}
    return {name: leaf for name, leaf in named.items() if name}


def _short(name: str) -> str:
    """Returns `params/...` or `normalizer/...` of a leaf's name in a runner's state, else ""."""
    match = _NAME.fullmatch(name)
    return match[1] if match else ""


def _is_in(name: str, parts: Sequence[str] | None) -> bool:
    """Returns whether a leaf is in one of the parts, nodes of the tree; None for all parts."""
    return bool(name) and (not parts or any(f"/{part}/" in f"/{name}/" for part in parts))
