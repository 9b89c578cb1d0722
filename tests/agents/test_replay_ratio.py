"""The replay ratio counts the states that an agent learns from, whatever the agent."""

import dataclasses
import functools

import pytest

from agents import alphazero, tree_search
from agents.networks import encoders
from agents.networks import muzero as muzero_networks
from environments import wrappers
from tests import contract, streams


def _alphazero():
    candidate = wrappers.Searchable(streams.RandomEpisodes(end=0.0))
    agent = alphazero.AlphaZero(
        candidate.spec,
        network=functools.partial(
            muzero_networks.policy_value, encoder=encoders.MLP((8,)), hidden_sizes=(8,)
        ),
        search=functools.partial(tree_search.Search, num_simulations=2, max_depth=2),
        n_steps=2,
        batch_size=16,
        min_replay=48,
        replay_capacity=200,
    )
    return agent, candidate


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dqn", "r2d2", "sac", "sac_discrete", "muzero", "alphazero"])
def test_the_replay_ratio_counts_the_states_that_are_learnt_from(name):
    """Every agent takes the mean of its values over just the states that its loss is of."""
    agent, candidate = _alphazero() if name == "alphazero" else contract.AGENTS[name]()
    if name != "alphazero":
        candidate = dataclasses.replace(candidate, end=0.0)  # no state is an ending
    agent = dataclasses.replace(agent, replay_ratio=2.0)
    subject = contract.RUNNERS["anakin"].make(agent, candidate, 1)
    state, _ = subject.step(subject.init(0), 3)  # until every stream has a sequence
    _, report = subject.step(state, 4)
    assert report.means["value/mean"].count == 2.0 * 4 * subject.steps_per_update
