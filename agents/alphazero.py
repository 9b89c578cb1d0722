"""AlphaZero: tree search with the environment itself as the model.

Silver et al., "A general reinforcement learning algorithm that masters chess, shogi, and Go through
self-play", 2018, https://doi.org/10.1126/science.aar6404, for one player.

The search needs the environment's state, and a runner hands an agent nothing but time steps. So the
state comes with the observation: `searchable.Searchable` puts it there, under a key that no network
sees, and puts the environment into the specification. Only JAX environments can be searched.

Where an environment draws random numbers while it steps, its state holds the key, and the search
foresees what will be drawn. There, use MuZero.

Axis legend: `T` time, `B` streams, `N` drawn sequences, `A` actions, `Z` atoms.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mctx

from agents import networks, planning, preprocessing
from agents.networks import encoders
from agents.networks import muzero as muzero_networks
from podracers import environment, errors, types

_ILLEGAL = -1e9  # added to the logit of what the environment forbids


class _Node(NamedTuple):
    """A node of the tree, without batch axis."""

    state: types.PyTree  # of the environment, as `environment.STATE` shows it
    ended: jax.Array  # bool, the episode ended here or before
    value: jax.Array  # of the network
    logits: jax.Array  # [A] of the network


@dataclasses.dataclass(frozen=True, eq=False)
class AlphaZero(planning.Planner):
    """The agent; see `Planner` and `OffPolicy` for the options that it shares.

    Attributes:
      network: `network(spec, num_actions, num_atoms)` returns a network that puts out a
        `muzero_networks.Prediction`.
    """

    network: Callable[..., networks.Network] = muzero_networks.policy_value

    def __post_init__(self):
        """Refuses impossible options."""
        if self.spec.searched is None:
            raise errors.UserError(
                f"AlphaZero searches with the environment itself, and {self.spec.name} does not "
                f"show its state: put it into searchable.Searchable if it is a JAX environment, "
                f"else use MuZero"
            )
        super().__post_init__()
        if self._burn_in:
            raise errors.UserError("AlphaZero sees no stacks of frames: expected frame_stack = 1")

    @property
    def _burn_in(self) -> int:
        return self._network.memory_length

    def _init_params(self, key):
        return self._network.init(key, networks.zero_timestep(self.spec))

    def init_learner(self, key):
        """Returns fresh parameters; the environment's states are none of the observations seen."""
        learner = super().init_learner(key)
        if self.normalize_observations:
            seen = environment.without_state(self.spec.observation)
            learner = learner._replace(normalizer=preprocessing.init(seen))
        return learner

    def init_memory(self, rollout):
        """Returns an empty replay, without the states, which only acting needs."""
        return super().init_memory(rollout._replace(timestep=_blind(rollout.timestep)))

    def update(self, state, rollout, key):
        """Stores one rollout without the states, and takes the gradient steps that it allows."""
        return super().update(state, rollout._replace(timestep=_blind(rollout.timestep)), key)

    def init_actor(self, env_id, num_envs, evaluation=False):
        """Returns `()`."""
        return ()

    def _root(self, params, core, timestep):
        seen = self._normalized(params.normalizer, _blind(timestep))
        prediction, core = self._network.step(params.params, core, seen)
        root = self._root_output(prediction, ())
        state = timestep.observation[environment.STATE]
        node = _Node(state, timestep.last(), root.value, root.prior_logits)
        return root.replace(embedding=node), core

    def _model(self, params):
        def step(action, node: _Node):
            timestep, state = self.spec.searched.step_from(node.state, action)
            row = types.Rollout(jax.tree.map(lambda x: x[None], timestep), (), (), ())
            row = self._learnt_from(params.normalizer, row).timestep
            prediction, _ = self._network.step(params.params, (), row)
            reward, prediction = jax.tree.map(lambda x: x[0], (row.reward, prediction))
            logits = prediction.policy
            mask = encoders.action_mask(timestep.observation)
            if mask is not None:
                logits = jnp.where(mask | ~jnp.any(mask), logits, _ILLEGAL)
            after = _Node(state, timestep.last(), self._support.decode(prediction.value), logits)
            # Nothing follows an ending: whoever goes on stays, and changes no mean.
            after = jax.tree.map(lambda x, y: jnp.where(node.ended, x, y), node, after)
            output = mctx.RecurrentFnOutput(
                reward=jnp.where(node.ended, 0.0, reward),
                discount=jnp.where(node.ended, 1.0, self.gamma * timestep.discount),
                prior_logits=after.logits,
                value=after.value,
            )
            return output, after

        return step

    def _values(self, params, timestep):
        return self._network.unroll(params, (), timestep)[0].value

    def _unrolled(self, params, rollout):
        """Predicts for the first observation of each sequence."""
        first = jax.tree.map(lambda x: x[:1], rollout.timestep)
        prediction, _ = self._network.unroll(params, (), first)
        none: Any = prediction.value[:0]
        return planning.Unrolled(prediction.policy, prediction.value, reward=none)


def _blind(timestep: types.TimeStep) -> types.TimeStep:
    """Returns time steps without the states of the environment."""
    return timestep._replace(observation=environment.without_state(timestep.observation))
