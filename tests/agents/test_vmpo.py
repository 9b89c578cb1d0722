"""V-MPO: its weights and its loss against NumPy, and its target policy.

Axis legend: `T` time, `B` streams.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents import vmpo
from agents.parts import actor_critic, returns
from podracers import parallel, types
from tests import contract, streams
from tests.agents import experience

COLUMNS = jax.sharding.PartitionSpec(None, parallel.AXIS)
LENGTH, BATCH = 6, 8
# Of seven kept steps, four are the better half; the lowest of them has two equals, so it gets five.
ADVANTAGE = np.float32([[0.5, -1.0, 2.0, 0.1], [9.0, np.nan, 0.1, 0.1], [-2.0, 0.1, 7.0, 8.0]])
WEIGHT = np.float32([[1, 1, 1, 1], [0, 0, 1, 1], [1, 0, 0, 0]])
RHO = np.float32([[0.5, 1, 0.2, 1], [3, 3, 1, 1.7], [1, 3, 3, 3]])
TEMPERATURE = 0.7


def _slow_best_half(advantage, weight, temperature):
    """Returns psi, of sum 1, and the logarithm of the mean of the better half's exponentials.

    Weights other than 0 are importance weights.
    """
    kept = sorted((a for a, w in zip(advantage.ravel(), weight.ravel()) if w), reverse=True)
    lowest = kept[(len(kept) + 1) // 2 - 1]
    psi, size = np.zeros(advantage.shape), 0.0
    for index in np.ndindex(advantage.shape):
        if weight[index] and advantage[index] >= lowest:
            psi[index] = weight[index] * np.exp(advantage[index] / temperature)
            size += weight[index]
    return psi / psi.sum(), np.log(psi.sum() / size)


@pytest.mark.parametrize(("num_devices", "rho"), [(2, 1.0), (4, RHO)])
def test_weights_of_the_better_half_over_all_devices(num_devices, rho):
    def dual(temperature, advantage, weight):
        psi, log_mean = vmpo.best_half(advantage, weight, temperature)
        return temperature * log_mean, psi

    same = experience.REPLICATED
    both = jax.value_and_grad(dual, has_aux=True)
    specs = (same, COLUMNS, COLUMNS), ((same, COLUMNS), same)
    both = jax.jit(experience.on_devices(both, num_devices, *specs))
    (dual, psi), gradient = both(TEMPERATURE, ADVANTAGE, rho * WEIGHT)
    expected, log_mean = _slow_best_half(ADVANTAGE, rho * WEIGHT, TEMPERATURE)
    assert np.sum(expected > 0.0) == 5
    np.testing.assert_allclose(psi, 7.0 * expected, rtol=1e-5)
    np.testing.assert_allclose(dual, TEMPERATURE * log_mean, rtol=1e-5)
    slope = log_mean - np.nansum(expected * ADVANTAGE) / TEMPERATURE
    np.testing.assert_allclose(gradient, slope, rtol=1e-4)
    (dual, _), gradient = both(TEMPERATURE, ADVANTAGE, 0.0 * WEIGHT)
    assert dual == 0.0
    assert np.isfinite(gradient)  # a loss of weight 0 multiplies it by 0


@functools.cache
def _acted(name):
    """Returns the experience of a case whose policy differs from its target policy; no PopArt."""
    agent, environment = contract.AGENTS[name]()
    agent = dataclasses.replace(agent, popart_rate=None)
    return experience.acted(agent, environment, LENGTH, BATCH)


def _inputs(agent, learner, rollout):
    """Returns the time steps `[T + 1, B]` that the network learns from."""
    timestep = agent.preprocess.apply(learner.normalizer, rollout.timestep)
    return agent._rollout_inputs(rollout._replace(timestep=timestep))


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("vmpo", {"": 0.01}),
        pytest.param("vmpo_continuous", {"_mean": 0.01, "_std": 5e-5}, marks=pytest.mark.slow),
    ],
)
def test_the_loss_equals_a_slow_one(name, bounds):
    agent, learner, rollout = _acted(name)
    head, core = agent.action_head, rollout.actor_state.core
    rng = np.random.default_rng(0)
    advantage, target = rng.normal(size=(2, LENGTH, BATCH)).astype(np.float32)
    timestep = jax.tree.map(lambda x: x[:-1], _inputs(agent, learner, rollout))
    kept = ~timestep.last()
    advantage[~kept] = np.nan
    rho = rng.uniform(0.2, 2.0, advantage.shape).astype(np.float32)
    batch = actor_critic.Batch(timestep, rollout.extras, advantage, target, 1.0 * kept, rho)

    def loss(params):
        learnt = agent.loss(params, (batch, core), learner.context)
        return learnt.loss.result(), learnt.metrics | {"loss/total": learnt.loss}

    run = experience.on_devices(jax.grad(loss, has_aux=True), 1, (experience.REPLICATED,))
    gradient, means = jax.device_get(jax.jit(run)(learner.params))

    mask = timestep.observation["action_mask"] if name == "vmpo" else None
    log_eta, log_alpha = learner.params.log_temperature, learner.params.log_multipliers
    eta, alpha = np.exp(log_eta), np.exp(log_alpha)
    psi, log_mean = _slow_best_half(advantage, kept * rho, eta)

    def parts(network):
        """Returns the losses of the policy and the value, and the divergences."""
        unroll = agent.net.unroll
        output, old = (unroll(p, core, timestep)[0] for p in (network, learner.target))
        log_prob = head.log_prob(output.policy, mask, rollout.extras.raw)
        kl = jnp.stack(head.kl(old.policy, output.policy, mask))
        value_loss = jnp.mean(0.5 * (output.value - target) ** 2, where=kept)
        return -jnp.sum(psi * log_prob), value_loss, jnp.mean(kl, (1, 2), where=kept)

    policy_loss, value_loss, kl = jax.jit(parts)(learner.params.network)
    assert np.all(kl > 1e-2)
    bound = np.array(list(bounds.values()))
    temperature_loss = eta * (0.02 + log_mean)
    # Penalties and their duals add up to alpha times the bound; their gradients do not.
    total = policy_loss + 0.5 * value_loss + temperature_loss + np.sum(alpha * bound)
    expected = {"loss/total": total, "loss/policy": policy_loss, "policy/temperature": eta}
    for ending, *values in zip(bounds, kl, alpha):
        expected |= {f"policy/kl{ending}": values[0], f"policy/kl_multiplier{ending}": values[1]}
    for metric, value in expected.items():
        np.testing.assert_allclose(means[metric].result(), value, rtol=1e-4, err_msg=metric)
    np.testing.assert_allclose(gradient.log_multipliers, alpha * (bound - kl), rtol=1e-4)
    slope = temperature_loss - np.nansum(psi * advantage)
    np.testing.assert_allclose(gradient.log_temperature, slope, rtol=1e-4)
    _, pullback = jax.vjp(jax.jit(parts), learner.params.network)
    expected = pullback((1.0, 0.5, jnp.asarray(alpha)))[0]
    streams.assert_close(gradient.network, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["vmpo", pytest.param("vmpo_continuous", marks=pytest.mark.slow)])
def test_the_policy_that_acts_is_replaced_after_three_gradient_steps(name):
    agent, learner, rollout = _acted(name)
    agent = dataclasses.replace(agent, epochs=1, num_minibatches=1)

    def update(learner, rollout):
        state = types.AgentState(learner, ())
        state, metrics = agent.update(state, rollout, jax.random.key(0))
        return state.learner, metrics["value/target"].result()

    update = jax.jit(experience.on_devices(update, 1, (experience.REPLICATED,) * 2))
    after, target = update(learner, rollout)
    streams.assert_same(agent.actor_params(after).params, learner.target)
    for _ in range(2):
        after, _ = update(after, rollout)
    streams.assert_same(agent.actor_params(after).params, after.params.network)
    assert after.agent_steps == learner.agent_steps + 3 * LENGTH * BATCH

    timestep = _inputs(agent, learner, rollout)
    unroll = jax.jit(agent.net.unroll)
    values = unroll(learner.params.network, rollout.actor_state.core, timestep)[0].value
    expected = returns.gae(timestep, values, 0.99, 1.0) + values[:-1]
    expected = np.mean(expected, where=~timestep.last()[:-1])
    np.testing.assert_allclose(target, expected, rtol=1e-4)


def test_steps_of_an_older_policy_are_weighted_halfway_to_the_target_policy():
    """Three policies differ: that which acted, the target policy, and the one that learns."""
    agent, learner, rollout = _acted("vmpo")
    agent = dataclasses.replace(agent, epochs=1, num_minibatches=1)
    move = jax.jit(functools.partial(experience.moved, scale=0.2, seed=6))
    learner = learner._replace(target=jax.device_get(move(learner.params.network)))
    rollout = rollout._replace(age=np.ones(BATCH, np.int32))

    def mean_rho(learner, rollout):
        state = types.AgentState(learner, ())
        return agent.update(state, rollout, jax.random.key(0))[1]["policy/rho"].result()

    run = experience.on_devices(mean_rho, 1, (experience.REPLICATED,) * 2)
    timestep = jax.tree.map(lambda x: x[:-1], _inputs(agent, learner, rollout))
    output, _ = jax.jit(agent.net.unroll)(learner.target, rollout.actor_state.core, timestep)
    mask = timestep.observation["action_mask"]
    log_prob = agent.action_head.log_prob(output.policy, mask, rollout.extras.raw)
    rho = np.minimum(np.exp(0.5 * (log_prob - rollout.extras.log_prob)), 5.0)
    expected = np.mean(rho, where=~timestep.last())
    assert abs(expected - 1.0) > 0.02
    np.testing.assert_allclose(jax.jit(run)(learner, rollout), expected, rtol=1e-4)


def test_initial_values_of_the_lagrangian():
    agent, _ = contract.AGENTS["vmpo"]()
    agent = dataclasses.replace(agent, initial_temperature=0.5, initial_multiplier=3.0)
    duals = jax.jit(lambda key: agent.init_params(key)[1:])(jax.random.key(0))  # no network
    np.testing.assert_allclose(np.exp(duals[0]), 0.5, rtol=1e-5)
    np.testing.assert_allclose(np.exp(duals[1]), [3.0], rtol=1e-5)
