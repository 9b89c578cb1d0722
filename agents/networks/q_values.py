"""Networks of the values of actions, for agents that learn those from replay or from rollouts.

Axis legend: `T` time, `B` streams, `A` actions, `Z` atoms.
"""

import math
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from agents.networks import encoders, layers
from agents.networks import network as networks
from podracers import environment, errors


class _Module(nn.Module):
    """The values of actions; see `q_network`."""

    num_actions: int
    torso: networks.Torso
    dueling: bool
    head_hidden_sizes: tuple[int, ...]
    num_atoms: int | None
    noisy: bool
    num_cells: int

    def initial_states(self, batch_size: int) -> tuple:
        return (self.torso.initial_state(batch_size),)

    @nn.compact
    def __call__(self, states, observation, first, key=None):
        """Returns values `[T, B, A]`, or logits `[T, B, A, Z]`, and the states after it.

        With keys `[B]`, the heads are noisy.
        """
        features, state = self.torso(states[0], observation, first)
        keys = _split(key)
        atoms = () if self.num_atoms is None else (self.num_atoms,)
        values = self._head("action", (self.num_actions, *atoms), 0.01, features, keys[0])
        if self.dueling:
            values -= jnp.mean(values, axis=2, keepdims=True)
            values += self._head("state", (1, *atoms), 1.0, features, keys[1])
        return values, (state,)

    def _head(
        self,
        name: str,
        shape: tuple[int, ...],
        scale: float,
        features: jax.Array,
        key: jax.Array | None,
    ) -> jax.Array:
        """Returns the outputs `[T, B, *shape]` of one head."""
        size, sizes = math.prod(shape), self.head_hidden_sizes
        options = {"scale": scale, "num_cells": self.num_cells if shape[0] > 1 else 1, "name": name}
        if self.noisy:
            for index, hidden_size in enumerate(sizes):
                key, layer_key = _split(key)
                layer = layers.NoisyDense(hidden_size, name=f"{name}_hidden_{index}")
                features = jax.nn.relu(layer(features, layer_key))
            outputs = layers.NoisyDense(size, **options)(features, key)
        else:
            hidden = layers.mlp(features, sizes, jax.nn.relu, f"{name}_hidden")
            outputs = layers.Dense(size, **options)(hidden)
        return outputs.reshape(*outputs.shape[:-1], *shape)


def _split(key: jax.Array | None) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns two keys `[B]` for keys `[B]`; None for none."""
    return (None, None) if key is None else tuple(jax.vmap(jax.random.split, out_axes=1)(key))


def q_network(
    spec: environment.EnvironmentSpec,
    num_actions: int,
    *,
    encoder: nn.Module | None = None,
    core: nn.Module | None = None,
    frame_stack: int = 1,
    dueling: bool = False,
    head_hidden_sizes: Sequence[int] = (),
    num_atoms: int | None = None,
    noisy: bool = False,
    num_cells: int = 1,
) -> networks.Composed:
    """Returns a network whose output is the value of each action, `[..., A]`.

    `num_atoms` and `noisy` are set by DQN: bind the options of DQN instead.

    Args:
      spec: environment specification.
      num_actions: number of actions, `A`.
      encoder: module of `agents.networks.encoders`; by default two ReLU layers of 64.
      core: module of `agents.networks.cores`; by default none.
      frame_stack: number of stacked frames of the encoder; 1 for no stack.
      dueling: whether values are the sum of a state value and of advantages with mean 0; Wang et
        al., "Dueling Network Architectures", https://arxiv.org/abs/1511.06581.
      head_hidden_sizes: sizes of the ReLU layers that each head (the actions' and, with `dueling`,
        the state's) has before its linear layer; `(512,)` in that paper.
      num_atoms: `Z`, number of logits for each action, of the distribution of its return, and then
        the output is `[..., A, Z]`; None for its value alone.
      noisy: whether the heads are of `layers.NoisyDense`.
      num_cells: see `networks.actor_critic`; it needs no `head_hidden_sizes`, which mix cells.
    """
    errors.require_types(q_network, locals())
    torso = networks.Torso(encoder or encoders.MLP(activation="relu"), core)
    sizes = tuple(head_hidden_sizes)
    networks.require_cells(num_cells, core=core, head_hidden_sizes=sizes)
    module = _Module(num_actions, torso, dueling, sizes, num_atoms, noisy, num_cells)
    return networks.Composed(spec, module, frame_stack, torso.encoder, torso.packs_frames)
