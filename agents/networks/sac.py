"""SAC's networks: a policy, two critics, and where images are seen an encoder that they share.

The encoder belongs to the critics: their loss alone trains it, and the policy reads its features
under stop-gradient, as in Yarats et al., "Improving Sample Efficiency in Model-Free Reinforcement
Learning from Images", 2019, https://arxiv.org/abs/1910.01741. An encoder of the policy's own would
cost as much again and learn from a weaker signal, and the policy's gradient in a shared one would
move what the critics' targets rest on. Vectors need no encoder: the networks see them as they are.

Axis legend: `T` time, `B` streams, `N` rows, `F` features, `D` components of an action.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from agents.networks import encoders, layers, sac_policies
from agents.networks import network as networks
from podracers import environment, types


class Params(NamedTuple):
    """All that is learnt."""

    policy: types.PyTree
    critic: types.PyTree  # of both critics, and of the encoder under "encoder"
    log_temperature: jax.Array  # float32


class PolicyModule(nn.Module):
    """Dense layers from features to what the policy is made of.

    Attributes:
      num_outputs: how many numbers it puts out.
      hidden_sizes: of the dense layers.
      activation: see `encoders.MLP`.
    """

    num_outputs: int
    hidden_sizes: Sequence[int]
    activation: str

    @nn.compact
    def __call__(self, features):
        """Returns `[N, num_outputs]`."""
        hidden = encoders.MLP(self.hidden_sizes, self.activation)(features)
        return layers.Dense(self.num_outputs, scale=0.01)(hidden)


class CriticModule(nn.Module):
    """Two critics, which differ in nothing but their initial parameters, on one encoder.

    Attributes:
      num_values: how many values each puts out.
      hidden_sizes: of the dense layers.
      activation: see `encoders.MLP`.
      encoder: None for features that are the observation itself.
    """

    num_values: int
    hidden_sizes: Sequence[int]
    activation: str
    encoder: nn.Module | None = None

    def setup(self):
        """Makes two of everything but the encoder."""
        self.bodies = [encoders.MLP(self.hidden_sizes, self.activation) for _ in range(2)]
        self.heads = [layers.Dense(self.num_values, scale=1.0) for _ in range(2)]

    def encode(self, observation):
        """Returns features `[N, F]`, or the observation where there is no encoder."""
        return observation if self.encoder is None else self.encoder(observation)

    def __call__(self, features, action):
        """Returns values `[2, N, num_values]` of actions `[N, D]` (None for values of all)."""
        values = [head(body((features, action))) for body, head in zip(self.bodies, self.heads)]
        return jnp.stack(values)

    def everything(self, observation, action):
        """Returns values `[2, N, num_values]`, from the observation on."""
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
    """A policy and two critics, which remember nothing but a stack of frames.

    Attributes:
      spec: of the environment.
      kind: of the actions.
      policy: a module, `policy(features)`.
      critic: a module, `critic(features, action)`, with a method `encode`.
      frames: a network without parameters that puts out stacks of frames.
    """

    spec: environment.EnvironmentSpec
    kind: sac_policies.Policy
    policy: PolicyModule
    critic: CriticModule
    frames: networks.Composed

    def init(self, key: jax.Array, log_temperature: float) -> Params:
        """Returns fresh parameters."""
        policy_key, critic_key = jax.random.split(key)
        timestep = networks.zero_timestep(self.spec)
        observation, _ = self.frames.step({}, self.initial_core(1), timestep)
        action = sac_policies.zero_action(self.kind, self.spec)
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
        """Returns `[2, N, num_values]`."""
        return self.critic.apply({"params": critic}, features, action)


def sac_network(
    spec: environment.EnvironmentSpec,
    kind: sac_policies.Policy,
    *,
    hidden_sizes: Sequence[int] = (256, 256),
    activation: str = "relu",
    encoder: nn.Module | None = None,
    frame_stack: int = 1,
) -> SACNetwork:
    """Returns the usual network.

    Args:
      spec: of the environment.
      kind: of its actions.
      hidden_sizes: of the dense layers of the policy and of each critic.
      activation: see `encoders.MLP`.
      encoder: a module of `agents.networks.encoders` that all share, for images; None for none.
      frame_stack: how many frames are seen; 1 for no stack.
    """
    return SACNetwork(
        spec,
        kind,
        PolicyModule(kind.num_outputs, hidden_sizes, activation),
        CriticModule(kind.num_values, hidden_sizes, activation, encoder),
        networks.Composed(spec, _Frames(), frame_stack),
    )
