"""AlphaZero: searches with the true environment, under both runners.

Axis legend: `B` streams.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents import alphazero, tree_search
from agents.networks import encoders
from agents.networks import muzero as muzero_networks
from environments import catch, wrappers
from podracers import errors, evaluation
from tests import contract, streams

UPDATES = 3


def _make(game, **options):
    candidate = wrappers.Searchable(game)
    network = functools.partial(
        muzero_networks.policy_value, encoder=encoders.MLP((8,)), hidden_sizes=(8,)
    )
    options = {"num_simulations": 4, "max_depth": 3} | options
    agent = alphazero.AlphaZero(
        candidate.spec,
        network=network,
        search=functools.partial(tree_search.Search, **options),
        support=5.0,
        support_atoms=11,
        gamma=0.9,
        n_steps=2,
        normalize_observations=True,
        learning_rate=0.01,
        adam_epsilon=1e-2,
        batch_size=16,
        min_replay=48,
        replay_capacity=200,
    )
    return agent, candidate


@pytest.fixture(scope="module", name="made")
def _made():
    """An environment whose state holds a typed key; what Anakin makes of it on one device."""
    agent, candidate = _make(streams.RandomEpisodes(masked=True))
    return agent, candidate, _learn("anakin", agent, candidate, 1)


def _learn(runner, agent, candidate, num_devices):
    subject = contract.RUNNERS[runner].make(contract.Recorder(agent), candidate, num_devices)
    state = subject.init(0)
    rollouts = []
    for _ in range(UPDATES):
        state, _ = subject.step(state, 1)
        rollouts.append(contract.rollout(state))
    subject.close()
    return rollouts, streams.to_numpy(state.learner.inner), state


@pytest.mark.slow
def test_two_devices_learn_what_one_does(made):
    agent, candidate, (rollouts, learner, _) = made
    others, again, _ = _learn("anakin", agent, candidate, 2)
    for ours, theirs in zip(others, rollouts):
        streams.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    streams.assert_close(again, learner, rtol=1e-3, atol=1e-4)
    assert learner.gradient_steps > 0


@pytest.mark.slow
def test_it_learns_on_the_host_too(made):
    agent, candidate, (rollouts, _, _) = made
    others, learner, _ = _learn("sebulba", agent, candidate, 1)
    # The first rollout is acted by the same parameters.
    streams.assert_close(others[0], rollouts[0], rtol=1e-3, atol=1e-4)
    for leaf in jax.tree.leaves(learner):
        assert np.all(np.isfinite(leaf))


def test_states_are_not_replayed(made):
    _, candidate, (_, _, state) = made
    assert "environment_state" in candidate.spec.observation
    observation = state.memory.inner.ring.timestep.observation
    assert set(observation) == {"features", "action_mask"}


@pytest.mark.slow
def test_without_learning_it_plays_catch_by_searching():
    agent, candidate = _make(catch.Catch(rows=4), num_simulations=32, max_depth=4)
    params = agent.actor_params(jax.jit(agent.init_learner)(jax.random.key(0)))
    evaluator = evaluation.Evaluator(agent, candidate, num_episodes=32)
    returns = evaluator.run(params, jax.random.key(1)).returns
    assert np.mean(returns) > 0.9  # the network knows nothing yet; random play reaches -0.4


@pytest.mark.parametrize("truncates", [False, True])
def test_nothing_follows_an_ending(truncates):
    """Who imagines further stays where the episode ended, and changes no mean."""
    agent, _ = _make(streams.RandomEpisodes(masked=True))
    params = agent.actor_params(jax.jit(agent.init_learner)(jax.random.key(0)))
    node = alphazero._Node(
        agent.spec.model._pack(streams.RandomEpisodes().reset(jax.random.key(0))[0]),
        jnp.array(True),
        jnp.float32(7.0 * truncates),
        jnp.zeros(3),
    )
    output, after = jax.jit(agent._model(params))(jnp.int32(0), node)
    streams.assert_same(after, node)
    assert (output.reward, output.discount, output.value) == (0.0, 1.0, 7.0 * truncates)


def test_an_environment_that_shows_no_state_is_refused():
    with pytest.raises(errors.UserError, match=r"Catch does not show its state.*Searchable"):
        alphazero.AlphaZero(catch.Catch().spec)
