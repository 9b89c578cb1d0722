"""Golden digests of interrupted runs, and of agents that `tests/test_agents.py` does not test."""

import contextlib
import dataclasses
import functools

import pytest

from agents import alphazero
from agents.meta import rules
from agents.meta.lpg import rule as lpg_rule
from agents.meta.rules import disco
from agents.networks import encoders
from agents.networks import muzero as muzero_networks
from environments import wrappers
from podracers import anakin
from podracers.checkpoints import checkpoint
from tests import contract, golden, streams
from tests.agents.meta.lpg import lifetimes

pytestmark = [pytest.mark.exact, pytest.mark.slow]

UPDATES = 5
INTERRUPTED = 2  # updates before the checkpoint
RESUMED = ("ppo", "dqn", "lpg")


def _taught(rule):
    """Returns an agent that learns from replay by a rule with random parameters."""
    network = functools.partial(
        rules.rule_network, encoder=encoders.MLP((8,)), model_size=4, model_hidden_sizes=(4,)
    )
    return contract.case(
        rules.RuleAgent,
        network,
        load=lambda path: (rule, None),
        learning_rate=0.01,
        replay_ratio=2.0,
        min_replay=48,
        normalize_observations=True,
        **contract.REPLAY,
    )


def _reanalyze():
    agent, candidate = contract.AGENTS["muzero"]()
    return dataclasses.replace(agent, reanalyze=0.5), candidate


AGENTS = {
    **contract.AGENTS,
    "alphazero": lambda: contract.case(
        alphazero.AlphaZero,
        contract.tiny_network(make=muzero_networks.policy_value, hidden_sizes=(8,)),
        wrapper=wrappers.Searchable,
        normalize_observations=True,
        **contract.SEARCH,
    ),
    "muzero_reanalyze": _reanalyze,
    "rule_lpg": lambda: _taught(lpg_rule.Rule(hidden_size=8, prediction_size=5)),
    "rule_disco": lambda: _taught(disco.Disco()),
    "lpg": lambda: (lifetimes.agent(), lifetimes.candidate()),
}


def _runner(agent_name, runner_name, num_devices):
    agent, candidate = AGENTS[agent_name]()
    if agent_name == "lpg":
        return anakin.Anakin(agent, candidate, 8, lifetimes.PERIOD, num_devices=num_devices)
    return contract.RUNNERS[runner_name].make(agent, candidate, num_devices)


def _save(state, directory, runner):
    with contextlib.closing(checkpoint.Checkpointer(directory)) as checkpointer:
        checkpointer.save(INTERRUPTED, state, runner.actor_params(state), {})


def _continued(runner, state):
    """Returns the acting parameters after the remaining updates, as NumPy."""
    state, _ = runner.step(state, UPDATES - INTERRUPTED)
    params = streams.to_numpy(runner.actor_params(state))
    runner.close()
    return params


@pytest.mark.parametrize(
    "case",
    [
        ("ppo", "anakin", 1),
        ("dqn", "anakin", 1),
        ("ppo", "sebulba", 1),
        ("alphazero", "anakin", 4),
        ("muzero_reanalyze", "anakin", 4),
        ("lpg", "anakin", 4),
        ("rule_lpg", "anakin", 4),
        ("rule_disco", "anakin", 4),
    ],
    ids=lambda case: "-".join(map(str, case)),
)
def test_parameters_are_those_of_the_golden_file_also_after_a_resume(case, tmp_path):
    name, runner = "-".join(map(str, case)), _runner(*case)
    state, _ = runner.step(runner.init(0), INTERRUPTED)
    if case[0] in RESUMED:
        _save(state, tmp_path / "run", runner)
    params = _continued(runner, state)
    golden.check(name, params)
    if case[0] not in RESUMED:
        return
    runner = _runner(*case)
    with contextlib.closing(checkpoint.Checkpointer(tmp_path / "run", read_only=True)) as saved:
        _, state, _ = saved.restore(runner.init(1))
    resumed = _continued(runner, state)
    if case[1] == "anakin":  # its state contains the environments
        streams.assert_same(resumed, params)
    else:  # Sebulba begins new episodes
        golden.check(f"{name}-resumed", resumed)
