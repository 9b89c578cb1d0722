"""Agents that a frozen rule teaches, and rules in files."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents import networks
from agents.lpg import rule as rule_lib
from agents.lpg import rule_agent, rule_file
from agents.networks import encoders
from environments import pendulum, probes
from podracers import agent as agent_lib
from podracers import anakin, errors

RULE = rule_lib.Rule(hidden_size=8, prediction_size=5)


class _RewardRule(rule_lib.Rule):
    """Asks for what was rewarded, and for predictions of the first category."""

    def targets(self, params, window):
        first = jnp.full_like(window.prediction, -20.0).at[..., 0].set(0.0)
        return rule_lib.Targets(window.reward, jax.nn.log_softmax(first))


def _agent(spec, rule=RULE, params=None, **options):
    def network(spec, head, prediction_size):
        return rule_agent.policy_and_prediction(
            spec, head, prediction_size, encoder=encoders.MLP((8,))
        )

    agent = rule_agent.RuleAgent(spec, network=network, **options)
    agent.__dict__["_loaded"] = (rule, params)
    del agent.__dict__["_policy"]  # its network was made for the size of another rule
    return agent


def test_an_agent_learns_what_a_rule_asks_for():
    candidate = probes.ActionReward()
    agent = _agent(candidate.spec, _RewardRule(8, prediction_size=5), learning_rate=0.02)
    assert isinstance(agent, agent_lib.Agent)
    runner = anakin.Anakin(agent, candidate, 16, 8, num_devices=2)
    state, _ = runner.step(runner.init(0), 60)
    _, report = runner.step(state, 5)
    values = {name: mean.result() for name, mean in jax.device_get(report).means.items()}
    assert values["episode/return"] > 0.9
    assert values["prediction/entropy"] < 0.2


def test_a_rule_is_the_same_after_a_file(tmp_path):
    params = RULE.init(jax.random.key(3))
    path = tmp_path / "rule.npz"
    rule_file.save(path, RULE, params)
    rule, loaded = rule_file.load(path)
    assert rule == RULE
    jax.tree.map(np.testing.assert_array_equal, params, loaded)
    agent = rule_agent.RuleAgent(probes.ActionReward().spec, rule=str(path))
    learner = agent.init_learner(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, learner.rule, params)


def _without(path, name):
    with np.load(path) as file:
        arrays = {key: file[key] for key in file.files if key != name}
    np.savez(path, **arrays)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), "there is no rule"),
        (lambda path: path.write_text("{}"), "not the file of a rule"),
        (lambda path: path.write_text(json.dumps([1])), "not the file of a rule"),
        (lambda path: _without(path, "options"), "not the file of a rule"),
        (lambda path: _without(path, "policy/bias"), r"another rule: expected 'policy/bias'"),
    ],
)
def test_files_that_are_none_are_refused(tmp_path, spoil, message):
    path = tmp_path / "rule.npz"
    rule_file.save(path, RULE, RULE.init(jax.random.key(0)))
    spoil(path)
    with pytest.raises(errors.UserError, match=message) as error:
        rule_agent.RuleAgent(probes.ActionReward().spec, rule=str(path))
    assert "\n" not in str(error.value)


def test_a_network_without_predictions_is_refused():
    def network(spec, head, prediction_size):
        del prediction_size
        return networks.actor_critic(spec, head)

    agent = rule_agent.RuleAgent(probes.ActionReward().spec, network=network)
    with pytest.raises(errors.UserError, match="puts out a prediction of 30"):
        agent.init_learner(jax.random.key(0))


def test_continuous_actions_are_refused():
    with pytest.raises(errors.UserError, match="discrete actions"):
        rule_agent.RuleAgent(pendulum.Pendulum().spec)
