"""Interface between a learned update rule and the agent that it trains.

A rule specifies the outputs of the agent's network, has parameters and a state for each lifetime of
an agent, and computes targets of the outputs from a rollout. The interface follows Oh et al.,
"Discovering state-of-the-art reinforcement learning algorithms", 2025,
https://www.nature.com/articles/s41586-025-09761-x.

Axis legend: `T` transitions, `B` streams of one device, `A` actions.
"""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np

from podracers import errors, types

POLICY = "policy"  # output with the logits of the actions

# Outputs of a network for time steps, `[T + 1, B, ...]`, by the names of the `OutputSpec`.
Outputs = Mapping[str, jax.Array]


class OutputSpec(NamedTuple):
    """Sizes of the outputs of an agent's network, by name; `POLICY` is an output of states."""

    of_state: Mapping[str, int]  # [..., size]
    of_action: Mapping[str, int]  # [..., A, size], for each action of a state

    def shapes(self, num_actions: int) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each output, without leading axes."""
        shapes: dict[str, tuple[int, ...]] = {name: (n,) for name, n in self.of_state.items()}
        return shapes | {name: (num_actions, n) for name, n in self.of_action.items()}


class Experience(NamedTuple):
    """Inputs of a rule; the logits of illegal actions are `layers.MASKED`."""

    timestep: types.TimeStep  # [T + 1, B], with preprocessed observations and rewards
    action: jax.Array  # [T, B] int32
    behaviour: jax.Array  # [T, B, A] logits of the behaviour policy
    outputs: Outputs  # [T + 1, B, ...] of the learner's parameters


@runtime_checkable
class Rule(Protocol):
    """An update rule: pure functions of its parameters.

    Values at transitions out of LAST are arbitrary: their losses have weight 0, and they must not
    change the targets of other transitions.
    """

    @property
    def costs(self) -> Mapping[str, float]:
        """The default weight of each part of the loss, by name."""

    def output_spec(self, num_actions: int) -> OutputSpec:
        """Returns the required outputs of a network."""

    def init(self, key: jax.Array) -> types.PyTree:
        """Returns random parameters of the rule."""

    def init_state(self, agent_params: types.PyTree) -> types.PyTree:
        """Returns the state of the rule at the start of an agent's lifetime; `()` for none."""

    def teach(
        self,
        params: types.PyTree,
        state: types.PyTree,
        experience: Experience,
        agent_params: types.PyTree,
        unroll: Callable[[types.PyTree], Outputs],
    ) -> tuple[Any, types.PyTree]:
        """Returns the targets of a rollout and the state after it; runs under the mapped axis.

        The targets are differentiable by `params` and by the experience's outputs.

        Args:
          params: parameters of the rule.
          state: state of the rule.
          experience: a rollout, this device's part of it.
          agent_params: parameters of the agent, those of `experience.outputs`.
          unroll: returns the outputs of other agent parameters for the same time steps.
        """

    def losses(
        self, targets: Any, outputs: Outputs, action: jax.Array, timestep: types.TimeStep
    ) -> dict[str, jax.Array]:
        """Returns the parts of the agent's loss, `[T, B]` each, by the names of `costs`.

        Args:
          targets: targets from `teach`.
          outputs: `[T + 1, B, ...]` of the agent's parameters.
          action: `[T, B]` int32.
          timestep: `[T + 1, B]`.
        """


# `load(path)` returns a rule and its parameters in NumPy; without a path, None for random ones.
Loader = Callable[[str | None], tuple[Rule, types.PyTree | None]]

Arrays = dict[str, np.ndarray]
_Rule = TypeVar("_Rule", bound=Rule)


def read_file(
    path: str | pathlib.Path, parse: Callable[[Arrays], tuple[_Rule, Mapping[str, tuple[int, ...]]]]
) -> tuple[_Rule, Arrays]:
    """Reads a rule and its parameters, float32, from an `.npz` file.

    Args:
      path: path of the file.
      parse: removes entries that are not parameters from the arrays of the file; returns the rule,
        and the shape of each parameter by name.

    Raises:
      errors.UserError: the file is missing, cannot be read, holds another rule, or has a parameter
        that is not finite.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            params = {name: np.asarray(file[name]) for name in file.files}
        rule, shapes = parse(params)
    except FileNotFoundError as error:
        raise errors.UserError(f"there is no rule '{path}'") from error
    except Exception as error:  # zipfile, zlib, json or the parser of NumPy's headers raised it
        cause = errors.one_line(error)
        raise errors.UserError(f"'{path}' is not the file of a rule: {cause}") from error
    for name in [*shapes, *sorted(params.keys() - shapes.keys())]:
        leaf, shape = params.get(name), shapes.get(name)
        expected = "nothing" if shape is None else f"float32 {shape}"
        actual = "nothing" if leaf is None else f"{leaf.dtype} {leaf.shape}"
        if leaf is None or actual != expected:
            raise errors.UserError(
                f"'{path}' holds another rule: expected '{name}' {expected}, got {actual}"
            )
        if not np.all(np.isfinite(leaf)):
            raise errors.UserError(f"'{path}': expected finite numbers in '{name}', got others")
    return rule, params
