"""Tests of Anakin alone; `tests/test_agents.py` tests all runners."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents import ppo
from podracers import anakin, keys, metrics
from tests import contract, streams

ENVIRONMENT = streams.RandomEpisodes()


def _runner(environment=ENVIRONMENT, **options):
    agent = ppo.PPO(
        ENVIRONMENT.spec,
        network=contract.tiny_network(),
        learning_rate=0.01,
        epochs=1,
        num_minibatches=2,
    )
    options = {"num_envs": 4, "rollout_length": 4, "num_devices": 2} | options
    return anakin.Anakin(agent, environment, **options)


@pytest.fixture(scope="module", name="single")
def _single():
    return _runner()


@pytest.mark.exact
def test_any_split_into_dispatches_gives_the_same_state_and_report(single):
    """Also where the report was recorded between them."""
    expected = single.step(single.init(0), 5)
    state, report = single.step(single.init(0), 2)
    report = metrics.Report.recorded(json.loads(json.dumps(report.record())))
    streams.assert_same(single.step(state, 3, report), expected)


def test_the_state_is_donated_and_split_over_devices(single):
    before = single.init(0)
    leaves = jax.tree.leaves((before.learner, before.streams))
    state, report = single.step(before, 5)
    jax.block_until_ready(state)
    assert all(leaf.is_deleted() for leaf in leaves)
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state.learner))
    shards = [np.asarray(shard.data) for shard in state.streams.env_id.addressable_shards]
    np.testing.assert_array_equal(shards, [[0, 1], [2, 3]])
    # Metrics are of all devices and updates: one gradient step of each of two minibatches, without
    # LAST steps.
    steps = 5 * single.steps_per_update
    assert steps * 0.5 < report.means["loss/total"].count < steps
    assert 0 < report.means["episode/length"].total <= steps
    assert report.means["episode/length"].result() > 1.0


@pytest.mark.parametrize(
    ("platform", "chosen", "steps"), [("cpu", 16, 1), ("gpu", None, 8), ("tpu", None, 1)]
)
def test_the_devices_choose_the_form_of_the_acting_loop(platform, chosen, steps):
    device = types.SimpleNamespace(platform=platform)
    for option, expected in (("auto", (chosen, steps)), (4, (4, 4))):
        runner = _runner(reset_batch=option, steps_per_pass=option)
        vars(runner)["mesh"] = types.SimpleNamespace(devices=np.array([device]))
        assert (runner.reset_size, runner.pass_length) == expected
    assert _runner(reset_batch=None).reset_size is None


def test_all_devices_are_used_by_default():
    assert _runner(num_devices=None).mesh.devices.tolist() == jax.devices()
    assert _runner(num_devices=1).mesh.devices.tolist() == jax.devices()[:1]
    (line,) = _runner(population=3).describe()
    assert "2 x cpu" in line and "16 agent steps" in line and "population of 3" in line


def test_keys_differ():
    """Golden digests and parity test the use of the keys."""
    run = jax.random.key(0)
    derived = [keys.learner(run), *(keys.streams(run, update) for update in range(3))]
    derived += [key for update in range(3) for key in keys.act_and_learn(run, update)]
    for update_key in derived:
        per_stream = keys.per_stream(update_key, jnp.arange(3))
        derived = [*derived, *per_stream, *keys.at_time(per_stream, 1)]
    assert len({jax.random.key_data(key).tobytes() for key in derived}) == len(derived)
