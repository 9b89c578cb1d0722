"""Minibatches, the same on any number of devices; gradient steps against those of optax."""

import dataclasses
import functools
import types as python_types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from agents.backends import layouts
from agents.networks import popart
from agents.parts import minibatches, optimization, preprocessing
from podracers import errors, parallel, trees, types
from tests import contract, streams
from tests.agents import experience

P = jax.sharding.PartitionSpec
SEEDS = pytest.mark.parametrize("seed", [0, 1])
LENGTH, BATCH, NUM = 6, 24, 3
ITEM = np.arange(LENGTH * BATCH, dtype=np.int32).reshape(LENGTH, BATCH)
TREE = {"item": ITEM, "feature": np.stack([ITEM, -ITEM], axis=-1)}
ROW = np.arange(BATCH, dtype=np.int32)
# What `dealer` reads of a network.
TRANSITIONS = python_types.SimpleNamespace(is_recurrent=False, memory_length=0)


@functools.cache
def _deal(function, num_devices=1, seed=0):
    """Returns the minibatches, and the rows with each (unchanged with transitions)."""
    columns, rows, dealt = P(None, parallel.AXIS), P(parallel.AXIS), P(None, None, parallel.AXIS)

    def over_time(tree, row, key):
        return minibatches.dealer(TRANSITIONS, tree, (), NUM)(key)[0], row

    def over_streams(tree, row, key):
        return minibatches.over_streams(tree, row, key, NUM)

    deal, row_specs = (over_time, rows) if function == "time" else (over_streams, columns)
    in_specs, out_specs = (columns, rows, P()), (dealt, row_specs)
    mapped = experience.on_devices(deal, num_devices, in_specs, out_specs)
    return jax.device_get(jax.jit(mapped)(TREE, ROW, jax.random.key(seed)))


@SEEDS
def test_over_time_deals_every_transition_once_and_keeps_streams(seed):
    dealt, _ = _deal("time", seed=seed)
    assert dealt["item"].shape == (NUM, LENGTH // NUM, BATCH)
    np.testing.assert_array_equal(np.sort(dealt["item"].ravel()), ITEM.ravel())
    stream = np.broadcast_to(np.arange(BATCH), dealt["item"].shape)
    np.testing.assert_array_equal(dealt["item"] % BATCH, stream)
    # Groups of `M` neighbours give one item to each minibatch.
    groups = dealt["item"] // BATCH // NUM
    np.testing.assert_array_equal(groups, np.broadcast_to(groups[:1], groups.shape))
    np.testing.assert_array_equal(dealt["feature"][..., 1], -dealt["item"])


@SEEDS
def test_over_streams_deals_every_stream_once_and_keeps_time(seed):
    dealt, row = _deal("streams", seed=seed)
    np.testing.assert_array_equal(np.sort(row.ravel()), ROW)
    np.testing.assert_array_equal(dealt["item"], np.moveaxis(ITEM[:, row], 0, 1))
    np.testing.assert_array_equal(dealt["feature"][..., 1], -dealt["item"])


def test_a_tpu_selects_the_items_that_others_gather():
    rng = np.random.default_rng(0)
    permutation = np.argsort(rng.random((NUM, 1, BATCH)), axis=0)
    tree = {
        "image": rng.integers(0, 255, (NUM, 4, BATCH, 2, 3), np.uint8),
        "reward": rng.normal(size=(NUM, 4, BATCH)),
        "flag": rng.random((NUM, 4, BATCH)) < 0.5,
    }
    expected = jax.jit(lambda: layouts.permute(tree, permutation))()
    with parallel.compiling_for("tpu"):
        permuted = jax.jit(lambda: layouts.permute(tree, permutation))
        assert "gather" not in str(jax.make_jaxpr(permuted)())
        streams.assert_same(permuted(), expected)


def test_a_gpu_takes_norms_and_means_in_one_sum():
    rng = np.random.default_rng(0)
    values = {name: rng.normal(size=(LENGTH, BATCH)).astype(np.float32) for name in "ab"}
    weights = (rng.random((LENGTH, BATCH)) < 0.7).astype(np.float32)
    values["a"][weights == 0.0] = np.nan

    def both(values, weights):
        return layouts.norm(values["b"][0]), layouts.norm(values), layouts.means(values, weights)

    values |= {"is_positive": values["b"] > 0.0}
    results = []
    for platform in ("cpu", "gpu"):
        with parallel.compiling_for(platform):
            results.append(jax.jit(both)(values, weights))
            sums = str(jax.make_jaxpr(both)(values, weights)).count("reduce_sum")
            assert sums == {"cpu": 10, "gpu": 4}[platform]
    streams.assert_close(*results)


def test_transitions_in_stacks_are_streams_of_one_step():
    stacks = python_types.SimpleNamespace(is_recurrent=False, memory_length=3)

    def deal(tree, key):
        return tuple(minibatches.dealer(of, tree, (), NUM)(key)[0] for of in (TRANSITIONS, stacks))

    columns, dealt = P(None, parallel.AXIS), P(None, None, parallel.AXIS)
    mapped = experience.on_devices(deal, 1, (columns, P()), (dealt, dealt))
    usual, flat = jax.jit(mapped)(TREE, jax.random.key(0))
    assert flat["item"].shape == (NUM, 1, LENGTH // NUM * BATCH)
    np.testing.assert_array_equal(flat["item"].ravel(), usual["item"].ravel())


def test_every_stream_and_every_device_draws_for_itself():
    """With one draw for all streams, or for all devices, columns would repeat."""
    time = _deal("time", 4)[0]["item"] // BATCH  # [M, T / M, B]
    columns = {column.tobytes() for column in np.moveaxis(time, -1, 0)}
    assert len(columns) > BATCH // 3  # of 36 permutations
    _, row = _deal("streams", 4)
    assert len({group.tobytes() for group in row.T % NUM}) > 2  # of 6


def test_equal_numbers_still_give_a_permutation():
    numbers = np.float32([[0.5, 0.1, 0.5, 0.5], [0.3, 0.3, 0.3, 0.3]])
    ranks = streams.evaluate(minibatches._ranks, numbers)
    np.testing.assert_array_equal(ranks, [[1, 0, 2, 3], [0, 1, 2, 3]])


PARAMS = {"x": jnp.array([1.0, -2.0])}
MINIBATCH = (jnp.arange(8.0).reshape(4, 2), jnp.array([1.0, 0.0, 1.0, 1.0]))


def _loss(params, minibatch):
    rows, weight = minibatch
    error = rows @ params["x"] - 1.0
    return optimization.LossOutput(types.Mean.of(jnp.square(error), weight), {}, error)


@pytest.mark.parametrize("num_devices", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_a_step_is_that_of_optax_on_the_mean_over_the_global_minibatch(num_devices, max_grad_norm):
    rms = optax.scale_by_rms(decay=0.5)
    optimizer = optimization.Optimizer(rms, learning_rate=0.1, max_grad_norm=max_grad_norm)

    def run(minibatch):
        state, output = optimizer.gradient_step(_loss, optimizer.init(PARAMS), minibatch, 0.1)
        return state.params, output.metrics["gradient_norm"].result(), output.priority

    split = P(parallel.AXIS)
    mapped = experience.on_devices(run, num_devices, (split,), (P(), P(), split))
    params, norm, priority = jax.jit(mapped)(MINIBATCH)
    # Waiting for the global count before the gradient would cost a second round of messages.
    assert str(jax.make_jaxpr(mapped)(MINIBATCH)).count("psum") == 1

    def mean(params):
        return jnp.sum(jnp.square(MINIBATCH[0] @ params["x"] - 1.0) * MINIBATCH[1]) / 3.0

    gradient = streams.evaluate(jax.grad(mean), PARAMS)
    clip = optax.identity() if max_grad_norm is None else optax.clip_by_global_norm(max_grad_norm)
    chain = optax.chain(clip, optax.rmsprop(0.1, decay=0.5))
    updates, _ = jax.jit(lambda: chain.update(gradient, chain.init(PARAMS), PARAMS))()
    np.testing.assert_allclose(params["x"], optax.apply_updates(PARAMS, updates)["x"], rtol=1e-5)
    np.testing.assert_allclose(norm, optax.tree.norm(gradient), rtol=1e-5)
    np.testing.assert_allclose(priority, MINIBATCH[0] @ PARAMS["x"] - 1.0)


@pytest.mark.parametrize(("final", "at_30"), [(0.0, 0.7), (2.0, 1.3), (None, 1.0)])
def test_numbers_change_linearly_to_a_final_value_and_stay_there(final, at_30):
    def value(steps):
        return optimization.annealed(1.0, final, 100.0, jnp.int32(steps))

    assert value(0) == 1.0
    np.testing.assert_allclose(value(30), at_30, rtol=1e-6)
    assert value(100) == value(2**30) == (1.0 if final is None else final)


def test_schedules_and_target_parameters_go_on_after_counters_reach_their_limits():
    optimizer = optimization.Optimizer(optax.scale_by_adam(), 1.0, anneal_steps=6e11)
    rollout = types.Rollout(experience.random_episodes(0, (101, 2)), (), (), ())
    params, count = {"x": jnp.zeros(())}, jnp.int32(0)
    counts = count, jnp.float32(0.0), count
    learner = optimization.Learner(optimizer.init(params), params, (), *counts)

    def run(learner):
        learner = learner.observe(rollout, preprocessing.Preprocess())
        rate = optimizer.learning_rate_at(learner.agent_steps)

        def step(learner, _):
            params = {"x": learner.target["x"] + 1.0}
            return learner.step(learner.train_state, params, period=3), learner.gradient_steps

        learner, _ = jax.lax.scan(step, learner, None, length=9)
        return rate, learner.target["x"]

    run = jax.jit(experience.on_devices(run, 1, (P(),)))
    rate, target = run(learner)
    np.testing.assert_allclose((rate, target), (1.0, 3.0), rtol=1e-6)
    end = jnp.int32(errors.INT32_MAX)
    rate, target = run(learner._replace(update=end - 1, gradient_steps=end - 4))
    np.testing.assert_allclose(rate, 1.0 - 200 * 2.0**31 / 6e11, rtol=1e-5)
    assert 2.0 <= target <= 4.0


@pytest.mark.parametrize("transformation", [optax.scale_by_adam(), optax.scale_by_radam()])
def test_optimizers_go_on_after_their_counts_stop(transformation):
    state, update = transformation.init(PARAMS), jax.jit(transformation.update)
    for _ in range(4):
        state = state._replace(count=np.maximum(state.count, np.int32(errors.INT32_MAX - 2)))
        updates, state = jax.device_get(update({"x": np.float32([2.0, -1.0])}, state))
        moments = state.mu["x"] / np.sqrt(state.nu["x"])
        np.testing.assert_allclose(updates["x"], moments, rtol=1e-2)
    assert state.count == errors.INT32_MAX


MULTIPLIERS = {"log_temperature", "log_multipliers"}
STATISTICS = {f"{popart.NAME}/{field}" for field in popart.Moments._fields}


@pytest.mark.parametrize(
    ("name", "options", "others"),
    [
        ("ppo_scaled", {}, STATISTICS),
        ("impala_lstm", {}, STATISTICS),
        ("vmpo_continuous", {}, MULTIPLIERS | STATISTICS),
        ("pqn", {}, set()),
        ("sac_gru", {"policy_period": 2}, {"log_temperature"}),
    ],
)
def test_an_optimizer_of_optax_replaces_that_of_the_weights(name, options, others):
    """Its steps descend by the agent's learning rate; what is no weight keeps the agent's own."""

    def decayed(learning_rate):
        return optax.chain(optax.add_decayed_weights(0.5), optax.scale(-learning_rate))

    agent, _ = contract.AGENTS[name]()
    options |= {"learning_rate": 0.25, "max_grad_norm": None}
    agent = dataclasses.replace(agent, optimizer=decayed, **options)
    optimizer = agent._optimizer
    params = jax.tree.map(lambda x: np.asarray(x) + 2.0, experience.zeros(agent).params)
    state = jax.jit(optimizer.init)(params).optimizer_state
    direction, _ = streams.evaluate(optimizer.chain.update, params, state, params)
    leaves = trees.leaves(direction).items()
    actual = {path.removeprefix("network/") for path, leaf in leaves if not np.all(leaf == 3.0)}
    assert actual == others
    assert float(optimizer.learning_rate_at(jnp.float32(0.0))) == 0.25
