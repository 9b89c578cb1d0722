"""PopArt's statistics against NumPy, and values before and after they move."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from agents import networks
from agents.networks import popart
from podracers import parallel, types
from tests import contract, streams
from tests.agents import experience

COLUMNS = jax.sharding.PartitionSpec(None, parallel.AXIS)
LENGTH, BATCH = 6, 8


@pytest.mark.parametrize("num_devices", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_values_stay_where_statistics_move(num_devices):
    agent, _ = contract.AGENTS["ppo_scaled"]()
    params = popart.init(experience.zeros(agent).params)
    params = experience.moved(params, 0.5, seed=1)
    params |= {popart.NAME: popart.Moments(*np.float32([3.0, 13.0, 1.0]))}  # of deviation 2
    rng = np.random.default_rng(0)
    target = rng.normal(100.0, 30.0, size=(LENGTH, BATCH)).astype(np.float32)
    weight = rng.integers(0, 2, target.shape).astype(np.float32)

    def update(params, target, weight):
        return popart.update(params, target, weight, rate=0.25)

    same = experience.REPLICATED
    update = experience.on_devices(update, num_devices, (same, COLUMNS, COLUMNS), same)
    after = jax.jit(update)(params, target, weight)
    # The rate is 1 / 2 in the second update.
    kept = target[weight > 0.0].astype(np.float64)
    mean, square = 0.5 * (3.0 + kept.mean()), 0.5 * (13.0 + np.mean(kept**2))
    statistics = after[popart.NAME]
    np.testing.assert_allclose(statistics, (mean, square, 2.0), rtol=1e-5)
    np.testing.assert_allclose(statistics.std, np.sqrt(square - mean**2), rtol=1e-4)

    timestep = networks.zero_timestep(agent._network_spec)
    core = agent.net.initial_core(1)
    before, now = (jax.jit(agent.net.step)(p, core, timestep)[0] for p in (params, after))
    np.testing.assert_allclose(now.value, before.value, rtol=1e-4)
    streams.assert_same(now.policy, before.policy)
    # The layer computes the value in the new unit.
    raw = {**after, popart.NAME: popart.init({})[popart.NAME]}
    layer = jax.jit(agent.net.step)(raw, core, timestep)
    np.testing.assert_allclose(layer[0].value, (now.value - mean) / statistics.std, rtol=1e-3)


AGENTS = pytest.mark.parametrize(
    "name",
    [
        "impala_lstm",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("ppo_scaled", "vmpo_continuous")),
    ],
)


@functools.cache
def _acted(name):
    """Returns an agent, its learner with statistics of no targets, a rollout, and its update.

    The network does not see rewards. The update returns the learner and the means of its metrics.
    """
    agent, environment = contract.AGENTS[name]()
    agent = dataclasses.replace(agent, previous_action_and_reward=False)
    if name == "ppo_scaled":
        options = {"value_clip_epsilon": 0.2, "normalize_advantages": False}
        agent = dataclasses.replace(agent, normalize_rewards=False, **options)
    agent, learner, rollout = experience.acted(agent, environment, LENGTH, BATCH)

    def update(learner, rollout):
        memory = agent.init_memory(rollout)
        state, metrics = agent.update(types.AgentState(learner, memory), rollout, jax.random.key(0))
        return state.learner, {key: mean.result() for key, mean in metrics.items()}

    update = jax.jit(experience.on_devices(update, 1, (experience.REPLICATED,) * 2))
    return _with(learner, popart.init({})[popart.NAME]), rollout, update


def _network(learner):
    return getattr(learner.params, "network", learner.params)


def _with(learner, statistics):
    """Returns a learner with other statistics of targets."""

    def is_old(x):
        return isinstance(x, popart.Moments)

    params = jax.tree.map(lambda x: statistics if is_old(x) else x, learner.params, is_leaf=is_old)
    return learner._replace(train_state=learner.train_state._replace(params=params))


@AGENTS
def test_statistics_are_those_of_the_first_targets_already_where_they_are_learnt(name):
    learner, rollout, update = _acted(name)
    timestep = rollout.timestep._replace(reward=1e4 * rollout.timestep.reward)
    rollout = rollout._replace(timestep=timestep)
    after, first = update(learner, rollout)
    statistics = _network(after)[popart.NAME]
    # IMPALA's own targets follow the parameters from one minibatch to the next.
    rtol = 0.2 if name == "impala_lstm" else 1e-4
    np.testing.assert_allclose(statistics.mean, first["value/target"], rtol=rtol)
    assert statistics.updates == 1.0
    _, second = update(after, rollout)
    assert 0.2 < first["gradient_norm"] / second["gradient_norm"] < 5.0


@AGENTS
def test_the_unit_of_rewards_changes_no_loss(name):
    """With clipped values, and without normalised advantages."""
    learner, rollout, update = _acted(name)

    def learnt(unit):
        statistics = popart.Moments(*np.float32([0.0, unit**2, 1.0]))
        timestep = rollout.timestep._replace(reward=unit * rollout.timestep.reward)
        extras = rollout.extras._replace(value=unit * rollout.extras.value)
        scaled = rollout._replace(timestep=timestep, extras=extras)
        after, metrics = update(_with(learner, statistics), scaled)
        weights = {**_network(after), popart.NAME: ()}
        return weights, {key: x for key, x in metrics.items() if not key.startswith("value/")}

    streams.assert_close(learnt(np.float32(64.0)), learnt(np.float32(1.0)), rtol=1e-3, atol=1e-5)


def test_deviations_below_the_precision_of_the_mean_are_not_used():
    mean = np.float32(3000.1)
    statistics = popart.Moments(mean, np.square(mean) - 1.0, np.float32(1.0))  # a rounding error
    np.testing.assert_allclose(statistics.std, 3.0, rtol=0.01)
