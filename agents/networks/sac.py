"""SAC's networks.

`SACNetwork` is a policy, critics (two, as published), and where images are seen an encoder that
they share. The encoder belongs to the critics: their loss alone trains it, and the policy reads its
features under stop-gradient, as in Yarats et al., "Improving Sample Efficiency in Model-Free
Reinforcement Learning from Images", 2019, https://arxiv.org/abs/1910.01741. An encoder of the
policy's own would cost as much again and learn from a weaker signal, and the policy's gradient in a
shared one would move what the critics' targets rest on. Vectors need no encoder: the networks see
them as they are. `sac_heads` says what the outputs of the policy and of the critics mean.

Axis legend: `...` any axes, `T` time, `B` streams, `N` rows, `F` features, `D` components of a
continuous action, `C` critics.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from agents.networks import encoders, layers, sac_heads
from agents.networks import network as networks
from podracers import environment, errors, types


class Params(NamedTuple):
    """All that is learnt."""

    policy: types.PyTree
    critic: types.PyTree  # all critics, and the encoder under "encoder"
    log_temperature: jax.Array  # float32


class PolicyModule(nn.Module):
    """From features to what the policy is made of.

    Attributes:
      num_outputs: number of outputs.
      body: module of `agents.networks.encoders` before the last layer.
      trunk: module before the body; None for none.
    """

    num_outputs: int
    body: nn.Module
    trunk: nn.Module | None = None

    @nn.compact
    def __call__(self, features):
        """Returns `[N, num_outputs]`."""
        features = features if self.trunk is None else self.trunk(features)
        hidden = self.body.clone(parent=self, name=None)(features).astype(jnp.float32)
        return layers.Dense(self.num_outputs, scale=0.01)(hidden)


class CriticModule(nn.Module):
    """Critics that differ in nothing but their initial parameters, on one encoder.

    Attributes:
      num_values: number of outputs of each critic.
      body: module of `agents.networks.encoders` before the last layer of each critic, which sees
        features and an action.
      num_critics: number of critics, `C`.
      encoder: module of `agents.networks.encoders`; None if the observation itself is the features.
      trunk: module that features pass before they meet the action; None for none.
    """

    num_values: int
    body: nn.Module
    num_critics: int = 2
    encoder: nn.Module | None = None
    trunk: nn.Module | None = None

    def __post_init__(self):
        """Refuses impossible numbers of critics."""
        errors.require_count(self, "num_critics")
        super().__post_init__()

    def setup(self):
        """Makes several of everything but the encoder."""
        self.bodies = [self.body.clone(parent=None, name=None) for _ in range(self.num_critics)]
        self.heads = [layers.Dense(self.num_values, scale=1.0) for _ in self.bodies]

    def encode(self, observation):
        """Returns features `[N, F]`, or the observation where there is no encoder."""
        if self.encoder is None:
            return observation
        return self.encoder(observation).astype(jnp.float32)

    def __call__(self, features, action):
        """Returns values `[C, N, num_values]` of actions `[N, D]` (None for values of all)."""
        features = features if self.trunk is None else self.trunk(features)
        pairs, seen = zip(self.bodies, self.heads), (features, action)
        return jnp.stack([head(body(seen).astype(jnp.float32)) for body, head in pairs])

    def everything(self, observation, action):
        """Returns values `[C, N, num_values]`, from the observation on."""
        return self(self.encode(observation), action)


class _Frames(nn.Module):
    """Shows what the encoders see."""

    def initial_states(self, batch_size: int) -> tuple[()]:
        """Returns `()`."""
        del batch_size
        return ()

    def __call__(self, states, observation, first):
        """Returns the observation and `()`."""
        del first
        return observation, states


@dataclasses.dataclass(frozen=True, eq=False)
class SACNetwork:
    """A policy and critics, which remember nothing but a stack of frames.

    Attributes:
      spec: environment specification.
      head: head for the environment's actions.
      policy: module, `policy(features)`.
      critic: module, `critic(features, action)`, with a method `encode`.
      frames: network without parameters that puts out stacks of frames.
    """

    spec: environment.EnvironmentSpec
    head: sac_heads.SACHead
    policy: PolicyModule
    critic: CriticModule
    frames: networks.Composed

    def init(self, key: jax.Array, log_temperature: float) -> Params:
        """Returns fresh parameters."""
        policy_key, critic_key = jax.random.split(key)
        timestep = networks.zero_timestep(self.spec)
        observation, _ = self.frames.step({}, self.initial_core(1), timestep)
        action = jnp.zeros((1, *self.spec.action.shape), self.spec.action.dtype)
        action = self.head.to_critics(action)
        critic = self.critic.init(critic_key, observation, action, method="everything")["params"]
        policy = self.policy.init(policy_key, self.encode(critic, observation))["params"]
        return Params(policy, critic, jnp.asarray(log_temperature, jnp.float32))

    def initial_core(self, batch_size: int) -> Any:
        """Returns the frames of `B` streams before their first one; `()` without a stack."""
        return self.frames.initial_core(batch_size)

    @property
    def memory_length(self) -> int:
        """How many frames before it an output depends on."""
        return self.frames.frame_stack - 1

    def observe(self, core: Any, timestep: types.TimeStep) -> tuple[types.PyTree, Any]:
        """Returns what encoders see of a time step `[B, ...]`, and the core after it."""
        return self.frames.step({}, core, timestep)

    def observe_after(self, timestep: types.TimeStep) -> types.PyTree:
        """Returns what encoders see of time steps `[T, B, ...]` but the first `memory_length`."""
        core = self.initial_core(timestep.step_type.shape[1])
        return networks.unroll_after(self.frames, {}, core, timestep, self.memory_length)

    def encoder_params(self, critic: types.PyTree) -> types.PyTree:
        """Returns the part of the critics' parameters that `encode` needs."""
        return {name: value for name, value in critic.items() if name == "encoder"}

    def encode(self, critic: types.PyTree, observation: types.PyTree) -> types.PyTree:
        """Returns features `[N, ...]`."""
        return self.critic.apply({"params": critic}, observation, method="encode")

    def outputs(self, policy: types.PyTree, features: types.PyTree) -> jax.Array:
        """Returns what the policy is made of, `[N, num_outputs]`."""
        return self.policy.apply({"params": policy}, features)

    def values(
        self, critic: types.PyTree, features: types.PyTree, action: jax.Array | None
    ) -> jax.Array:
        """Returns `[C, N, num_values]`."""
        return self.critic.apply({"params": critic}, features, action)


def sac_network(
    spec: environment.EnvironmentSpec,
    head: sac_heads.SACHead,
    *,
    hidden_sizes: Sequence[int] = (256, 256),
    activation: str = "relu",
    layer_norm: bool = False,
    policy_body: nn.Module | None = None,
    critic_body: nn.Module | None = None,
    num_critics: int = 2,
    encoder: nn.Module | None = None,
    trunk_size: int | None = None,
    frame_stack: int = 1,
) -> SACNetwork:
    """Returns the usual network.

    Args:
      spec: environment specification.
      head: head for its actions.
      hidden_sizes: sizes of the dense layers of the policy and of each critic.
      activation: activation of these layers, see `encoders.MLP`.
      layer_norm: whether these layers are normalised, see `encoders.MLP`.
      policy_body: module of `agents.networks.encoders` in place of the policy's dense layers.
      critic_body: the same of each critic.
      num_critics: number of critics, the lowest of which counts.
      encoder: module of `agents.networks.encoders` that all share, for images; None for none.
      trunk_size: size of a dense layer with layer normalisation and a hyperbolic tangent that
        follows the encoder, one of the policy and one of the critics, as in Kostrikov et al. 2020,
        https://arxiv.org/abs/2004.13649; None for none.
      frame_stack: number of frames that are seen; 1 for no stack.
    """
    errors.require_types(sac_network, locals())
    body = encoders.MLP(hidden_sizes, activation, layer_norm)
    trunk = encoders.MLP((trunk_size,), "tanh", layer_norm=True) if trunk_size else None
    return SACNetwork(
        spec,
        head,
        PolicyModule(head.num_outputs, policy_body or body, trunk),
        CriticModule(head.num_values, critic_body or body, num_critics, encoder, trunk),
        networks.Composed(spec, _Frames(), frame_stack),
    )
