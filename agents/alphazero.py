"""AlphaZero: tree search with the environment itself as the model.

Silver et al., "A general reinforcement learning algorithm that masters chess, shogi, and Go through
self-play", 2018, https://doi.org/10.1126/science.aar6404, for one player, or two in turn.
`agents.search.planning` has the formula of the loss.

The search needs the environment's state: `wrappers.Searchable` adds it to the observation, under a
key that networks do not see, and the environment to the specification. Only JAX environments can be
searched. If one draws random numbers in its steps, such as dice, each search draws its own.

Axis legend: `T` time, `B` streams, `N` drawn sequences, `A` actions, `Z` atoms.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import mctx

from agents import networks
from agents.networks import heads
from agents.networks import muzero as muzero_networks
from agents.parts import options
from agents.replay import replay
from agents.search import planning
from podracers import environment, errors, types


class _Node(NamedTuple):
    """A node of the tree, without batch axis."""

    state: types.PyTree  # the environment's, `environment.STATE` in the observation
    ended: jax.Array  # bool, the episode ended here or before
    value: jax.Array  # the network's estimate
    logits: jax.Array  # [A], the network's outputs


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class AlphaZero(planning.SearchAgent):
    """AlphaZero with gradient steps after each rollout as `replay.Replay` counts them.

    A sequence of replay is `n + 1` transitions long, and one state of it is trained on: the first.
    `planning.SearchAgent` describes the options that are not listed here.

    Attributes:
      spec: environment specification, of a `wrappers.Searchable`.
      network: `network(spec, num_outputs, num_atoms)` returns a network with output
        `muzero_networks.Prediction`.
    """

    network: Callable[..., networks.Network] = muzero_networks.policy_value

    def __post_init__(self):
        if self.spec.model is None:
            raise errors.UserError(
                f"AlphaZero searches with the environment itself, and {self.spec.name} does not "
                f"show its state: wrap a JAX environment in wrappers.Searchable, else use MuZero"
            )
        super().__post_init__()
        if self.spec.hidden:
            raise errors.UserError(
                f"AlphaZero searches from the state of {self.spec.name}, part of which is hidden "
                "from the player to move: use an agent without search"
            )
        options.require_feedforward(self, self.net)
        if self.net.memory_length:
            raise errors.UserError("AlphaZero has no stacks of frames: expected frame_stack = 1")

    @functools.cached_property
    def buffer(self) -> replay.Replay:
        return replay.Replay.of(self, self.n_steps + 1)

    def init_learner(self, key):
        """Returns a learner without statistics of the states, which replay does not store."""
        observation = environment.without_state(self.spec.observation)
        return super().init_learner(key)._replace(normalizer=self.preprocess.init(observation))

    def init_actor(self, env_id, num_envs, evaluation=False):
        """Returns the number of moves of each stream's episode so far."""
        return jnp.zeros(env_id.shape, jnp.int32)

    def act(self, params, actor_state, timestep, key, evaluation=False):
        """Searches for each stream; in evaluation without any noise."""
        observation = environment.without_state(timestep.observation)
        seen = self.preprocess.apply(params.normalizer, timestep._replace(observation=observation))
        prediction, _ = self.net.step(params.params, (), seen)
        root = planning.root(prediction, (), self._support)
        model = self.spec.model
        assert model is not None
        state = jax.vmap(model.redrawn)(timestep.observation[environment.STATE], key)
        node = _Node(state, timestep.last(), root.value, root.prior_logits)
        mask = environment.action_mask(timestep.observation)
        moves = jnp.where(timestep.first(), 0, actor_state)
        temperature = self.temperature_at(params, moves, evaluation)
        root = dataclasses.replace(root, embedding=node)
        extras, action = self.searched(self._model(params), root, mask, temperature, key)
        return action, moves + 1, extras

    def _model(self, params):
        """Returns the environment as a model, for the search."""
        model = self.spec.model
        assert model is not None

        def step(action, node: _Node):
            timestep, state = model.step_from(node.state, action)
            row = jax.tree.map(lambda x: x[None], timestep)
            row = self.preprocess.apply(params.normalizer, row)
            prediction, _ = self.net.step(params.params, (), row)
            reward, prediction = jax.tree.map(lambda x: x[0], (row.reward, prediction))
            mask = environment.action_mask(timestep.observation)
            logits = heads.legal_outputs(prediction.policy, mask)
            after = _Node(state, timestep.last(), self._support.decode(prediction.value), logits)
            # The successor of an ended node is the node itself, which changes no mean.
            after = jax.tree.map(lambda x, y: jnp.where(node.ended, x, y), node, after)
            output = mctx.RecurrentFnOutput(
                reward=jnp.where(node.ended, 0.0, reward),
                discount=jnp.where(node.ended, 1.0, self.gamma * timestep.discount),
                prior_logits=after.logits,
                value=after.value,
            )
            return output, after

        return step

    def stored(self, rollout):
        """Returns a rollout without the states of the environment, which only acting needs."""
        observation = environment.without_state(rollout.timestep.observation)
        timestep = rollout.timestep._replace(observation=observation)
        return super().stored(rollout._replace(timestep=timestep))

    def target_params(self, params):
        return ()

    def targets(self, timestep, extras):
        """Returns the `planning.Targets` of the first state; see `planning.targets`."""
        return planning.targets(timestep, extras, self.gamma, 0, self.n_steps)

    def loss(self, params, sample, context):
        """Returns the loss of the first state of each sequence."""
        timestep = jax.tree.map(lambda x: x[:-1], sample.rollout.timestep)
        targets = self.targets(timestep, sample.rollout.extras)
        first = jax.tree.map(lambda x: x[:1], timestep)
        prediction, _ = self.net.unroll(params, (), first)
        no_reward = prediction.value[:0]
        raw = jax.tree.map(lambda x: x[:1], sample.rollout.extras.raw)
        outputs = prediction.policy
        if self.proposal is not None:  # which draws from the policy of legal actions
            outputs = heads.legal_outputs(outputs, environment.action_mask(first.observation))
        log_policy = self.log_policy(outputs, raw)
        return planning.loss(
            planning.Unrolled(log_policy, prediction.value, no_reward),
            jax.lax.stop_gradient(targets),
            sample.weight,
            self._support,
            self.value_cost,
        )
