"""What a learnt rule is to the agent that it teaches.

A rule names the outputs that the agent's network must have, has parameters of its own and a state
for each lifetime of an agent, and makes targets of a rollout, which the outputs are moved towards.
The parts are those of Oh et al., "Discovering state-of-the-art reinforcement learning algorithms",
2025, https://www.nature.com/articles/s41586-025-09761-x.

Axis legend: `T` transitions, `B` streams of one device, `A` actions.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from podracers import types

POLICY = "policy"  # the output that actions are sampled from: logits, one for each action
ILLEGAL = -1e9  # logit of an action that is masked

# What a network says of time steps, `[T + 1, B, ...]`, by the names of the `OutputSpec`.
Outputs = Mapping[str, jax.Array]


class OutputSpec(NamedTuple):
    """Sizes of the outputs of an agent's network, by name; `POLICY` is among those of states."""

    of_state: Mapping[str, int]  # [..., size]
    of_action: Mapping[str, int]  # [..., A, size], of a state and each action in it

    def shapes(self, num_actions: int) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each output, without leading axes."""
        shapes: dict[str, tuple[int, ...]] = {name: (n,) for name, n in self.of_state.items()}
        return shapes | {name: (num_actions, n) for name, n in self.of_action.items()}


class Experience(NamedTuple):
    """What a rule sees of a rollout; the logits of illegal actions are `ILLEGAL`."""

    timestep: types.TimeStep  # [T + 1, B], rewards as they are learnt from
    action: jax.Array  # [T, B] int32
    behaviour: jax.Array  # [T, B, A] logits of the policy that acted
    outputs: Outputs  # [T + 1, B, ...] of the parameters that learn


@runtime_checkable
class Rule(Protocol):
    """A rule of learning: pure functions of its parameters.

    What stands at transitions out of LAST is without meaning: their losses are weighted by 0, and
    they must not reach the targets of others.
    """

    @property
    def costs(self) -> Mapping[str, float]:
        """The usual weight of each part of the loss, by name."""

    def output_spec(self, num_actions: int) -> OutputSpec:
        """Returns what a network must put out."""

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

        Gradients pass through to `params` and to the experience's outputs.

        Args:
          params: of the rule.
          state: of the rule.
          experience: a rollout, this device's part of it.
          agent_params: those that `experience.outputs` came from.
          unroll: returns the outputs of other parameters of the agent in the same time steps.
        """

    def losses(
        self, targets: Any, outputs: Outputs, action: jax.Array, timestep: types.TimeStep
    ) -> dict[str, jax.Array]:
        """Returns the parts of the agent's loss, `[T, B]` each, by the names of `costs`.

        Args:
          targets: what `teach` returned.
          outputs: `[T + 1, B, ...]` of the parameters to differentiate by.
          action: `[T, B]` int32.
          timestep: `[T + 1, B]`.
        """


# `load(path)` returns a rule and its parameters in NumPy; without a path, None for random ones.
Loader = Callable[[str | None], tuple[Rule, types.PyTree | None]]
