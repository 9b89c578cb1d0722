"""Golden digests of interrupted runs, and of agents that `tests/test_agents.py` does not test."""

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
from podracers.training import checkpoint
from tests import contract, golden, streams
from tests.agents.meta.lpg import lifetimes

pytestmark = pytest.mark.exact

UPDATES = 5
INTERRUPTED = 2  # updates before the checkpoint


def _alphazero():
    candidate = wrappers.Searchable(streams.RandomEpisodes(masked=True))
    agent = alphazero.AlphaZero(
        candidate.spec,
        network=functools.partial(
            muzero_networks.policy_value, encoder=encoders.MLP((8,)), hidden_sizes=(8,)
        ),
        normalize_observations=True,
        **contract.SEARCH,
    )
    return agent, candidate


def _reanalyze():
    agent, candidate = contract.AGENTS["muzero"]()
    return dataclasses.replace(agent, reanalyze=0.5), candidate


def _taught(rule):
    """Returns an agent that learns from replay by a rule with random parameters."""
    candidate = streams.RandomEpisodes(masked=True)
    agent = rules.RuleAgent(
        candidate.spec,
        load=lambda path: (rule, None),
        network=functools.partial(
            rules.rule_network,
            encoder=encoders.MLP((8,)),
            model_size=4,
            model_hidden_sizes=(4,),
        ),
        learning_rate=0.01,
        replay_ratio=2.0,
        batch_size=16,
        replay_capacity=200,
        min_replay=48,
        normalize_observations=True,
    )
    return agent, candidate


AGENTS = {
    **contract.AGENTS,
    "alphazero": _alphazero,
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


@functools.cache
def _learnt(*case):
    """Returns the acting parameters after five updates, as NumPy."""
    runner = _runner(*case)
    state, _ = runner.step(runner.init(0), UPDATES)
    params = streams.to_numpy(runner.actor_params(state))
    runner.close()
    return params


def _learnt_with_interruption(directory, *case):
    """Returns the same for a run that another runner resumes from a checkpoint on disk."""
    runner = _runner(*case)
    state, _ = runner.step(runner.init(0), INTERRUPTED)
    checkpointer = checkpoint.Checkpointer(directory)
    clock = {"wall": 1.0, "training": 1.0, "steps": 1, "first_dispatch": 1.0}
    metadata = {"update": INTERRUPTED, "seed": 0, "population": 1, "clock": clock}
    checkpointer.save(INTERRUPTED, state, runner.actor_params(state), metadata)
    checkpointer.close()
    runner.close()

    runner = _runner(*case)
    checkpointer = checkpoint.Checkpointer(directory, read_only=True)
    _, state, _ = checkpointer.restore(runner.init(1))
    checkpointer.close()
    state, _ = runner.step(state, UPDATES - INTERRUPTED)
    params = streams.to_numpy(runner.actor_params(state))
    runner.close()
    return params


@pytest.mark.parametrize(
    "case",
    [
        ("ppo", "anakin", 1),
        pytest.param(("dqn", "anakin", 1), marks=pytest.mark.slow),
        ("ppo", "sebulba", 1),
        ("alphazero", "anakin", 4),
        pytest.param(("muzero_reanalyze", "anakin", 4), marks=pytest.mark.slow),
        ("lpg", "anakin", 4),
        pytest.param(("rule_lpg", "anakin", 4), marks=pytest.mark.slow),
        pytest.param(("rule_disco", "anakin", 4), marks=pytest.mark.slow),
    ],
    ids=lambda case: "-".join(map(str, case)),
)
def test_parameters_are_those_of_the_golden_file(case):
    golden.check("-".join(map(str, case)), _learnt(*case))


@pytest.mark.parametrize(
    "agent_name",
    ["ppo", "lpg", pytest.param("dqn", marks=pytest.mark.slow)],
)
def test_anakin_resumes_bit_for_bit(agent_name, tmp_path):
    """Its state contains the environments."""
    case = (agent_name, "anakin", 4 if agent_name == "lpg" else 1)
    streams.assert_same(_learnt_with_interruption(tmp_path / "run", *case), _learnt(*case))


def test_sebulba_resumes_with_new_episodes(tmp_path):
    case = ("ppo", "sebulba", 1)
    golden.check("ppo-sebulba-1-resumed", _learnt_with_interruption(tmp_path / "run", *case))
