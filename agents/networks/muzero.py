"""MuZero's learnt model: representation, dynamics, prediction.

The latent state is scaled to [0, 1]; Schrittwieser et al., "Mastering Atari, Go, chess and shogi by
planning with a learned model", 2020, https://arxiv.org/abs/1911.08265, appendix G. It is a vector,
from any encoder, and dynamics and predictions are dense layers.

Axis legend: `T` time, `B` streams, `F` features, `O` outputs of the policy, `Z` atoms.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from dm_env import specs

from agents.networks import encoders, heads, layers
from agents.networks import network as networks
from podracers import environment, errors

_EPSILON = 1e-5  # a latent whose entries are all equal must not be divided by zero


class Prediction(NamedTuple):
    """The predicted policy and value of a latent state."""

    policy: jax.Array  # [..., O] logits of all actions, or outputs for an action head
    value: jax.Array  # [..., Z] logits


def scale_latent(latent: jax.Array) -> jax.Array:
    """Returns the latent `[..., F]`, shifted and scaled so that its entries span [0, 1]."""
    least = jnp.min(latent, axis=-1, keepdims=True)
    most = jnp.max(latent, axis=-1, keepdims=True)
    return (latent - least) / (most - least + _EPSILON)


class _Hidden(nn.Module):
    """Dense layers with a ReLU after each of them."""

    sizes: Sequence[int]

    @nn.compact
    def __call__(self, features):
        hidden = layers.mlp(layers.as_floats(features), self.sizes, jax.nn.relu)
        return hidden.astype(jnp.float32)


class _Representation(nn.Module):
    """From observations to latents."""

    torso: networks.Torso
    latent_size: int

    def initial_states(self, batch_size: int) -> tuple:
        return (self.torso.initial_state(batch_size),)

    @nn.compact
    def __call__(self, states, observation, first):
        """Returns latents `[T, B, F]` and the states after them."""
        latent, state = self.torso(states[0], observation, first)
        latent = layers.Dense(self.latent_size, scale=1.0)(latent)
        return scale_latent(latent), (state,)


class _Dynamics(nn.Module):
    """From a latent and an action of the specification to the next latent and the reward."""

    action: specs.BoundedArray
    num_atoms: int
    hidden_sizes: tuple[int, ...]
    learns_turns: bool = False

    @nn.compact
    def __call__(self, latent, action):
        """Returns the latent `[..., F]`, logits `[..., Z]` of the reward, and that of a pass.

        The last, `[...]`, is that of the probability that the other player is to move; None unless
        the model learns turns.
        """
        taken = heads.features(action, self.action)
        hidden = _Hidden(self.hidden_sizes)(jnp.concatenate([latent, taken], axis=-1))
        change = layers.Dense(latent.shape[-1], scale=1.0, name="change")(hidden)
        reward = layers.Dense(self.num_atoms, scale=0.01, name="reward")(hidden)
        passes = None
        if self.learns_turns:
            passes = layers.Dense(1, scale=0.01, name="passes")(hidden)[..., 0]
        return scale_latent(latent + change), reward, passes


class _Predictor(nn.Module):
    """From a latent, or from features of an observation, to a policy and a value.

    With several cells, the inputs of the policy's layer are the latent.
    """

    num_outputs: int
    num_atoms: int
    hidden_sizes: tuple[int, ...]
    num_cells: int = 1

    @nn.compact
    def __call__(self, latent):
        """Returns the `Prediction` `[...]`."""
        hidden = _Hidden(self.hidden_sizes)(latent)
        layer = layers.Dense(self.num_outputs, 0.01, num_cells=self.num_cells, name="policy")
        policy = layer(hidden if self.num_cells == 1 else latent)
        value = layers.Dense(self.num_atoms, scale=0.01, name="value")(hidden)
        return Prediction(policy, value)


class _Projector(nn.Module):
    """From latents to projections, which the consistency loss compares.

    Ye et al., "Mastering Atari Games with Limited Data", 2021, https://arxiv.org/abs/2111.00210,
    with layer normalisation instead of batch normalisation, and two layers in the projection, not
    three.
    """

    size: int

    @nn.compact
    def __call__(self, latent):
        """Returns projections `[..., size]`, and predictions of those that are observed."""
        sizes = (self.size, self.size)
        projection = layers.mlp(latent, sizes, jax.nn.relu, layer_norm=True)
        hidden = layers.mlp(projection, (self.size,), jax.nn.relu, layer_norm=True)
        return projection, layers.Dense(self.size, scale=1.0)(hidden)


class Model(NamedTuple):
    """The networks of representation, dynamics and prediction."""

    representation: networks.Composed
    dynamics: _Dynamics
    predictor: _Predictor
    projector: _Projector | None = None  # a consistency loss reads it

    def init(self, key: jax.Array):
        """Returns parameters, with an entry for each network."""
        keys = dict(zip(self._fields, jax.random.split(key, 3)))
        timestep = networks.zero_timestep(self.representation.spec)
        representation = self.representation.init(keys["representation"], timestep)
        core = self.representation.initial_core(1)
        latent, _ = jax.eval_shape(self.representation.step, representation, core, timestep)
        action = self.dynamics.action
        latent, action = jnp.zeros(latent.shape), jnp.zeros((1, *action.shape), action.dtype)
        params = {
            "representation": representation,
            "dynamics": self.dynamics.init(keys["dynamics"], latent, action)["params"],
            "predictor": self.predictor.init(keys["predictor"], latent)["params"],
        }
        if self.projector is not None:
            params["projector"] = self.projector.init(jax.random.fold_in(key, 3), latent)["params"]
        return params

    def predict(self, params, latent: jax.Array) -> Prediction:
        """Returns the `Prediction` `[...]` of latents `[..., F]`."""
        return networks.apply(self.predictor, params["predictor"], latent)

    def imagine(self, params, latent: jax.Array, action: jax.Array):
        """Returns the latents after actions `[..., *shape]`, and logits: see `_Dynamics`."""
        return networks.apply(self.dynamics, params["dynamics"], latent, action)

    def inconsistency(self, params, imagined: jax.Array, observed: jax.Array) -> jax.Array:
        """Returns the negative cosine similarity `[...]` of projections, in [-1, 1].

        Those of `observed` latents `[..., F]`, through which no gradient passes, are predicted from
        the latents `imagined` by the dynamics.
        """
        assert self.projector is not None
        project = functools.partial(networks.apply, self.projector, params["projector"])
        _, predicted = project(imagined)
        projection, _ = project(observed)
        return -optax.losses.cosine_similarity(
            predicted, jax.lax.stop_gradient(projection), epsilon=_EPSILON
        )


def model(
    spec: environment.EnvironmentSpec,
    num_outputs: int,
    num_atoms: int,
    *,
    encoder: nn.Module | None = None,
    core: nn.Module | None = None,
    frame_stack: int = 1,
    latent_size: int = 128,
    hidden_sizes: Sequence[int] = (128,),
    projection_size: int | None = None,
) -> Model:
    """Returns the three networks.

    Args:
      spec: environment specification.
      num_outputs: number of outputs of the policy, `O`.
      num_atoms: number of atoms of rewards and values, `Z`.
      encoder: module of `agents.networks.encoders`; by default two ReLU layers of 128.
      core: module of `agents.networks.cores`; by default none. MuZero refuses one with memory.
      frame_stack: number of frames in the encoder's input; 1 for no stack.
      latent_size: size of the latent.
      hidden_sizes: sizes of the hidden layers of dynamics and of prediction.
      projection_size: size of projections for a consistency loss; None without one.
    """
    errors.require_types(model, locals())
    torso = networks.Torso(encoder or encoders.MLP((128, 128), "relu"), core)
    sizes = num_atoms, tuple(hidden_sizes)
    module = _Representation(torso, latent_size)
    representation = networks.Composed(spec, module, frame_stack, torso.encoder)
    projector = _Projector(projection_size) if projection_size else None
    learns_turns = spec.players == 2 and not spec.alternates
    dynamics = _Dynamics(spec.action, *sizes, learns_turns)
    return Model(representation, dynamics, _Predictor(num_outputs, *sizes), projector)


class _PolicyValue(nn.Module):
    """AlphaZero's network: a policy and a value of observations."""

    torso: networks.Torso
    predictor: _Predictor

    def initial_states(self, batch_size: int) -> tuple:
        return (self.torso.initial_state(batch_size),)

    @nn.compact
    def __call__(self, states, observation, first):
        """Returns the `Prediction` `[T, B, ...]` and the states after it."""
        features, state = self.torso(states[0], observation, first)
        return self.predictor(features), (state,)


def policy_value(
    spec: environment.EnvironmentSpec,
    num_outputs: int,
    num_atoms: int,
    *,
    encoder: nn.Module | None = None,
    core: nn.Module | None = None,
    hidden_sizes: Sequence[int] = (128,),
    num_cells: int = 1,
) -> networks.Composed:
    """Returns a network whose output is a `Prediction`.

    Args:
      spec: environment specification.
      num_outputs: number of outputs of the policy, `O`.
      num_atoms: number of atoms of rewards and values, `Z`.
      encoder: module of `agents.networks.encoders`; by default two ReLU layers of 128.
      core: module of `agents.networks.cores`; by default none. AlphaZero refuses one with memory.
      hidden_sizes: sizes of the hidden layers after the encoder.
      num_cells: see `networks.actor_critic`; hidden layers are those of the value alone then.
    """
    errors.require_types(policy_value, locals())
    torso = networks.Torso(encoder or encoders.MLP((128, 128), "relu"), core)
    predictor = _Predictor(num_outputs, num_atoms, tuple(hidden_sizes), num_cells)
    return networks.Composed(spec, _PolicyValue(torso, predictor), encoder=torso.encoder)
