"""An agent trained by a frozen update rule, for discrete actions and any network.

Rules are LPG's (`agents.meta.lpg.rule_file`), DiscoRL's (`agents.meta.rules.disco`) and others.

Axis legend: `T` time, `B` streams of one device, `A` actions.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agents import networks
from agents.meta.rules import interface
from agents.meta.rules.network import rule_network
from agents.networks import heads, layers
from agents.parts import optimization, options, returns
from agents.replay import replay
from podracers import environment, errors, types


class Extras(NamedTuple):
    """Outputs of `act` that are stored with each step."""

    behaviour: jax.Array  # [T, B, A] logits of the policy


class Teacher(NamedTuple):
    """The source of targets, in the learner's field `target`."""

    params: types.PyTree  # parameters of the rule
    state: types.PyTree  # state of the rule in this lifetime


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RuleAgent(optimization.GradientAgent, options.Adam):
    """An agent trained by a rule, on each rollout once or on sequences from replay.

    The input of the rule is a rollout, or a replayed sequence of the same length, which should be
    close to the length in its meta-training. `agents.parts.options` describes options that are not
    listed here.

    Attributes:
      load: returns a rule and its parameters, such as `rule_file.load` or `disco.load`.
      rule: argument of `load`, a path; None for a random rule, as a baseline.
      network: `network(spec, outputs=)` returns a network with `interface.Outputs`.
      costs: weights of parts of the loss, by name; other parts keep the rule's weights.
      max_update: bound of each element of Adam's output, before the learning rate; None for no
        bound.
      replay_ratio: mean number of uses of each state; None for no replay, with one gradient step on
        each rollout.
    """

    load: interface.Loader
    rule: str | None = None
    network: Callable[..., networks.Network] = rule_network
    costs: dict[str, float] | None = None
    learning_rate: float = 5e-4
    max_grad_norm: float | None = 0.5
    max_update: float | None = options.positive(None)
    replay_ratio: float | None = options.positive(None, most=1e6)
    batch_size: int = options.count(64)
    replay_capacity: int = options.count(30_000)
    min_replay: int = options.count(2_000)
    greedy_evaluation: bool = False

    def __post_init__(self):
        super().__post_init__()
        options.require_discrete(self)
        options.require_one_player(self, "no rule was learnt with a discount of -1")
        can_learn = any(self._costs.values())
        options.expect(self, "costs", can_learn, "a weight other than 0 in it")
        _ = self.net  # errors of the network

    @functools.cached_property
    def _loaded(self) -> tuple[interface.Rule, types.PyTree | None]:
        """The rule, and its parameters in NumPy; None for random ones."""
        return self.load(self.rule)

    @functools.cached_property
    def _costs(self) -> dict[str, float]:
        default = dict(self._loaded[0].costs)
        for name in self.costs or ():
            errors.require_known("RuleAgent.costs: the rule's loss has no part", name, default)
        return default | (self.costs or {})

    @functools.cached_property
    def action_head(self) -> heads.Categorical:
        return heads.Categorical(self.spec.num_actions)

    @functools.cached_property
    def net(self) -> networks.Network:
        """The network, which has the outputs that the rule requires."""
        required = self._loaded[0].output_spec(self.action_head.num_values)
        network = options.make(self, "network", self.spec, outputs=required)
        timestep = networks.zero_timestep(self.spec)
        params = jax.eval_shape(network.init, jax.random.key(0), timestep)
        outputs, _ = jax.eval_shape(network.step, params, network.initial_core(1), timestep)
        actual = jax.tree.map(lambda x: x.shape[1:], outputs)
        for name, shape in required.shapes(self.action_head.num_values).items():
            if not isinstance(outputs, Mapping) or actual.get(name) != shape:
                raise errors.UserError(
                    f"the rule needs a network with an output '{name}' of shape {shape}, such as "
                    f"rule_network; got {actual}"
                )
        return network

    @functools.cached_property
    def _optimizer(self) -> optimization.Optimizer:
        adam = optimization.adam_of(self)
        if self.max_update is None:
            return adam
        clipped = optax.chain(adam.transformation, optax.clip(self.max_update))
        return dataclasses.replace(adam, transformation=clipped)

    def _replay(self, length: int, ratio: float) -> replay.Replay:
        """Returns the replay of sequences as long as a rollout."""
        return replay.Replay(
            capacity=self.replay_capacity,
            sequence_length=length,
            batch_size=self.batch_size,
            min_size=self.min_replay,
            replay_ratio=ratio,
            learnt_states=length,
        )

    def check_run(self, num_envs: int, rollout_length: int, num_updates: int) -> None:
        """Raises a `UserError` if a run is too short to learn from replay."""
        if self.replay_ratio is not None:
            buffer = self._replay(rollout_length, self.replay_ratio)
            buffer.check_run(self, num_envs, rollout_length, num_updates)

    def init_params(self, key: jax.Array) -> types.PyTree:
        return self.net.init(key, networks.zero_timestep(self.spec))

    def init_learner(self, key: jax.Array) -> optimization.Learner:
        """Returns initial parameters of the agent, and the rule at the start of a lifetime."""
        agent_key, rule_key = jax.random.split(key)
        learner, (rule, params) = super().init_learner(agent_key), self._loaded
        params = rule.init(rule_key) if params is None else jax.tree.map(jnp.asarray, params)
        return learner._replace(target=Teacher(params, rule.init_state(learner.params)))

    def restart(self, learner: optimization.Learner) -> optimization.Learner:
        """Returns a fresh learner with the rule's state at the start of a lifetime."""
        teacher = learner.target._replace(state=self._loaded[0].init_state(learner.params))
        return super().restart(learner)._replace(target=teacher)

    def init_memory(self, rollout: types.Rollout) -> Any:
        """Returns an empty replay of this device's streams; `()` without replay."""
        if self.replay_ratio is None:
            return ()
        return self._replay(rollout.action.shape[0], self.replay_ratio).init(rollout)

    def init_actor(self, env_id: jax.Array, num_envs: int, evaluation: bool = False) -> Any:
        """Returns the initial core of the network for `B` streams."""
        return self.net.initial_core(env_id.shape[0])

    def act(self, params, actor_state, timestep, key, evaluation=False):
        """Samples an action for each stream, or takes the most probable (`greedy_evaluation`)."""
        timestep = self.preprocess.apply(params.normalizer, timestep)
        outputs, core = self.net.step(params.params, actor_state, timestep)
        logits = _legal(outputs, timestep)[interface.POLICY]
        if evaluation and self.greedy_evaluation:
            action = self.action_head.mode(logits, None)
        else:
            action = self.action_head.sample(logits, None, key)
        return action, core, Extras(logits)

    def update(self, state: types.AgentState, rollout: types.Rollout, key: jax.Array):
        """Takes one gradient step on a rollout, or the steps on replay that its ratio allows."""
        learner, memory = state
        learning_rate = self._optimizer.learning_rate_at(learner.agent_steps)
        learn = functools.partial(self._learn, learning_rate=learning_rate)
        if self.replay_ratio is None:
            learner, metrics = learn(learner, rollout)
        else:
            buffer = self._replay(rollout.action.shape[0], self.replay_ratio)
            memory = buffer.add(memory, rollout)
            num_steps = buffer.num_gradient_steps(memory, rollout, learner.update)

            def step(learner: optimization.Learner, memory: replay.Memory, step_key: jax.Array):
                learner, metrics = learn(learner, buffer.sample(memory, step_key).rollout)
                return learner, memory, metrics

            learner, memory, metrics = buffer.repeat(step, num_steps, learner, memory, key)
        return types.AgentState(learner.observe(rollout, self.preprocess), memory), metrics

    def _learn(
        self, learner: optimization.Learner, rollout: types.Rollout, learning_rate: jax.Array
    ) -> tuple[optimization.Learner, dict[str, types.Mean]]:
        """Takes one gradient step."""
        rollout = rollout._replace(
            timestep=self.preprocess.apply_to_rollout(learner.normalizer, rollout.timestep)
        )
        params, teacher = learner.params, learner.target
        unroll = functools.partial(self._unroll, rollout=rollout)
        experience = interface.Experience(
            rollout.timestep, rollout.action, rollout.extras.behaviour, unroll(params)
        )
        targets, rule_state = self._loaded[0].teach(
            teacher.params, teacher.state, experience, params, unroll
        )
        train_state, output = self._optimizer.gradient_step(
            self._loss, learner.train_state, (rollout, targets), learning_rate
        )
        target, count = teacher._replace(state=rule_state), learner.gradient_steps + 1
        learner = learner._replace(train_state=train_state, target=target, gradient_steps=count)
        return learner, output.metrics

    def _unroll(self, params: types.PyTree, rollout: types.Rollout) -> interface.Outputs:
        """Returns the outputs of parameters `[T + 1, B, ...]`."""
        outputs, _ = self.net.unroll(params, rollout.actor_state, rollout.timestep)
        return _legal(outputs, rollout.timestep)

    def _loss(self, params: types.PyTree, batch: Any) -> optimization.LossOutput:
        rollout, targets = batch
        outputs = self._unroll(params, rollout)
        losses = self._loaded[0].losses(targets, outputs, rollout.action, rollout.timestep)
        total = sum(self._costs[name] * loss for name, loss in losses.items())
        mean = functools.partial(types.Mean.of, weights=returns.weights(rollout.timestep))
        entropy = self.action_head.entropy(outputs[interface.POLICY][:-1], None)
        metrics = {f"loss/{name}": mean(loss) for name, loss in losses.items()}
        metrics["policy/entropy"] = mean(entropy)
        return optimization.LossOutput(mean(total), metrics)


def _legal(outputs: interface.Outputs, timestep: types.TimeStep) -> interface.Outputs:
    """Returns outputs with the logits of illegal actions masked."""
    mask = environment.action_mask(timestep.observation)
    if mask is None:
        return outputs
    logits = jnp.where(mask, outputs[interface.POLICY], layers.MASKED)
    return {**outputs, interface.POLICY: logits}
