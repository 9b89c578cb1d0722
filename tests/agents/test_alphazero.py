"""AlphaZero: searches with the true environment."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents import alphazero, tree_search
from agents.networks import encoders
from agents.networks import muzero as muzero_networks
from environments import catch, wrappers
from podracers import evaluation
from tests import contract, streams


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


def test_states_are_not_replayed():
    agent, candidate = _make(streams.RandomEpisodes(masked=True))
    assert "environment_state" in candidate.spec.observation
    runner = contract.RUNNERS["anakin"].make(agent, candidate, 1)
    memory = jax.eval_shape(lambda: runner.init(0)).memory
    assert set(memory.ring.timestep.observation) == {"features", "action_mask"}


@pytest.mark.slow
def test_without_learning_it_plays_catch_by_searching():
    agent, candidate = _make(catch.Catch(rows=4), num_simulations=32, max_depth=4)
    params = agent.actor_params(jax.jit(agent.init_learner)(jax.random.key(0)))
    evaluator = evaluation.Evaluator(agent, candidate, num_episodes=32)
    returns = evaluator.run(params, jax.random.key(1)).returns
    assert np.mean(returns) > 0.9  # an untrained network; random play reaches -0.4


@pytest.mark.parametrize("truncates", [False, True])
def test_nothing_follows_an_ending(truncates):
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
