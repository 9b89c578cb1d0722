"""A network with the outputs that a learned rule requires.

Axis legend: `T` time, `B` streams, `A` actions.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from agents import networks
from agents.meta.rules import interface
from agents.networks import cores, encoders, layers
from podracers import environment, errors


class _Module(nn.Module):
    """Linear heads for outputs of states; a one-step model for outputs of actions."""

    outputs: interface.OutputSpec
    num_actions: int
    torso: networks.Torso
    linear_size: int | None
    model_size: int
    model_hidden_sizes: tuple[int, ...]

    def initial_states(self, batch_size: int) -> tuple:
        return (self.torso.initial_state(batch_size),)

    @nn.compact
    def __call__(self, states, observation, first):
        """Returns `interface.Outputs` `[T, B, ...]` and the states after it."""
        features, state = self.torso(states[0], observation, first)
        if self.linear_size is not None:
            features = layers.Dense(self.linear_size, name="linear")(features)
        result = {
            name: layers.Dense(size, scale=0.01, name=name)(features)
            for name, size in self.outputs.of_state.items()
        }
        if not self.outputs.of_action:
            return result, (state,)
        cell = layers.Dense(self.model_size, scale=1.0, name="root")(features)
        shape = (*cell.shape[:-1], self.num_actions, self.model_size)
        cell = jnp.broadcast_to(cell[..., None, :], shape).reshape(-1, self.model_size)
        actions = jnp.broadcast_to(jnp.eye(self.num_actions), (*shape[:-1], self.num_actions))
        actions = actions.reshape(1, -1, self.num_actions)  # a sequence of one
        lstm = cores.LSTM(self.model_size, name="model")
        model, _ = lstm((cell, jnp.tanh(cell)), actions, jnp.zeros(actions.shape[:2], bool))
        model = model.reshape(shape)  # [T, B, A, H]
        for name, size in self.outputs.of_action.items():
            hidden = layers.mlp(model, self.model_hidden_sizes, jax.nn.relu, f"{name}_hidden")
            result[name] = layers.Dense(size, scale=1.0, name=name)(hidden)
        return result, (state,)


def rule_network(
    spec: environment.EnvironmentSpec,
    outputs: interface.OutputSpec,
    *,
    encoder: nn.Module | None = None,
    core: nn.Module | None = None,
    frame_stack: int = 1,
    linear_size: int | None = None,
    model_size: int = 128,
    model_hidden_sizes: Sequence[int] = (128,),
) -> networks.Composed:
    """Returns a network whose outputs are `interface.Outputs`.

    Outputs of actions come from one step of an LSTM whose initial state is a function of the
    torso's features and whose input is the action, as in DiscoRL's published networks.

    Args:
      spec: specification of the environment.
      outputs: sizes of the outputs that the rule requires.
      encoder: a module of `agents.networks.encoders`; by default two rectified layers of 64.
      core: a module of `agents.networks.cores`; by default none.
      frame_stack: number of frames in the encoder's input; 1 for no stack.
      linear_size: size of a linear layer between torso and heads; None for none.
      model_size: units of the LSTM, if there are outputs of actions.
      model_hidden_sizes: sizes of the rectified layers between the LSTM and each of its outputs.
    """
    errors.require_types(rule_network, locals())
    torso = networks.Torso(encoder or encoders.MLP(activation="relu"), core)
    num_actions = spec.num_actions
    module = _Module(
        outputs, num_actions, torso, linear_size, model_size, tuple(model_hidden_sizes)
    )
    return networks.Composed(spec, module, frame_stack, torso.encoder)
