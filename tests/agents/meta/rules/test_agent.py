"""Agents that are trained by a frozen rule, and files of rules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents import networks
from agents.meta import rules
from agents.meta.lpg import rule as rule_lib
from agents.meta.lpg import rule_file
from agents.meta.rules import disco, interface
from agents.networks import encoders
from environments import catch, probes
from podracers import agent as agent_lib
from podracers import anakin, errors, unroll
from tests import streams
from tests.agents import experience

RULE = rule_lib.Rule(hidden_size=8, prediction_size=5)
OUTPUTS = interface.OutputSpec({"policy": 3, "y": 7}, {"z": 7, "q": 5})
NETWORK = functools.partial(rules.rule_network, encoder=encoders.MLP((8,)))


class _RewardRule(rule_lib.Rule):
    """Its targets are rewarded actions, and predictions of the first category."""

    def targets(self, params, window):
        first = jnp.full_like(window.prediction, -20.0).at[..., 0].set(0.0)
        return rule_lib.Targets(window.reward, jax.nn.log_softmax(first))


def _agent(spec, teacher=RULE, **options):
    return rules.RuleAgent(
        spec, **{"load": lambda path: (teacher, None), "network": NETWORK, **options}
    )


def _metrics_after(agent, candidate, updates, **sizes):
    runner = anakin.Anakin(agent, candidate, **sizes, num_devices=2)
    state, _ = runner.step(runner.init(0), updates)
    state, report = runner.step(state, 5)
    return {name: mean.result() for name, mean in jax.device_get(report).means.items()}, state


@pytest.mark.slow
@pytest.mark.parametrize("replay_ratio", [None, 4.0])
def test_an_agent_learns_the_targets_of_a_rule(replay_ratio):
    candidate = probes.ActionReward()
    rule = _RewardRule(8, prediction_size=5)
    agent = _agent(
        candidate.spec,
        rule,
        learning_rate=0.02,
        replay_ratio=replay_ratio,
        batch_size=32,
        replay_capacity=1_024,
        min_replay=128,
    )
    assert isinstance(agent, agent_lib.Agent)
    values, _ = _metrics_after(agent, candidate, 60, num_envs=16, rollout_length=8)
    assert values["episode/return"] > 0.9
    assert values["loss/prediction"] < 0.2
    if replay_ratio is not None:
        assert values["replay/gradient_steps"] == 2.0  # 4 * 16 * 8 / (32 * 8)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [RULE, disco.Disco()], ids=["lpg", "disco"])
def test_illegal_actions_are_not_taken_and_losses_stay_small(rule):
    """The total is weighted by the costs."""
    candidate = streams.RandomEpisodes(masked=True)
    network = functools.partial(NETWORK, model_size=4, model_hidden_sizes=(4,))
    costs = dict(rule.costs, policy=3.0)
    agent = _agent(candidate.spec, rule, network=network, costs={"policy": 3.0})
    batched = unroll.BatchedEnvironment(candidate)
    env_id = jnp.arange(8, dtype=jnp.int32)

    def run():
        learner = agent.init_learner(jax.random.key(0))
        params = agent.actor_params(learner)
        start = unroll.init(agent, batched, env_id, 8, jax.random.key(1))
        _, rollout = unroll.unroll(agent, batched, params, start, jax.random.key(2), 6)
        return rollout, agent._learn(learner, rollout, agent.learning_rate)[1]

    rollout, metrics = jax.device_get(jax.jit(experience.on_devices(run))())
    mask = np.asarray(rollout.timestep.observation["action_mask"][:-1])
    legal = np.take_along_axis(mask, np.asarray(rollout.action)[..., None], -1)[..., 0]
    assert legal[~np.asarray(rollout.timestep.last()[:-1])].all()
    for mean in metrics.values():
        assert abs(mean.result()) < 20.0
    total = sum(cost * metrics[f"loss/{name}"].result() for name, cost in costs.items())
    np.testing.assert_allclose(metrics["loss/total"].result(), total, rtol=1e-5)


def test_the_first_rollout_is_learnt_with_its_own_statistics():
    candidate = streams.RandomEpisodes()
    agent = _agent(candidate.spec, normalize_observations=True)
    batched = unroll.BatchedEnvironment(candidate)
    env_id = jnp.arange(8, dtype=jnp.int32)

    def run():
        learner = agent.init_learner(jax.random.key(0))
        start = unroll.init(agent, batched, env_id, 8, jax.random.key(1))
        params = agent.actor_params(learner)
        _, rollout = unroll.unroll(agent, batched, params, start, jax.random.key(2), 6)

        def params_after(scale):
            observation = jax.tree.map(lambda x: x * scale, rollout.timestep.observation)
            timestep = rollout.timestep._replace(observation=observation)
            scaled = rollout._replace(timestep=timestep)
            return agent._learn(learner, scaled, agent.learning_rate)[0].train_state.params

        return params_after(1.0), params_after(2.0)

    streams.assert_close(*jax.jit(experience.on_devices(run))(), rtol=0.0, atol=1e-6)


def test_a_file_restores_the_rule(tmp_path):
    params = jax.jit(RULE.init)(jax.random.key(3))
    path = tmp_path / "rule.npz"
    rule_file.save(path, RULE, params)
    rule, loaded = rule_file.load(path)
    assert rule == RULE
    jax.tree.map(np.testing.assert_array_equal, params, loaded)
    agent = _agent(probes.ActionReward().spec, load=rule_file.load, rule=str(path))
    learner = jax.jit(agent.init_learner)(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, learner.target.params, params)
    with pytest.raises(errors.UserError, match=r"cannot write .*: No such file or directory"):
        rule_file.save(tmp_path / "missing" / "rule.npz", RULE, params)


@pytest.mark.parametrize("text", [None, '{"size": 1}', '{"gamma": NaN}', "[" * 100_000])
def test_a_file_with_invalid_options_is_a_user_error(tmp_path, text):
    path = tmp_path / "rule.npz"
    np.savez(path, **({} if text is None else {"options": text}))
    with pytest.raises(errors.UserError, match="not the file of a rule"):
        _agent(probes.ActionReward().spec, load=rule_file.load, rule=str(path))


def test_outputs_are_those_of_the_specification():
    spec = catch.Catch().spec
    network = rules.rule_network(
        spec, OUTPUTS, encoder=encoders.MLP((8,)), model_size=4, model_hidden_sizes=(6,)
    )
    timestep = networks.zero_timestep(spec)
    params = jax.jit(network.init)(jax.random.key(0), timestep)
    outputs, core = jax.jit(network.step)(params, network.initial_core(1), timestep)
    assert {name: x.shape[1:] for name, x in outputs.items()} == OUTPUTS.shapes(3)
    assert OUTPUTS.shapes(3) == {"policy": (3,), "y": (7,), "z": (3, 7), "q": (3, 5)}
    assert core == ()
    z = np.asarray(outputs["z"][0])  # each action has its own
    assert not np.allclose(z[0], z[1]) and not np.allclose(z[1], z[2])
