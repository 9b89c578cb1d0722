"""SAC's networks, and its heads for continuous and for discrete actions.

`SACNetwork` is a policy, critics (two, as published), and for images an encoder that they share.
The loss of the critics alone trains the encoder, and the policy reads its features under
stop-gradient, as in Yarats et al., "Improving Sample Efficiency in Model-Free Reinforcement
Learning from Images", 2019, https://arxiv.org/abs/1910.01741. A recurrent core behind the encoder
is shared and trained in the same way.

Axis legend: `...` any axes, `T` time, `B` streams, `N` rows, `F` features, `D` components of a
continuous action, `A` actions, `C` critics.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from dm_env import specs

from agents.networks import encoders, heads, layers
from agents.networks import network as networks
from podracers import environment, errors, types


class Expectation(NamedTuple):
    """Expected value and entropy of a policy in a state; the agent combines them."""

    value: jax.Array  # [N] of the actions, minimum over the critics
    entropy: jax.Array  # [N] nats


# Returns the critics' outputs `[C, N, num_values]` for an action `[N, D]` from `to_critics`.
Critics = Callable[[jax.Array | None], jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Continuous(heads.TanhGaussian):
    """A squashed normal whose mean and deviation depend on the state.

    The critics' inputs and the entropies are in units of the bounds.
    """

    num_values = 1
    default_target_entropy = -1.0
    most_target_entropy = math.log(2.0)  # entropy of the uniform policy
    default_greedy_evaluation = True  # the mean action, as published

    def to_action(self, raw: jax.Array) -> jax.Array:
        return self._to_environment(jnp.tanh(raw))

    def random(self, mask: jax.Array | None, key: jax.Array) -> jax.Array:
        """Returns a uniformly random (legal) action for each of the keys `[N]`."""
        size = (len(self.minimum),)
        return self._to_environment(jax.vmap(lambda k: jax.random.uniform(k, size, minval=-1))(key))

    def to_critics(self, action: jax.Array) -> jax.Array | None:
        """Returns the critics' input, `[N, D]` in `[-1, 1]`, for the environment's actions."""
        return jnp.clip(self.to_units(action.astype(jnp.float32)), -1.0, 1.0)

    def taken(self, values: jax.Array, action: jax.Array) -> jax.Array:
        """Returns the values `[C, N]` of the environment's actions, from critics' outputs."""
        del action
        return values[..., 0]

    def expect(
        self, outputs: jax.Array, mask: jax.Array | None, key: jax.Array, critics: Critics
    ) -> Expectation:
        """Returns a single-sample estimate; gradients pass to `outputs` and to the critics."""
        raw = self.sample(outputs, mask, key)
        value = jnp.min(critics(jnp.tanh(raw))[..., 0], axis=0)
        return Expectation(value, -self.log_prob(outputs, mask, raw))

    def target_entropy(self, setting: float, mask: jax.Array | None) -> jax.Array | float:
        """Returns the entropy to keep, in nats: `setting` times the number of components."""
        del mask
        return setting * len(self.minimum)

    def _to_environment(self, portion: jax.Array) -> jax.Array:
        """Returns float32 `[N, *shape]` within the bounds for `[N, D]` in `[-1, 1]`."""
        minimum, maximum = jnp.array(self.minimum), jnp.array(self.maximum)
        action = minimum + 0.5 * (maximum - minimum) * (portion + 1.0)
        # The sum may round past a bound.
        return jnp.clip(action, minimum, maximum).reshape(-1, *self.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Discrete(heads.Categorical):
    """One discrete action: expectations are sums over the legal ones; methods as of `Continuous`.

    Christodoulou, "Soft Actor-Critic for Discrete Action Settings", 2019,
    https://arxiv.org/abs/1910.07207.
    """

    default_target_entropy = 0.98
    most_target_entropy = 1.0
    default_greedy_evaluation = False

    def random(self, mask, key):
        noise = jax.vmap(lambda k: jax.random.uniform(k, (self.num_values,)))(key)
        return heads.legal_argmax(noise, mask)

    def to_critics(self, action):
        """Returns None: critics return the values of all actions."""
        del action

    def taken(self, values, action):
        return layers.take(values, action)

    def expect(self, outputs, mask, key, critics):
        """Returns the exact expectation over the legal actions."""
        del key
        policy = self.probabilities(outputs, mask)
        value = jnp.sum(policy * jnp.min(critics(None), axis=0), axis=-1)
        return Expectation(value, self.entropy(outputs, mask))

    def target_entropy(self, setting, mask):
        """Returns `setting` times the entropy of the uniform legal policy, `[N]`."""
        if mask is None:
            return setting * math.log(self.num_values)
        legal = jnp.sum(mask, axis=-1)
        # Where nothing is legal, the policy is uniform over everything.
        return setting * jnp.log(jnp.where(legal > 0, legal, self.num_values))


SACHead = Continuous | Discrete


def head_from_spec(spec: environment.EnvironmentSpec) -> SACHead:
    """Returns the head for the actions of an environment.

    Raises:
      UserError: they are neither continuous nor one discrete action.
    """
    if isinstance(spec.action, specs.DiscreteArray):
        return Discrete(spec.num_actions)
    head = heads.from_spec(spec.action)
    if not isinstance(head, heads.Gaussian):
        raise errors.UserError(
            f"SAC needs continuous actions or one discrete action, and those of {spec.name} are "
            f"{spec.action!r}: use PPO or IMPALA"
        )
    return Continuous(head.minimum, head.maximum, head.shape)


class Params(NamedTuple):
    """Learnt parameters."""

    policy: types.PyTree
    critic: types.PyTree  # all critics, and under "encoder" the encoder (with the core, if any)
    log_temperature: jax.Array  # float32


class PolicyModule(nn.Module):
    """Policy network: from features to the outputs that the head reads.

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
    """Critics with separate initial parameters on one encoder.

    Attributes:
      num_values: number of outputs of each critic.
      body: module of `agents.networks.encoders` before the last layer of each critic; its inputs
        are the features and an action.
      num_critics: number of critics, `C`.
      encoder: module of `agents.networks.encoders`; None if the observation itself is the features.
      trunk: module between the features and the action's concatenation; None for none.
    """

    num_values: int
    body: nn.Module
    num_critics: int = 2
    encoder: nn.Module | None = None
    trunk: nn.Module | None = None

    def __post_init__(self):
        errors.require_count(self, "num_critics")
        super().__post_init__()

    def setup(self):
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


class _Memory(nn.Module):
    """Module that returns the features of a torso; without one, the stacked frames themselves."""

    torso: networks.Torso | None = None

    def initial_states(self, batch_size):
        return () if self.torso is None else (self.torso.initial_state(batch_size),)

    def __call__(self, states, observation, first):
        if self.torso is None:
            return observation, states
        features, state = self.torso(states[0], observation, first)
        return features, (state,)


@dataclasses.dataclass(frozen=True, eq=False)
class SACNetwork:
    """A policy and critics, which share their memory.

    Attributes:
      spec: environment specification.
      head: head for the environment's actions.
      policy: module, `policy(features)`.
      critic: module, `critic(features, action)`, with a method `encode`.
      memory: network that stacks frames; with a core, the encoder and the core behind the stack,
        and then `critic.encoder` is None.
      policy_keys: see `sac_network`, as `critic_keys`.
    """

    spec: environment.EnvironmentSpec
    head: SACHead
    policy: PolicyModule
    critic: CriticModule
    memory: networks.Composed
    policy_keys: Sequence[str] | None = None
    critic_keys: Sequence[str] | None = None

    def init(self, key: jax.Array, log_temperature: float) -> Params:
        """Returns fresh parameters."""
        policy_key, critic_key = jax.random.split(key)
        timestep = networks.zero_timestep(self.spec)
        shared = {}
        if self.is_recurrent:
            shared["encoder"] = self.memory.init(jax.random.fold_in(key, 2), timestep)
        observation, _ = self.observe(shared, self.initial_core(1), timestep)
        action = jnp.zeros((1, *self.spec.action.shape), self.spec.action.dtype)
        action = self.head.to_critics(action)
        seen = encoders.select(observation, self.critic_keys)
        critic = self.critic.init(critic_key, seen, action, method="everything")["params"]
        critic = {**critic, **shared}
        features = encoders.select(self.encode(critic, observation), self.policy_keys)
        policy = self.policy.init(policy_key, features)["params"]
        return Params(policy, critic, jnp.asarray(log_temperature, jnp.float32))

    @property
    def is_recurrent(self) -> bool:
        """Whether there is a core."""
        return self.memory.is_recurrent

    def initial_core(self, batch_size: int) -> Any:
        """Returns the memory of `B` streams before their first time step; `()` for none."""
        return self.memory.initial_core(batch_size)

    @property
    def memory_length(self) -> int | None:
        """Number of earlier frames that an output depends on; None with a core."""
        return self.memory.memory_length

    def observe(
        self, critic: types.PyTree, core: Any, timestep: types.TimeStep
    ) -> tuple[types.PyTree, Any]:
        """Returns the input of `encode` for a time step `[B, ...]`, and the core after it."""
        return self.memory.step(critic.get("encoder", {}), core, timestep)

    def encode(self, critic: types.PyTree, observation: types.PyTree) -> types.PyTree:
        """Returns features `[N, ...]`, or the input where `critic` has no encoder."""
        if self.critic.encoder is None:
            return observation
        observation = encoders.select(observation, self.critic_keys)
        return networks.apply(self.critic, critic, observation, method="encode")

    def outputs(self, policy: types.PyTree, features: types.PyTree) -> jax.Array:
        """Returns the policy's outputs `[N, num_outputs]`."""
        features = encoders.select(features, self.policy_keys)
        return networks.apply(self.policy, policy, features)

    def values(
        self, critic: types.PyTree, features: types.PyTree, action: jax.Array | None
    ) -> jax.Array:
        """Returns `[C, N, num_values]`."""
        features = encoders.select(features, self.critic_keys)
        return networks.apply(self.critic, critic, features, action)


def sac_network(
    spec: environment.EnvironmentSpec,
    head: SACHead,
    *,
    hidden_sizes: Sequence[int] = (256, 256),
    activation: str = "relu",
    layer_norm: bool = False,
    policy_body: nn.Module | None = None,
    critic_body: nn.Module | None = None,
    num_critics: int = 2,
    encoder: nn.Module | None = None,
    core: nn.Module | None = None,
    trunk_size: int | None = None,
    frame_stack: int = 1,
    policy_keys: tuple[str, ...] | None = None,
    critic_keys: tuple[str, ...] | None = None,
) -> SACNetwork:
    """Returns SAC's network.

    Args:
      spec: environment specification.
      head: head for its actions.
      hidden_sizes: sizes of the dense layers of the policy and of each critic.
      activation: activation of these layers, see `encoders.MLP`.
      layer_norm: whether these layers are normalised, see `encoders.MLP`.
      policy_body: module of `agents.networks.encoders` in place of the policy's dense layers.
      critic_body: the same of each critic.
      num_critics: number of critics; targets take their minimum.
      encoder: module of `agents.networks.encoders` that all share, for images; None for none, or
        with a core for dense layers of `hidden_sizes`.
      core: module of `agents.networks.cores` behind the encoder, which all share; None for none.
      trunk_size: size of a dense layer with layer normalisation and a hyperbolic tangent that
        follows the encoder (and the core), one of the policy and one of the critics, as in
        Kostrikov et al. 2020, https://arxiv.org/abs/2004.13649; None for none.
      frame_stack: number of stacked frames; 1 for no stack.
      policy_keys: parts of a dict observation that the policy reads, see `networks.actor_critic`.
      critic_keys: the same of the critics; equal to `policy_keys` if they share an encoder or core.
    """
    errors.require_types(sac_network, locals())
    encoders.require_parts(spec, policy_keys=policy_keys, critic_keys=critic_keys)
    if (encoder or core) and policy_keys != critic_keys:
        raise errors.UserError(
            f"{'encoder' if encoder else 'core'}: expected None, because policy_keys and "
            "critic_keys differ; use policy_body and critic_body"
        )
    body = encoders.MLP(hidden_sizes, activation, layer_norm)
    torso = networks.Torso(encoder or body, core, policy_keys) if core else None
    own_encoder = None if core else encoder
    reader = torso.encoder if torso else encoder or (policy_body and critic_body)
    trunk = encoders.MLP((trunk_size,), "tanh", layer_norm=True) if trunk_size else None
    return SACNetwork(
        spec,
        head,
        PolicyModule(head.num_outputs, policy_body or body, trunk),
        CriticModule(head.num_values, critic_body or body, num_critics, own_encoder, trunk),
        networks.Composed(spec, _Memory(torso), frame_stack, reader),
        policy_keys,
        critic_keys,
    )
