"""Tests of Anakin alone; `tests/test_agents.py` tests all runners."""

import dataclasses
import types as python_types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents import ppo
from podracers import anakin, errors, types
from tests import contract, streams

ENVIRONMENT = streams.RandomEpisodes()
SEEDS = (3, 4, 5)


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


@dataclasses.dataclass(frozen=True, eq=False)
class Dice:
    """An agent whose actions and state are random numbers."""

    def init_learner(self, key):
        return jax.random.uniform(key)

    def init_memory(self, rollout):
        return ()

    def init_actor(self, env_id, num_envs, evaluation=False):
        return ()

    def actor_params(self, learner):
        return ()

    def act(self, params, actor_state, timestep, key, evaluation=False):
        return jax.vmap(lambda k: jax.random.randint(k, (), 0, 3))(key), (), ()

    def update(self, state, rollout, key):
        draw = jax.random.uniform(key)
        return types.AgentState(draw, ()), {"draw": types.Mean.of(draw)}


@pytest.fixture(scope="module", name="single")
def _single():
    return _runner()


def test_any_number_of_updates_runs_one_program(single, caplog):
    state, report = single.step(single.init(0), 0)
    streams.assert_same(state, single.init(0))
    assert all(mean.count == 0.0 for mean in report.means.values())
    with jax.log_compiles():
        for num_updates in (3, 1, 2):
            state, _ = single.step(state, num_updates)
        single.init(1)
        assert int(state.update) == 6
        assert "Compiling" not in caplog.text
        jax.jit(lambda x: 3 * x)(2)
        assert "Compiling" in caplog.text


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
    ("options", "message"),
    [
        ({"num_envs": 6}, "num_envs = 6 does not divide over 4 devices: use 4 or 8"),
        ({"num_envs": 3}, "num_envs = 3 does not divide over 4 devices: use 4, or"),
        ({"num_devices": 5}, r"num_devices = 5: 1 process\(es\) have 4"),
        ({"num_devices": 0}, "num_devices: expected"),
        ({"rollout_length": 2.5}, "rollout_length: expected"),
        ({"population": 0}, "population: expected"),
        ({"reset_batch": 0}, "reset_batch: expected"),
        ({"steps_per_pass": 0}, "steps_per_pass: expected"),
        (
            {
                "environment": python_types.SimpleNamespace(
                    spec=ENVIRONMENT.spec, make=None, jax_twin="@cartpole.CartPole"
                )
            },
            " .*--runner sebulba.*@cartpole.CartPole",
        ),
    ],
)
def test_user_errors(options, message):
    with pytest.raises(errors.UserError, match=rf"Anakin\.?{message}"):
        _ = _runner(**{"num_devices": None, **options}).mesh


def test_all_devices_are_used_by_default():
    assert _runner(num_devices=None).mesh.devices.tolist() == jax.devices()
    assert _runner(num_devices=1).mesh.devices.tolist() == jax.devices()[:1]
    (line,) = _runner(population=3).describe()
    assert "2 x cpu" in line and "16 agent steps" in line and "population of 3" in line


def test_members_and_streams_have_different_keys():
    state = _runner(population=len(SEEDS)).init(SEEDS[0])
    keys = np.asarray(jax.random.key_data(state.streams.environment.key)).reshape(-1, 2)
    assert len(np.unique(keys, axis=0)) == len(SEEDS) * 4
    streams.assert_same(state.key, jax.vmap(jax.random.key)(jnp.array(SEEDS)))


def test_updates_have_different_keys():
    recorder = contract.Recorder(Dice())
    runner = anakin.Anakin(recorder, ENVIRONMENT, num_envs=8, rollout_length=6, num_devices=2)
    history = contract.run(runner)
    draws = [float(report.means["draw"].result()) for report in history.reports]
    draws.append(float(history.states[0].learner.inner))
    assert len(set(draws)) == contract.NUM_UPDATES + 1
    actions = [rollout.action.tobytes() for rollout in history.rollouts]
    assert len(set(actions)) == contract.NUM_UPDATES
    np.testing.assert_array_equal(history.states[-1].key, history.states[0].key)
