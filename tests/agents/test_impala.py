"""IMPALA's update against a slow one, its minibatches and its optimizers.

Axis legend: `T` time, `B` streams.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents import impala, returns
from tests import contract, streams
from tests.agents import experience

LENGTH, BATCH = experience.LENGTH, experience.BATCH


@functools.cache
def _off_policy(network):
    """Returns a rollout that other parameters acted than those that learn from it."""
    given = experience.collect("impala", network)
    move = jax.jit(functools.partial(experience.perturbed, scale=0.2, seed=5))
    learner = move(given.learner)
    return given._replace(learner=jax.device_get(learner))


def _slow_update(given):
    """Returns the parameters after one step of clipped RMSProp, and the loss before it."""
    agent, learner, rollout = given
    chosen = np.eye(3)[rollout.action]

    def log_policy(logits):
        return jnp.sum(jax.nn.log_softmax(logits[:-1]) * chosen, axis=-1)

    outputs = functools.partial(experience.outputs, agent._policy.network, rollout=rollout)
    logits, values = jax.jit(outputs)(learner.params)
    log_ratio = log_policy(logits) - rollout.extras.log_prob
    ratio = np.exp(log_ratio)
    kept = ~rollout.timestep.last()[:-1]
    assert np.ptp(ratio[kept]) > 0.5  # far enough from the policy that acted
    timestep = experience.learnt_timestep(rollout)
    target, advantage = jax.device_get(returns.vtrace(timestep, values, log_ratio, 0.9, 0.8))

    def loss(params):
        logits, values = outputs(params)
        log_p = jax.nn.log_softmax(logits[:-1])
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
        value_loss = 0.25 * (values[:-1] - target) ** 2
        per_step = -log_policy(logits) * advantage + value_loss - 0.1 * entropy
        return jnp.sum(jnp.where(kept, per_step, 0.0)) / kept.sum()

    value, gradient, norm = experience.clipped_gradient(loss, learner.params)

    def step(p, g):
        return p - 0.02 * g / (np.sqrt(0.01 * g**2) + 1e-2)

    return jax.tree.map(step, learner.params, gradient), {
        "loss/total": value,
        "gradient_norm": norm,
        "value/target": target[kept].mean(),
        "value/mean": values[:-1][kept].mean(),
        "policy/rho": np.minimum(ratio, 1.0)[kept].mean(),
    }


@pytest.mark.parametrize(
    ("network", "num_devices"),
    [("feed_forward", 4), pytest.param("lstm", 1, marks=pytest.mark.slow)],
)
def test_an_update_equals_a_slow_one(network, num_devices):
    """V-trace off-policy, truncations, weights, clipping and RMSProp, all at once."""
    given = _off_policy(network)
    experience.assert_update(given, _slow_update(given), num_devices)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"optimizer": "adam"}, 1.0 / (1.0 + 0.1)),
        ({}, 1.0 / (np.sqrt(0.01) + 0.1)),
        ({"rmsprop_epsilon_in_sqrt": True}, 1.0 / np.sqrt(0.01 + 0.1)),
        ({"rmsprop_decay": 0.75}, 1.0 / (0.5 + 0.1)),
    ],
)
def test_the_first_step_of_each_optimizer(options, expected):
    agent = impala.IMPALA(
        experience.ENVIRONMENT.spec, max_grad_norm=10.0, optimizer_epsilon=0.1, **options
    )
    gradient = {"x": jnp.ones((2,))}
    direction, _ = agent._optimizer.chain.update(gradient, agent._optimizer.chain.init(gradient))
    np.testing.assert_allclose(direction["x"], expected, rtol=1e-5)


def test_two_minibatches_do_not_depend_on_the_devices():
    agent = experience.ALGORITHMS["impala"](
        num_minibatches=2, network=contract.tiny_network(), max_grad_norm=10.0
    )
    given = _off_policy("feed_forward")._replace(agent=agent)
    learner, means = experience.update(given)
    other, other_means = experience.update(given, num_devices=4)
    streams.assert_close(learner.params, other.params, rtol=1e-3, atol=1e-5)
    assert abs(means["loss/total"] - other_means["loss/total"]) < 1e-4
