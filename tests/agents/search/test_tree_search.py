"""Searches: right with a true model, and independent of other streams.

Axis legend: `B` streams, `A` actions.
"""

import functools

import jax
import jax.numpy as jnp
import mctx
import numpy as np
import pytest

from agents.search import tree_search
from environments import catch
from podracers import parallel
from tests import streams

GAMMA = 0.9
STREAMS = 64
GAME = catch.Catch(rows=5)
# Ball's row and column, paddle's column, and the actions that are best.
SITUATIONS = np.array(
    [[0, 0, 2], [0, 4, 2], [2, 0, 2], [2, 4, 2], [3, 3, 2], [3, 2, 2], [2, 1, 1], [2, 4, 1]]
)
BEST = [{0, 1, 2}, {0, 1, 2}, {0}, {2}, {2}, {1}, {0, 1, 2}, {0, 1, 2}]


def _model(action, node):
    """The rules of Catch, with a uniform prior and values of zero."""
    state, timestep = GAME.step(catch.State(*node), action)
    output = mctx.RecurrentFnOutput(
        reward=timestep.reward,
        discount=GAMMA * timestep.discount,
        prior_logits=jnp.zeros(3),
        value=jnp.zeros(()),
    )
    return output, jnp.stack(state)


def _root(nodes):
    return mctx.RootFnOutput(
        prior_logits=jnp.zeros((len(nodes), 3)),
        value=jnp.zeros(len(nodes)),
        embedding=jnp.asarray(nodes, jnp.int32),
    )


@functools.cache
def _compiled(kind, simulations):
    how = tree_search.Search(kind, num_simulations=simulations, max_depth=6)

    def run(nodes, legal, temperature, key):
        return how.run(_model, _root(nodes), legal, temperature, key)

    return jax.jit(run)


def _run(kind, nodes, key, simulations=8, temperature=1.0, legal=None):
    """Searches as many situations as there are keys, over and over those that are given."""
    legal = np.ones((len(key), 3), bool) if legal is None else legal
    nodes = np.resize(nodes, (len(key), 3))
    return jax.device_get(_compiled(kind, simulations)(nodes, legal, temperature, key))


def _keys(seed=0):
    return jax.random.split(jax.random.key(seed), STREAMS)


@pytest.mark.slow
def test_with_the_true_model_of_catch_value_and_action_are_optimal():
    keys = _keys()[: len(SITUATIONS)]
    plan = _run("gumbel", SITUATIONS, keys, simulations=1600, temperature=0.0)
    ball_row, ball_column, paddle_column = SITUATIONS.T
    steps = GAME.rows - 1 - ball_row
    caught = np.where(np.abs(ball_column - paddle_column) <= steps, 1.0, -1.0)
    # A tree's values are means over all tried actions, so they are too low.
    np.testing.assert_allclose(plan.value, caught * GAMMA ** (steps - 1), atol=0.1)
    for action, policy, best in zip(plan.action, plan.policy, BEST):
        assert int(action) in best
        assert np.sum(policy[np.array(sorted(best))]) > 0.9


@pytest.mark.parametrize("kind", ["gumbel", "puct"])
def test_a_stream_does_not_depend_on_its_place_or_its_neighbours(kind):
    nodes, keys = np.resize(SITUATIONS, (STREAMS, 3)), _keys()
    plan = _run(kind, nodes, keys)
    other = jnp.concatenate([_keys(seed=1)[3:], keys[:3]])
    moved = _run(kind, np.concatenate([nodes[:-3], nodes[:3]]), other)
    for ours, theirs in zip(plan, moved):
        np.testing.assert_array_equal(ours[:3], theirs[-3:])
    assert np.any(plan.action != _run(kind, nodes, _keys(seed=1)).action)


@pytest.mark.parametrize("kind", ["gumbel", "puct"])
def test_temperature_decides_how_random_actions_are(kind):
    nodes = [[3, 2, 2]]  # only action 1 is right, but the prior is uniform
    greedy = _run(kind, nodes, _keys(), temperature=0.0).action
    np.testing.assert_array_equal(greedy, 1)
    nodes = [[0, 2, 2]]
    random = _run(kind, nodes, _keys(), temperature=1.0).action
    assert np.min(np.bincount(random, minlength=3)) > STREAMS // 8


@pytest.mark.parametrize(
    ("kind", "bounds", "offset"),  # of values; float32 near 2 absorbs a range of 1e-8
    [
        ("gumbel", "tree", 2.0),
        pytest.param("gumbel", "node", 0.0, marks=pytest.mark.slow),
        pytest.param("gumbel", "node", -2.0, marks=pytest.mark.slow),
        pytest.param("puct", "node", 2.0, marks=pytest.mark.slow),
        pytest.param("puct", "tree", -2.0, marks=pytest.mark.slow),
    ],
)
def test_policies_ignore_differences_of_values_below_the_minimal_range(kind, bounds, offset):
    @functools.partial(jax.jit, static_argnums=1)
    def largest(difference, min_value_range):
        options = {"min_value_range": min_value_range, "value_bounds": bounds}
        how = tree_search.Search(kind, num_simulations=12, max_depth=1, **options)

        def model(action, node):
            output, _ = _model(action, node)
            reward = offset + difference * (action == 1)
            return output.replace(reward=reward, discount=jnp.zeros(())), node

        root = _root(SITUATIONS[:1]).replace(value=jnp.full(1, offset))
        return how.run(model, root, None, 0.0, _keys()[:1]).policy[0, 1]

    sharp = float(largest(1e-3, 1e-8))
    assert sharp > 0.6
    assert largest(1e-3, 0.1) < 0.4
    assert float(largest(0.1, 0.1)) == pytest.approx(sharp, abs=0.01)


def test_first_simulations_follow_the_prior_where_values_are_equal():
    """Values of the whole tree's range, here zero, would otherwise be divided by 1e-8."""
    how = tree_search.Search("gumbel", num_simulations=2, max_depth=1, value_bounds="tree")

    def model(action, node):
        output, _ = _model(action, node)
        return output.replace(reward=jnp.float32(3.0), discount=jnp.zeros(())), node

    prior = jnp.log(jnp.array([[0.2, 0.7, 0.1]]))
    root = _root(SITUATIONS[:1]).replace(value=jnp.full(1, 3.0), prior_logits=prior)
    policy = jax.jit(lambda: how.run(model, root, None, 0.0, _keys()[:1]).policy)()
    np.testing.assert_allclose(policy, jnp.exp(prior), rtol=1e-4)


def _policy(**options):
    """Returns a root's policy; its values differ by 0.1, those of later nodes by up to 1."""

    def model(action, is_root):
        output, _ = _model(action, jnp.asarray(SITUATIONS[0]))
        reward = jnp.where(is_root, 0.1, 1.0) * (action == 1)
        return output.replace(reward=reward, discount=jnp.where(is_root, 1e-3, 0.0)), jnp.bool(0)

    search = tree_search.Search(num_simulations=20, max_depth=2, **options)
    root = _root(SITUATIONS[:1]).replace(embedding=jnp.ones(1, bool))
    return jax.jit(lambda: search.run(model, root, None, 0.0, _keys()[:1]).policy[0])()


def test_bounds_of_the_tree_keep_small_differences_of_a_node_small():
    assert float(_policy(value_bounds="node")[1]) > 0.9
    flat = _policy(value_bounds="tree")
    visits = (float(jnp.log(flat[1] / flat[0])) / (0.1 * 0.1)) - 50.0  # values differ by 0.1 of 1
    assert 5 < visits < 20


@pytest.mark.parametrize("kind", ["gumbel", "puct"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_illegal_actions_are_neither_taken_nor_learnt(kind, temperature):
    legal = np.arange(3) != np.arange(STREAMS)[:, None] % 3
    legal[-1] = False  # some environments mask all actions of a final state
    plan = _run(kind, [[2, 0, 2]], _keys(), temperature=temperature, legal=legal)
    assert np.all(legal[:-1][np.arange(STREAMS - 1), plan.action[:-1]])
    np.testing.assert_array_equal(plan.policy[:-1][~legal[:-1]], 0.0)
    np.testing.assert_allclose(np.sum(plan.policy, axis=-1), 1.0, rtol=1e-5)
    for field in plan:
        assert np.all(np.isfinite(field))


@pytest.mark.slow
def test_embeddings_beside_the_tree_equal_those_in_it():
    """Also where a node at the largest depth is expanded again, by another embedding."""
    search = tree_search.Search("gumbel", num_simulations=6, max_depth=2)
    root, keys, plans = _root(SITUATIONS), _keys(4)[: len(SITUATIONS)], []

    def model(action, node):  # never the same embedding twice
        output, node = _model(action, node)
        return output.replace(prior_logits=jnp.sin(node + action)), node + action

    for platform in ("tpu", "cpu"):
        with parallel.compiling_for(platform):
            plans.append(jax.jit(lambda: search.run(model, root, None, 1.0, keys))())
    streams.assert_same(*plans)
    assert len(np.unique(plans[0].policy, axis=0)) > 4
