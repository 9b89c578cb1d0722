"""Networks: encoders, cores and heads composed behind one protocol.

A network maps time steps to outputs. Its memory (recurrent states and stacks of frames) is its
`core`, which it resets where a time step is FIRST.

Axis legend: `T` time, `B` streams, `F` features.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from agents.backends import layouts
from agents.networks import cores, encoders, heads, layers, popart
from podracers import environment, errors, parallel, types

_MAX_FRAMES = 256  # frames of a stack; each adds operations, and 30 ms to a program's compilation
_MAX_CODES = 2048  # units of one-hot codes of a part of an observation
_BYTES_AT_ONCE = 2**26  # bytes of observations in a part of `unroll_in_parts`: 9,500 Atari frames


@runtime_checkable
class Network(Protocol):
    """A pure function of parameters, core and time steps."""

    @property
    def is_recurrent(self) -> bool:
        """Whether a recurrent state is carried from step to step.

        If not, time steps may be drawn in any order after `prepare`.
        """

    @property
    def memory_length(self) -> int | None:
        """Number of earlier time steps that an output depends on; None of a recurrent network."""

    def init(self, key: jax.Array, timestep: types.TimeStep) -> types.PyTree:
        """Returns parameters; of `timestep` `[B, ...]` only shapes and dtypes count."""

    def initial_core(self, batch_size: int) -> Any:
        """Returns the core of `B` streams before their first time step."""

    def step(self, params: types.PyTree, core: Any, timestep: types.TimeStep) -> tuple[Any, Any]:
        """Returns outputs `[B, ...]` and the core after them."""

    def unroll(self, params: types.PyTree, core: Any, timestep: types.TimeStep) -> tuple[Any, Any]:
        """Returns outputs `[T, B, ...]` and the core after them; equals a scan of `step`."""

    def prepare(self, core: Any, timestep: types.TimeStep) -> tuple[Any, types.TimeStep]:
        """Moves the frames of the core `[B, ...]` into the observations `[T, B, ...]`.

        Agents that learn from time steps more than once call it first. The outputs of `unroll` stay
        the same. Recurrent states stay in the core; without them, each time step then stands alone,
        and the core is empty.
        """


def apply(module: nn.Module, params: Any, *inputs: Any, **options: Any) -> Any:
    """Returns the outputs of a Flax module; `Module.apply` may also return mutated variables."""
    return module.apply({"params": params}, *inputs, **options)


class Core(NamedTuple):
    """Memory of a network."""

    frames: types.PyTree  # [B, K - 1, ...] previous frames; () without a stack
    states: tuple  # recurrent state of each torso, [B, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Composed:
    """A network of a frame stack, one or more torsos (encoder and core), and heads.

    Attributes:
      spec: environment specification.
      module: Flax module, `module(states, observation, first) -> (output, states)`, all
        `[T, B, ...]`, with `initial_states(batch_size)`.
      frame_stack: number of frames in the encoders' inputs; 1 for no stack.
      encoder: module that reads the observations. Categorical parts (`environment.num_values`) are
        one-hot codes for it, unless its `reads_integers` is true.
      packs_frames: whether frames pass `layouts.pack` before they are stacked, for encoders that
        read packed ones.
    """

    spec: environment.EnvironmentSpec
    module: nn.Module
    frame_stack: int = 1
    encoder: nn.Module | None = None
    packs_frames: bool = False

    def __post_init__(self):
        errors.require_count(self, "frame_stack", most=_MAX_FRAMES)
        if self.spec.hidden and self.spec.players == 2 and self.memory_length != 0:
            raise errors.UserError(
                f"{self.spec.name} hides observations of one player from the other, and a stream "
                "has both: expected a network without memory (no core, frame_stack = 1)"
            )

    @functools.cached_property
    def is_recurrent(self) -> bool:
        """Whether a torso has a recurrent core; a frame stack is not recurrent."""
        return bool(jax.tree.leaves(jax.eval_shape(lambda: self.module.initial_states(1))))

    @property
    def memory_length(self) -> int | None:
        """`frame_stack - 1`, or None with a recurrent core."""
        return None if self.is_recurrent else self.frame_stack - 1

    def init(self, key: jax.Array, timestep: types.TimeStep) -> types.PyTree:
        timestep = jax.tree.map(lambda x: jnp.asarray(x)[None, :1], timestep)
        core = self.initial_core(1)
        observation, states, _ = self._inputs(core, timestep)
        observation = self._coded(observation)
        return self.module.init(key, states, observation, timestep.first())["params"]

    def initial_core(self, batch_size: int) -> Any:
        """Returns the core of `B` streams before their first time step; `()` for no memory."""
        states = self.module.initial_states(batch_size)
        if self.frame_stack == 1:
            return Core((), states) if jax.tree.leaves(states) else ()
        shape = (batch_size, self.frame_stack - 1)
        zeros = encoders.without_mask(self.spec.zero_observation())
        frames = jax.tree.map(lambda x: jnp.zeros((*shape, *x.shape), x.dtype), zeros)
        return Core(self._packed(frames), states)

    def step(self, params, core, timestep, key=None):
        timestep = jax.tree.map(lambda x: x[None], timestep)
        output, core = self.unroll(params, core, timestep, key)
        return jax.tree.map(lambda x: x[0], output), core

    def unroll(self, params, core, timestep, key=None):
        """See `Network`; `key` `[B]` is for a module that is noisy, and None for no noise."""
        observation, states, frames = self._inputs(core, timestep)
        noise = () if key is None else (key,)
        output, states = apply(
            self.module, params, states, self._coded(observation), timestep.first(), *noise
        )
        return output, (Core(frames, states) if core != () else ())

    def prepare(self, core, timestep):
        if self.frame_stack == 1:
            return core, timestep
        # In two parts, because agents learn from all time steps but the last.
        before = jax.tree.map(lambda x: x[:-1], timestep)
        last = jax.tree.map(lambda x: x[-1:], timestep)
        stacks, _, frames = self._inputs(core, before)
        stack, _, _ = self._inputs(core._replace(frames=frames), last)
        stacked = jax.tree.map(lambda *xs: jnp.concatenate(xs), stacks, stack)
        if isinstance(timestep.observation, dict):  # keep the action mask
            stacked = timestep.observation | stacked
        return core._replace(frames=()), timestep._replace(observation=stacked)

    def _inputs(self, core: Any, timestep: types.TimeStep) -> tuple[types.PyTree, tuple, Any]:
        """Returns the observation with stacked frames, the states, and the new frames."""
        observation = encoders.without_mask(timestep.observation)
        if core == ():
            return observation, self.module.initial_states(timestep.step_type.shape[1]), ()
        if not jax.tree.leaves(core.frames):  # no stack, or stacked by `prepare`
            return observation, core.states, ()
        stacks, frames = cores.stack_frames(
            core.frames, self._packed(observation), timestep.first(), self.frame_stack
        )
        return stacks, core.states, frames

    def _coded(self, observation: types.PyTree) -> types.PyTree:
        """Returns the (stacked) observation `[T, B, ...]` with codes in categorical parts."""

        def coded(sizes: np.ndarray | None, leaf: jax.Array) -> jax.Array:
            if sizes is None:
                return leaf
            leaf = leaf if leaf.ndim > 2 else leaf[..., None]  # [T, B, ..., K * D]
            return layers.one_hot(leaf, np.tile(sizes, leaf.shape[-1] // len(sizes)))

        if getattr(self.encoder, "reads_integers", False):
            return observation
        return jax.tree.map(coded, self._num_values, observation, is_leaf=lambda x: x is None)

    @functools.cached_property
    def _num_values(self) -> types.PyTree:
        """`environment.num_values` of each part of the observations; None where it has no codes."""

        def sizes_of(path: tuple, spec: specs.Array) -> np.ndarray | None:
            sizes = environment.num_values(spec)
            if sizes is not None and sizes.sum() > _MAX_CODES:
                name = f"{self.spec.name}: observation{jax.tree_util.keystr(path)}"
                raise errors.UserError(
                    f"{name} has {sizes.sum():,} values, and one-hot codes have at most "
                    f"{_MAX_CODES:,}: choose the encoder encoders.OneHot (with its num_values) or "
                    "tables.Table (a learnt row of each value)"
                )
            return sizes

        spec = encoders.without_mask(self.spec.observation)
        return jax.tree_util.tree_map_with_path(sizes_of, spec)

    def _packed(self, observation: types.PyTree) -> types.PyTree:
        if not self.packs_frames:
            return observation
        return jax.tree.map(
            lambda sizes, leaf: layouts.pack(leaf) if sizes is None else leaf,
            *(self._num_values, observation),
            is_leaf=lambda x: x is None,
        )


class Torso(nn.Module):
    """An encoder and a core.

    Attributes:
      encoder: module of `agents.networks.encoders`, from `[N, ...]` to `[N, F]`.
      core: module of `agents.networks.cores`, from `[T, B, F]` to `[T, B, F']`; None for none.
      keys: parts of a dict observation that the encoder reads; None for everything.
    """

    encoder: nn.Module
    core: nn.Module | None = None
    keys: Sequence[str] | None = None

    def __post_init__(self):
        is_core = self.core is None or hasattr(self.core, "initial_state")
        if not is_core or hasattr(self.encoder, "initial_state"):
            encoder, core = map(errors.path_of, (self.encoder, self.core))
            raise errors.UserError(
                "expected modules of agents.networks.encoders and agents.networks.cores, got "
                f"encoder = {encoder} and core = {core}"
            )
        super().__post_init__()

    @property
    def packs_frames(self) -> bool:
        """Option of `Composed`."""
        return getattr(self.encoder, "packs_frames", False)

    def initial_state(self, batch_size: int) -> Any:
        return () if self.core is None else self.core.initial_state(batch_size)

    def __call__(self, state, observation, first):
        """Returns features `[T, B, F']` and the state after them."""
        length, batch = first.shape

        def row(x: jax.Array) -> jax.Array:
            if x.dtype == jnp.uint32 and not self.packs_frames:  # a number, not packed frames
                x = x.astype(jnp.int32)
            return x.reshape(length * batch, *x.shape[2:])

        rows = jax.tree.map(row, encoders.select(observation, self.keys))
        features = self.encoder(rows).reshape(length, batch, -1)
        if self.core is not None:
            features, state = self.core(state, features, first)
        return features.astype(jnp.float32), state  # also where the compute dtype is bfloat16


class ActorCriticOutput(NamedTuple):
    """The outputs of an actor-critic network."""

    policy: jax.Array  # [..., num_outputs] outputs for the action head
    value: jax.Array  # [...]


class ActorCriticModule(nn.Module):
    """A policy and a value on a shared torso, or on one each.

    Attributes:
      head: action head of the policy.
      torsos: the shared torso, or two: the policy's, then the value's.
      num_cells: number of cells of the policy's layer, see `layers.Dense`.
      initial_std: see `actor_critic`.
    """

    head: heads.ActionHead
    torsos: tuple[Torso, ...]
    num_cells: int = 1
    initial_std: float = 1.0

    def initial_states(self, batch_size: int) -> tuple:
        return tuple(torso.initial_state(batch_size) for torso in self.torsos)

    @nn.compact
    def __call__(self, states, observation, first):
        """Returns `ActorCriticOutput` `[T, B, ...]` and the states after it."""
        features, states = zip(
            *(torso(s, observation, first) for torso, s in zip(self.torsos, states))
        )
        size = self.head.num_outputs - self.head.num_free
        layer = layers.Dense(size, scale=0.01, num_cells=self.num_cells, name="policy")
        policy = layer(features[0])
        if self.head.num_free:
            initializer = nn.initializers.constant(math.log(self.initial_std))
            free = self.param("free_outputs", initializer, (self.head.num_free,))
            free = jnp.broadcast_to(free, (*policy.shape[:-1], self.head.num_free))
            policy = jnp.concatenate([policy, free], axis=-1)
        value = layers.Dense(1, scale=1.0, name="value")(features[-1])[..., 0]
        if self.has_variable("params", popart.NAME):
            value = popart.value(self.get_variable("params", popart.NAME), value)
        return ActorCriticOutput(policy, value), states


def require_cells(num_cells: int, **mixing: Any) -> None:
    """Raises errors.UserError if there are several cells and a part that mixes them, by name."""
    names = [name for name, part in mixing.items() if part]
    if num_cells > 1 and names:
        raise errors.UserError(
            f"num_cells = {num_cells}: expected no {' and no '.join(names)}, which mixes cells"
        )


def actor_critic(
    spec: environment.EnvironmentSpec,
    head: heads.ActionHead,
    *,
    encoder: nn.Module | None = None,
    core: nn.Module | None = None,
    frame_stack: int = 1,
    separate_critic: bool = True,
    num_cells: int = 1,
    initial_std: float = 1.0,
    policy_keys: tuple[str, ...] | None = None,
    critic_keys: tuple[str, ...] | None = None,
    critic_encoder: nn.Module | None = None,
) -> Composed:
    """Returns a network whose output is an `ActorCriticOutput`.

    Args:
      spec: environment specification.
      head: action head of the policy.
      encoder: module of `agents.networks.encoders`; by default two tanh layers of 64.
      core: module of `agents.networks.cores`; by default none.
      frame_stack: number of frames in the encoder's input; 1 for no stack.
      separate_critic: whether the critic has an encoder (and a core) of its own.
      num_cells: number of cells of a grid (or of items) whose actions each follow from their own
        features by shared weights, where the encoder keeps the layout (`CNN` with `hidden_sizes =
        ()`, `DeepSets`) and there is no core; 1 for a dense layer.
      initial_std: standard deviation of continuous actions at the start, in units of their bounds
        (-1 and 1), where it does not depend on the observation. A robot that falls under the noise
        of 1 needs a lower one.
      policy_keys: parts of a dict observation (its outermost keys) that the policy reads; None for
        everything.
      critic_keys: the same of the critic, which may read what the policy cannot, as in Pinto et
        al., "Asymmetric Actor Critic for Image-Based Robot Learning", 2017,
        https://arxiv.org/abs/1710.06542.
      critic_encoder: encoder of a separate critic; by default a copy of `encoder`.
    """
    errors.require_types(actor_critic, locals())
    encoders.require_parts(spec, policy_keys=policy_keys, critic_keys=critic_keys)
    require_cells(num_cells, core=core)
    if not initial_std > 0.0:
        raise errors.UserError(f"initial_std: expected a positive number, got {initial_std}")
    torso = Torso(encoder or encoders.MLP(), core, policy_keys)
    critic = Torso(critic_encoder or torso.encoder, core, critic_keys).clone(_deep_clone=True)
    is_same = policy_keys == critic_keys and critic_encoder is None
    if not separate_critic and not is_same:
        raise errors.UserError(
            "separate_critic: expected True, because the critic has other keys or another encoder"
        )
    if len({getattr(part.encoder, "reads_integers", False) for part in (torso, critic)}) > 1:
        raise errors.UserError(
            "critic_encoder: expected one that reads integers (as encoders.OneHot and "
            "tables.Table do) if and only if the option encoder does"
        )
    torsos = (torso, critic) if separate_critic else (torso,)
    module = ActorCriticModule(head, torsos, num_cells, initial_std)
    packs_frames = torso.packs_frames and critic.packs_frames
    return Composed(spec, module, frame_stack, torso.encoder, packs_frames)


def unroll_after(
    network: Network, params: types.PyTree, core: Any, timestep: types.TimeStep, burn_in: int
) -> Any:
    """Returns the outputs `[T - burn_in, B, ...]` of the time steps after a burn-in.

    The burn-in, the first `burn_in` of the time steps `[T, B, ...]`, only updates the core
    `[B, ...]`. No gradient passes through it, and no encoder runs on it for a frame stack alone.
    """
    if burn_in:
        before = jax.tree.map(lambda x: x[:burn_in], timestep)
        core = jax.lax.stop_gradient(network.unroll(params, core, before)[1])
        timestep = jax.tree.map(lambda x: x[burn_in:], timestep)
    return network.unroll(params, core, timestep)[0]


def unroll_in_parts(
    network: Network,
    params: types.PyTree,
    core: Any,
    timestep: types.TimeStep,
    read: Callable[[Any], jax.Array],
) -> jax.Array:
    """Returns `read(output)` of all time steps `[T, B, ...]`, after the core `[B, ...]`.

    It is computed in parts of equal length for long rollouts of images, because activations of 256
    x 128 Atari frames would take gigabytes at once. It is not meant to be differentiated.
    """
    length = timestep.step_type.shape[0]
    most = max(length * _BYTES_AT_ONCE // parallel.num_bytes(timestep.observation), 1)
    steps = max(n for n in range(1, length + 1) if length % n == 0 and n <= most)

    def part(core: Any, timestep: types.TimeStep) -> tuple[Any, jax.Array]:
        output, core = network.unroll(params, core, timestep)
        return core, read(output)

    parts = jax.tree.map(lambda x: x.reshape(-1, steps, *x.shape[1:]), timestep)
    _, outputs = jax.lax.scan(part, core, parts)
    return jax.tree.map(lambda x: x.reshape(length, *x.shape[2:]), outputs)


def zero_timestep(spec: environment.EnvironmentSpec) -> types.TimeStep:
    """Returns a FIRST time step `[1, ...]` of zeros, to initialise networks with."""
    return jax.tree.map(lambda x: x[None], types.restart(spec.zero_observation()))
