"""MuZero: tree search in a model that is learnt.

Schrittwieser et al., "Mastering Atari, Go, chess and shogi by planning with a learned model", 2020,
https://arxiv.org/abs/1911.08265. Its search is either that of the paper or, by default, that of
Gumbel MuZero, which needs few simulations; see `agents.search.tree_search`. Acting stores the
results of its searches; `reanalyze` repeats the searches of replayed sequences (appendix H of the
paper). `agents.search.planning` has the formula of the loss.

Axis legend: `T` time, `L` transitions of a sequence, `K` unrolled steps, `B` streams, `N` drawn
sequences, `A` actions, `Z` atoms.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import mctx
import optax

from agents import networks
from agents.networks import muzero as muzero_networks
from agents.parts import optimization, options
from agents.replay import replay
from agents.search import planning
from podracers import environment, errors


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class MuZero(planning.SearchAgent):
    """MuZero with gradient steps after each rollout as `replay.Replay` counts them.

    A sequence of replay is `K + n + 1` transitions long, and one state of it is trained on: the
    first, which the model is unrolled from. So `replay_ratio` is the paper's samples per state
    (appendix H). `planning.SearchAgent` describes the options that are not listed here.

    Attributes:
      network: `network(spec, num_outputs, num_atoms)` returns a `muzero_networks.Model`.
      unroll_steps: `K`, steps of the unrolled model.
      fresh_values: whether returns bootstrap from the target network's current values, not from the
        stored values of the search, so that old replay holds no old values (Ye et al., "Mastering
        Atari Games with Limited Data", 2021, https://arxiv.org/abs/2111.00210, without new
        searches). `target_period` (200 there) and `target_rate` are used only with it.
      reanalyze: portion of gradient steps, drawn at random, that first repeat the searches of their
        sequences with the latest parameters and without noise, for the targets of the policy, and
        of the value without `fresh_values`. 0.8 with `fresh_values` is MuZero Reanalyze.
      consistency_cost: weight of EfficientZero's loss (Ye et al., as above; 2 there), by which
        imagined latents become those of later observations. It needs a network with a projector
        (`projection_size`).
    """

    network: Callable[..., muzero_networks.Model] = muzero_networks.model
    unroll_steps: int = options.count(5)
    fresh_values: bool = False
    reanalyze: float = options.fraction(0.0)
    consistency_cost: float = options.non_negative(0.0, most=1e6)
    weight_decay: float = options.non_negative(0.0, most=1e3)
    target_period: int = options.count(200)
    target_rate: float = options.fraction(1.0)

    def __post_init__(self):
        super().__post_init__()
        options.require_feedforward(self, self.net.representation)
        if self.consistency_cost and self.net.projector is None:
            raise errors.UserError(
                "MuZero.consistency_cost: expected 0, or a network with projection_size"
            )

    @functools.cached_property
    def _optimizer(self) -> optimization.Optimizer:
        return optimization.adam_of(self, self.weight_decay)

    @functools.cached_property
    def buffer(self) -> replay.Replay:
        length = self.unroll_steps + self.n_steps + 1
        return replay.Replay.of(self, length, burn_in=self.net.representation.memory_length)

    def init_params(self, key):
        return self.net.init(key)

    def init_actor(self, env_id, num_envs, evaluation=False):
        """Returns the cores of `B` streams, with frames of a stack, and their moves so far."""
        core = self.net.representation.initial_core(env_id.shape[0])
        return core, jnp.zeros(env_id.shape, jnp.int32)

    def act(self, params, actor_state, timestep, key, evaluation=False):
        """Searches for each stream; in evaluation without any noise."""
        core, moves = actor_state
        moves = jnp.where(timestep.first(), 0, moves)
        mask = environment.action_mask(timestep.observation)
        timestep = self.preprocess.apply(params.normalizer, timestep)
        latent, core = self.net.representation.step(params.params["representation"], core, timestep)
        temperature = self.temperature_at(params, moves, evaluation)
        extras, action = self._plan(params.params, latent, mask, temperature, key)
        return action, (core, moves + 1), extras

    def _plan(self, params, latent, mask, temperature, key):
        """Returns the `planning.Extras` and actions of searches from latents `[B, F]`."""
        root = planning.root(self.net.predict(params, latent), latent, self._support)
        return self.searched(self._model(params), root, mask, temperature, key)

    def _model(self, params):
        """Returns the learnt model, for the search."""

        def imagine(action, latent):
            latent, reward, passes = self.net.imagine(params, latent, action)
            prediction = self.net.predict(params, latent)
            output = mctx.RecurrentFnOutput(
                reward=self._support.decode(reward),
                discount=self._discount(passes),
                prior_logits=prediction.policy,
                value=self._support.decode(prediction.value),
            )
            return output, latent

        return imagine

    def _discount(self, passes):
        """Returns the discount of imagined steps, or `[...]`, from logits that the turn passes."""
        if self.net.dynamics.learns_turns:
            return self.gamma * (1.0 - 2.0 * jax.nn.sigmoid(passes))
        sign = -1.0 if self.spec.players == 2 else 1.0
        return jnp.float32(sign * self.gamma)

    def sample(self, learner, memory, key):
        if not self.reanalyze:
            return super().sample(learner, memory, key)
        key, due_key = jax.random.split(key)
        sample = super().sample(learner, memory, key)
        is_due = jax.random.bernoulli(due_key, self.reanalyze)
        return self._reanalyzed(learner.params, sample, is_due)

    def _reanalyzed(self, params, sample: replay.Sample, is_due: jax.Array) -> replay.Sample:
        """Returns the sample of preprocessed time steps, with new searches by `params` if `is_due`.

        `is_due` is equal on all devices.
        """
        # With fresh values only the policies of the unrolled steps are learnt.
        end = self.buffer.burn_in + self.unroll_steps + 1 if self.fresh_values else -1

        def search() -> planning.Extras:
            timestep = jax.tree.map(lambda x: x[:end], sample.rollout.timestep)
            latent = self._latents(params, timestep)  # [L, N, F] after the burn-in
            steps = latent.shape[0]
            mask = environment.action_mask(timestep.observation)
            keys = jax.vmap(lambda key: jax.random.split(key, steps), out_axes=1)(sample.key)
            rows = (latent, None if mask is None else mask[self.buffer.burn_in :], keys)
            latent, mask, keys = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)
            plans, _ = self._plan(params, latent, mask, 0.0, keys)
            plans = jax.tree.map(lambda x: x.reshape(steps, -1, *x.shape[1:]), plans)
            searched = slice(self.buffer.burn_in, self.buffer.burn_in + steps)
            return jax.tree.map(
                lambda old, new: old.at[searched].set(new), sample.rollout.extras, plans
            )

        extras = jax.lax.cond(is_due, search, lambda: sample.rollout.extras)
        return sample._replace(rollout=sample.rollout._replace(extras=extras))

    def target_params(self, params):
        """Returns the part of the parameters that has target parameters."""
        return params if self.fresh_values else ()

    def targets(self, timestep, extras):
        """Returns the `planning.Targets` of `K` unrolled steps; see `planning.targets`."""
        return planning.targets(timestep, extras, self.gamma, self.unroll_steps, self.n_steps)

    def loss(self, params, sample, context):
        """Returns the loss of `K` unrolled steps from the first state after the burn-in."""
        rollout = sample.rollout
        timestep = jax.tree.map(lambda x: x[self.buffer.burn_in : -1], rollout.timestep)
        extras = jax.tree.map(lambda x: x[self.buffer.burn_in :], rollout.extras)
        if self.fresh_values:
            latents = self._latents(
                context.target, jax.tree.map(lambda x: x[:-1], rollout.timestep)
            )
            logits = self.net.predict(context.target, latents).value
            # Without the barrier the TPU compiler (libtpu 0.0.42) crashes on the fusion of both.
            value = self._support.decode(jax.lax.optimization_barrier(logits))
            extras = extras._replace(value=value)
        return planning.loss(
            self._unrolled(params, rollout),
            jax.lax.stop_gradient(self.targets(timestep, extras)),
            sample.weight,
            self._support,
            self.value_cost,
        )

    def _latents(self, params, timestep):
        """Returns the latents `[L, N, F]` of time steps after the burn-in."""
        representation = self.net.representation
        core = representation.initial_core(timestep.reward.shape[1])
        return networks.unroll_after(
            representation, params["representation"], core, timestep, self.buffer.burn_in
        )

    def _unrolled(self, params, rollout):
        """Returns the predictions of `K` steps from the first state of each sequence."""
        begin = self.buffer.burn_in
        end = begin + 1 + (self.unroll_steps if self.consistency_cost else 0)
        seen = jax.tree.map(lambda x: x[:end], rollout.timestep)
        first, *observed = self._latents(params, seen)

        def imagine(latent, action):
            latent, *outputs = self.net.imagine(params, latent, action)
            return optax.scale_gradient(latent, 0.5), (latent, *outputs)

        action = rollout.action[begin : begin + self.unroll_steps]
        _, (later, reward, passes) = jax.lax.scan(imagine, first, action)
        prediction = self.net.predict(params, jnp.concatenate([first[None], later]))
        raw = jax.tree.map(lambda x: x[begin:][: len(action) + 1], rollout.extras.raw)
        log_policy = self.log_policy(prediction.policy, raw)
        consistency = None
        if self.consistency_cost:
            inconsistency = self.net.inconsistency(params, later, jnp.stack(observed))
            consistency = self.consistency_cost * inconsistency
        return planning.Unrolled(log_policy, prediction.value, reward, passes, consistency)
