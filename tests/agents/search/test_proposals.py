"""Searches over drawn actions: their priors, what they search, and what the policy learns.

Axis legend: `B` streams, `K` drawn actions.
"""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import mctx
import numpy as np
import optax
import pytest
from dm_env import specs

from agents import alphazero, muzero
from agents.networks import layers
from agents.networks import muzero as muzero_networks
from agents.replay import replay
from agents.search import proposals, tree_search
from environments import catch, wrappers
from podracers import environment
from tests import contract, streams
from tests.agents import experience

STREAMS = 32
MULTI = specs.BoundedArray((2,), np.int32, 0, np.array([2, 3], np.int32))  # 12 joint actions
UNIT = specs.BoundedArray((1,), np.float32, -1.0, 1.0)


def _keys(seed=0, count=STREAMS):
    return jax.random.split(jax.random.key(seed), count)


def _inputs(agent, params, timestep):
    """Returns the arguments of the search, and the results of its model for all actions."""
    captured = []

    def run(search, model, root, legal, temperature, key):
        indices = jnp.arange(root.prior_logits.shape[-1])
        of_node = jax.vmap(model, in_axes=(0, None))
        results, after = jax.vmap(of_node, in_axes=(None, 0))(indices, root.embedding)
        captured.append((root, legal, temperature, key, results, after))
        count, size = root.prior_logits.shape
        return tree_search.Plan(jnp.arange(count) % size, root.prior_logits, root.value)

    with mock.patch.object(tree_search.Search, "run", run):
        core = agent.init_actor(jnp.arange(STREAMS), STREAMS)
        action, _, extras = agent.act(params, core, timestep, _keys(1))
    return captured[0], action, extras


def test_with_all_actions_searches_have_the_inputs_of_muzero():
    """To the bit, on Catch: root, prior, keys and the model's results of each action."""
    game = catch.Catch()
    network = contract.tiny_network(make=muzero_networks.model, latent_size=8, hidden_sizes=(8,))
    plain = muzero.MuZero(game.spec, network=network)
    proposal = functools.partial(proposals.Proposal, num_actions=3)
    sampled = dataclasses.replace(plain, proposal=proposal)
    params = plain.actor_params(jax.jit(plain.init_learner)(jax.random.key(0)))
    _, timestep = jax.vmap(game.reset)(_keys())
    expected, action, extras = _inputs(plain, params, timestep)
    actual, sampled_action, sampled_extras = _inputs(sampled, params, timestep)
    root, legal, temperature, key, results, after = actual
    assert jnp.all(legal) and expected[1] is None
    unwrapped = root.replace(embedding=root.embedding.embedding)
    streams.assert_same(
        (unwrapped, temperature, jax.random.key_data(key), results, after.embedding),
        (*expected[::2][:2], jax.random.key_data(expected[3]), *expected[4:]),
    )
    streams.assert_same((sampled_action, sampled_extras[:2]), (action, extras[:2]))


@pytest.mark.parametrize("uniform_fraction", [0.0, 0.3])
def test_the_prior_is_that_of_a_brute_force(uniform_fraction):
    """Over all joint actions, of which one value of each part is illegal."""
    proposal = proposals.Proposal(MULTI, 8, uniform_fraction)
    mask = np.array([[True, True, False, False], [False, True, True, True]])
    outputs = np.random.default_rng(0).normal(size=8).astype(np.float32)
    masked = np.where(mask.ravel(), outputs, layers.MASKED).astype(np.float32)
    draws = jax.device_get(jax.jit(jax.vmap(lambda key: proposal.draw(masked, key)))(_keys()))
    weights = np.where(mask, np.exp(outputs.reshape(2, 4)), 0.0)
    first, second = weights / weights.sum(axis=1, keepdims=True)
    policy = np.outer(first, second)
    uniform = (policy > 0) / np.sum(policy > 0)
    beta = (1 - uniform_fraction) * policy + uniform_fraction * uniform
    repeated = 0
    for raw, logits, legal in zip(*draws):
        actions = [*map(tuple, raw)]
        expected = {a: actions.count(a) * policy[a] / beta[a] for a in actions}
        total = sum(expected.values())
        probability = np.exp(logits - logits.max())
        probability /= probability.sum()
        for index, action in enumerate(actions):
            assert legal[index] == (actions.index(action) == index)
            prior = expected[action] / total if legal[index] else 0.0
            np.testing.assert_allclose(probability[index], prior, rtol=1e-4, atol=1e-12)
        repeated += len(actions) - len(expected)
    assert repeated > STREAMS
    counts = np.zeros((3, 4))
    np.add.at(counts, tuple(np.moveaxis(draws.raw, -1, 0)), 1)
    error = np.sqrt(beta[:3] * STREAMS * 8)
    assert np.all(np.abs(counts - beta[:3] * STREAMS * 8) <= 4 * error)


@pytest.mark.parametrize("head", ["gaussian", "tanh_gaussian"])
def test_means_under_the_corrected_prior_are_those_of_the_policy(head):
    """Also where half of the continuous actions are drawn uniformly."""
    proposal = proposals.Proposal(UNIT, 256, 0.5, head)
    outputs = jnp.array([0.3, -1.0])
    draws = jax.jit(jax.vmap(lambda key: proposal.draw(outputs, key)))(_keys())
    assert jnp.all(draws.legal)
    weight = jax.nn.softmax(draws.logits)[..., None]
    mean, square = (jnp.mean(jnp.sum(weight * draws.raw**n, axis=1)) for n in (1, 2))
    np.testing.assert_allclose(mean, 0.3, atol=0.01)
    np.testing.assert_allclose(square - mean**2, np.exp(-2.0), rtol=0.03)
    action = proposal.action_head.to_action(draws.raw)
    assert np.mean(action < -0.5) > 0.1  # 1% of the policy's


def _root(outputs):
    zeros = jnp.zeros(len(outputs))
    return mctx.RootFnOutput(prior_logits=outputs, value=zeros, embedding=zeros)


def _output(reward, discount):
    """Returns a result of a model whose policy is the standard normal distribution."""
    numbers = jnp.zeros(()) + reward, jnp.zeros(()) + discount, jnp.zeros(2), jnp.zeros(())
    return mctx.RecurrentFnOutput(
        **dict(zip(("reward", "discount", "prior_logits", "value"), numbers))
    )


def _bandit(kind):
    """Returns a policy after searches of a bandit whose best action is 0.6, in [-1, 1]."""
    proposal = proposals.Proposal(UNIT, 8, 0.1)
    search = tree_search.Search(kind, num_simulations=8, max_depth=1)
    optimizer = optax.adam(0.03)

    def model(action, node):
        return _output(reward=-jnp.abs(action[0] - 0.6), discount=0.0), node

    def step(state, key):
        outputs, moments = state
        rows = jnp.broadcast_to(outputs, (STREAMS, 2))
        keys = jax.random.split(key, STREAMS)
        plan, raw, action = proposal.run(search, model, _root(rows), None, 1.0, keys)

        def loss(outputs):
            return -jnp.mean(jnp.sum(plan.policy * proposal.log_prob(outputs[None], raw), axis=-1))

        updates, moments = optimizer.update(jax.grad(loss)(outputs), moments)
        return (outputs + updates, moments), jnp.mean(action)

    start = jnp.zeros(2)
    keys = jax.random.split(jax.random.key(0), 200)
    return jax.jit(lambda: jax.lax.scan(step, (start, optimizer.init(start)), keys))()


@pytest.mark.parametrize("kind", ["gumbel", "puct"])
def test_the_policy_of_a_bandit_becomes_its_best_action(kind):
    ((mean, log_std), _), actions = _bandit(kind)
    assert float(mean) == pytest.approx(0.6, abs=0.05)
    assert float(log_std) < -1.0
    assert float(jnp.mean(actions[-10:])) == pytest.approx(0.6, abs=0.05)


def test_nodes_draw_independently_and_plans_do_not_depend_on_neighbours():
    bounds = specs.BoundedArray((1,), np.float32, 1.0, 1.5)
    proposal, search = proposals.Proposal(bounds, 4), tree_search.Search(num_simulations=6)

    def model(action, node):
        return _output(reward=action[0], discount=1.0), action[0]

    def run(keys):
        return proposal.run(search, model, _root(jnp.zeros((len(keys), 2))), None, 1.0, keys)

    results = jax.jit(run)(_keys())
    streams.assert_same(jax.tree.map(lambda x: x[5:], results), jax.jit(run)(_keys()[5:]))
    root = proposals._Node(jnp.zeros(()), results[1][0], jax.random.key_data(_keys(2)[0]))
    nodes = [root, *(proposal._expand(model, index, root)[1] for index in range(4))]
    nodes.append(proposal._expand(model, 0, nodes[1])[1])
    assert len(np.unique(np.concatenate([node.raw for node in nodes]))) == 24
    expected = np.clip(1.25 + 0.25 * root.raw[:, 0], 1.0, 1.5)
    np.testing.assert_allclose([node.embedding for node in nodes[1:5]], expected, rtol=1e-6)


def test_alphazero_searches_legal_drawn_actions():
    """At the root and below it; and only their logits are learnt."""
    candidate = wrappers.Searchable(streams.RandomEpisodes(actions="multi_discrete", masked=True))
    proposal = functools.partial(proposals.Proposal, num_actions=4, uniform_fraction=0.2)
    network = contract.tiny_network(make=muzero_networks.policy_value, hidden_sizes=(8,))
    options = contract.SEARCH | {"proposal": proposal}
    agent = alphazero.AlphaZero(candidate.spec, network=network, **options)
    params = agent.actor_params(experience.zeros(agent))
    _, timestep = jax.vmap(candidate.reset)(_keys())
    act = jax.jit(agent.act)
    action, _, extras = act(params, jnp.zeros(STREAMS, jnp.int32), timestep, _keys(1))
    mask = timestep.observation[environment.ACTION_MASK]
    assert np.all(np.take_along_axis(mask[:, None], extras.raw[..., None], axis=-1))
    assert np.all(np.any(np.all(extras.raw == action[:, None], axis=-1), axis=-1))
    np.testing.assert_allclose(np.sum(extras.policy, axis=-1), 1.0, rtol=1e-5)
    state = jax.tree.map(lambda x: x[0], timestep.observation[environment.STATE])
    node = alphazero._Node(state, jnp.bool(False), jnp.zeros(()), jnp.zeros(6))
    output, _ = agent._model(params)(action[0], node)
    following, _ = candidate.step_from(state, action[0])
    below = following.observation[environment.ACTION_MASK].ravel()
    np.testing.assert_array_equal(output.prior_logits > 0.5 * layers.MASKED, below)

    rollout = experience.acted(agent, candidate, agent.n_steps + 1, STREAMS).rollout
    sample = replay.Sample(rollout, (), jnp.ones(STREAMS), _keys())
    value = jnp.zeros((1, STREAMS, agent.support_atoms))

    def loss(outputs):
        prediction = muzero_networks.Prediction(outputs, value), ()
        with mock.patch.object(type(agent.net), "unroll", return_value=prediction):
            return agent.loss((), sample, ()).loss.total

    gradient = jax.grad(loss)(jnp.zeros((1, STREAMS, 6))).reshape(mask.shape)
    legal = rollout.timestep.observation[environment.ACTION_MASK][0]
    assert np.all(gradient[~legal] == 0.0) and np.any(gradient[legal] != 0.0)
