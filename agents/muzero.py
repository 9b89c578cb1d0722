"""MuZero: tree search in a model that is learnt.

Schrittwieser et al., "Mastering Atari, Go, chess and shogi by planning with a learned model", 2020,
https://arxiv.org/abs/1911.08265. Its search is either that of the paper or, by default, that of
Gumbel MuZero, which needs few simulations; see `agents.tree_search`. Values of searches are stored,
not computed anew: there is no reanalysis.

Axis legend: `T` time, `K` imagined steps, `B` streams, `N` drawn sequences, `A` actions, `Z` atoms.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import mctx

from agents import networks, planning
from agents.networks import muzero as muzero_networks


def scale_gradient(x: jax.Array, scale: float) -> jax.Array:
    """Returns `x`, whose gradient is scaled."""
    return scale * x + (1.0 - scale) * jax.lax.stop_gradient(x)


@dataclasses.dataclass(frozen=True, eq=False)
class MuZero(planning.Planner):
    """The agent; see `Planner` and `OffPolicy` for the options that it shares.

    Attributes:
      network: `network(spec, num_actions, num_atoms)` returns a `muzero_networks.Model`.
      unroll_steps: `K`, how many steps the model is learnt to look ahead.
    """

    network: Callable[..., muzero_networks.Model] = muzero_networks.model
    unroll_steps: int = 5

    _COUNTS: ClassVar = ("unroll_steps", *planning.Planner._COUNTS)

    @property
    def _imagined(self) -> int:
        return self.unroll_steps

    @property
    def _burn_in(self) -> int:
        return self._network.representation.memory_length

    def _init_params(self, key):
        return self._network.init(key)

    def init_actor(self, env_id, num_envs, evaluation=False):
        """Returns the cores of `B` streams: their latest frames, where the network stacks them."""
        return self._network.representation.initial_core(env_id.shape[0])

    def _root(self, params, core, timestep):
        params, normalizer, _ = params
        timestep = self._normalized(normalizer, timestep)
        latent, core = self._network.representation.step(params["representation"], core, timestep)
        return self._root_output(self._network.predict(params, latent), latent), core

    def _model(self, params):
        params = params.params

        def imagine(action, latent):
            latent, reward = self._network.imagine(params, latent, action)
            prediction = self._network.predict(params, latent)
            output = mctx.RecurrentFnOutput(
                reward=self._support.decode(reward),
                discount=jnp.full(action.shape, self.gamma),
                prior_logits=prediction.policy,
                value=self._support.decode(prediction.value),
            )
            return output, latent

        return imagine

    def _values(self, params, timestep):
        representation = self._network.representation
        core = representation.initial_core(timestep.reward.shape[1])
        latent = networks.unroll_after(
            representation, params["representation"], core, timestep, self._burn_in
        )
        return self._network.predict(params, latent).value

    def _unrolled(self, params, rollout):
        """Imagines `K` steps from the first observation of each sequence."""
        begin = self._burn_in
        seen = jax.tree.map(lambda x: x[: begin + 1], rollout.timestep)
        representation = self._network.representation
        core = representation.initial_core(seen.reward.shape[1])
        first = networks.unroll_after(
            representation, params["representation"], core, seen, burn_in=begin
        )[0]

        def imagine(latent, action):
            latent, reward = self._network.imagine(params, latent, action)
            return scale_gradient(latent, 0.5), (latent, reward)

        action = rollout.action[begin : begin + self.unroll_steps]
        _, (later, reward) = jax.lax.scan(imagine, first, action)
        prediction = self._network.predict(params, jnp.concatenate([first[None], later]))
        return planning.Unrolled(prediction.policy, prediction.value, reward)
