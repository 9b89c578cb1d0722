"""PopArt's statistics against NumPy, and values before and after they move."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents import networks, optimization, policy
from agents.networks import popart
from podracers import parallel, types
from tests import contract, streams
from tests.agents import experience

COLUMNS = jax.sharding.PartitionSpec(None, parallel.AXIS)
LENGTH, BATCH = 6, 8


@pytest.mark.parametrize("num_devices", [1, 4])
def test_values_stay_where_statistics_move(num_devices):
    agent, _ = contract.AGENTS["ppo_scaled"]()
    params = popart.init(experience.zeros(agent).params)
    params = experience.moved(params, 0.5, seed=1)
    params |= {popart.NAME: popart.Statistics(*np.float32([3.0, 13.0, 1.0]))}  # of deviation 2
    rng = np.random.default_rng(0)
    target = rng.normal(100.0, 30.0, size=(LENGTH, BATCH)).astype(np.float32)
    weight = rng.integers(0, 2, target.shape).astype(np.float32)

    def update(params, target, weight):
        moments = (types.Mean.of(x, weight) for x in (target, jnp.square(target)))
        return popart.update(params, *moments, rate=0.25)

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


@pytest.mark.parametrize("name", ["ppo_scaled", "impala_lstm", "vmpo_continuous"])
def test_an_update_moves_statistics_to_its_targets(name):
    agent, environment = contract.AGENTS[name]()
    agent, learner, rollout = experience.acted(agent, environment, LENGTH, BATCH)

    def update(learner, rollout):
        memory = agent.init_memory(rollout)
        state, metrics = agent.update(types.AgentState(learner, memory), rollout, jax.random.key(0))
        params = getattr(state.learner.params, "network", state.learner.params)
        return params[popart.NAME], {key: mean.result() for key, mean in metrics.items()}

    run = jax.jit(experience.on_devices(update, 1, (experience.REPLICATED,) * 2))
    statistics, metrics = run(learner, rollout)
    old = getattr(learner.params, "network", learner.params)[popart.NAME]
    moments = np.array([metrics["value/target"], metrics["value/target_square"]])
    expected = old[:2] + (moments - old[:2]) / (old.updates + 1.0)
    np.testing.assert_allclose(statistics, (*expected, old.updates + 1.0), rtol=1e-5)


def test_the_unit_of_targets_changes_no_loss():
    """With clipped values, and without normalised advantages."""
    agent, environment = contract.AGENTS["ppo_scaled"]()
    agent, learner, rollout = experience.acted(agent, environment, LENGTH, BATCH)
    agent = dataclasses.replace(agent, value_clip_epsilon=0.2, normalize_advantages=False)
    target = np.random.default_rng(0).normal(size=(LENGTH, BATCH)).astype(np.float32)

    def loss(unit):
        timestep = agent._learning_inputs(learner.normalizer, rollout)
        core, timestep = agent.net.prepare(rollout.actor_state.core, timestep)
        statistics = popart.Statistics(jnp.float32(0.0), jnp.square(unit), jnp.float32(1.0))
        params = learner.params | {popart.NAME: statistics}
        extras = rollout.extras._replace(value=unit * rollout.extras.value)
        current, ones = jax.tree.map(lambda x: x[:-1], timestep), jnp.ones_like(target)
        batch = policy.Batch(current, extras, target, unit * target, ones, ones)
        context = optimization.Context(jnp.float32(0.0))
        metrics = agent.loss(params, (batch, core), context).metrics
        return {name: mean.result() for name, mean in metrics.items()}

    loss = jax.jit(experience.on_devices(loss, in_specs=experience.REPLICATED))
    streams.assert_close(loss(np.float32(50.0)), loss(np.float32(1.0)), rtol=1e-4)


def test_deviations_below_the_precision_of_the_mean_are_not_used():
    mean = np.float32(3000.1)
    statistics = popart.Statistics(mean, np.square(mean) - 1.0, np.float32(1.0))  # a rounding error
    np.testing.assert_allclose(statistics.std, 3.0, rtol=0.01)
