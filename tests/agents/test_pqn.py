"""PQN's update against a slow one in NumPy, and how it acts.

Axis legend: `T` time, `B` streams, `A` actions.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents import networks, pqn, returns
from agents.networks import cores, encoders
from tests import streams
from tests.agents import experience

LENGTH, BATCH = experience.LENGTH, experience.BATCH
GAMMA, LAMBDA = 0.9, 0.8
ENVIRONMENT = streams.RandomEpisodes(masked=True)
NETWORKS = {
    "feed_forward": {},
    "frames": {"frame_stack": 3},
    "gru": {"core": cores.GRU(8, layer_norm=True)},
}


def _agent(network="feed_forward", **settings):
    settings = {
        "learning_rate": 0.02,
        "anneal_steps": 10 * LENGTH * BATCH,
        "max_grad_norm": 0.1,  # small enough to bind
        "gamma": GAMMA,
        "q_lambda": LAMBDA,
        "num_minibatches": 1,
        "epochs": 1,
        "epsilon": 0.5,
        "epsilon_steps": 2 * LENGTH * BATCH,
        "reward_scale": 0.5,
        "reward_clip": 1.0,
    } | settings
    encoder = encoders.MLP((8,), layer_norm=True)
    network = functools.partial(networks.q_network, encoder=encoder, **NETWORKS[network])
    return pqn.PQN(ENVIRONMENT.spec, network, **settings)


@functools.cache
def _given(network):
    return experience.acted(_agent(network), ENVIRONMENT)


def _slow_update(given):
    """Returns the parameters after a step, and the metrics."""
    agent, learner, rollout = given
    values = functools.partial(experience.outputs, agent._network, rollout=rollout)
    q_values = np.asarray(jax.jit(values)(learner.params))
    best = np.where(rollout.timestep.observation["action_mask"], q_values, -np.inf).max(axis=-1)
    timestep = experience.learnt_timestep(rollout)
    targets = np.asarray(returns.lambda_returns(timestep, best, GAMMA, LAMBDA))
    kept = ~rollout.timestep.last()[:-1]
    chosen = np.eye(3)[rollout.action]

    def loss(params):
        taken = jnp.sum(values(params)[:-1] * chosen, axis=-1)
        return jnp.sum(jnp.where(kept, 0.5 * (taken - targets) ** 2, 0.0)) / kept.sum()

    value, gradient, norm = experience.clipped_gradient(loss, learner.params)
    # In its first steps rectified Adam does not trust its second moment, and divides by nothing.
    stepped = jax.tree.map(lambda p, g: p - 0.02 * g, learner.params, gradient)
    return stepped, {
        "loss/total": value,
        "gradient_norm": norm,
        "value/target": targets[kept].mean(),
        "value/mean": np.sum(q_values[:-1] * chosen, axis=-1)[kept].mean(),
    }


@pytest.mark.parametrize(
    ("network", "num_devices"),
    [
        ("frames", 4),
        pytest.param("gru", 1, marks=pytest.mark.slow),
    ],
)
def test_an_update_equals_a_slow_one(network, num_devices):
    """Masks, truncations, rewards, the trace, resets of memory, weights, clipping, and RAdam."""
    given = _given(network)
    experience.assert_update(given, _slow_update(given), num_devices)


def test_epsilon_and_the_learning_rate_fall_with_agent_steps():
    given = _given("feed_forward")
    size = LENGTH * BATCH
    for updates, epsilon, rate in ((0, 1.0, 0.02), (1, 0.75, 0.018), (5, 0.5, 0.01)):
        learner = given.learner._replace(agent_steps=np.int32(updates * size))
        np.testing.assert_allclose(given.agent.actor_params(learner).epsilon, epsilon)
        after, means = experience.update(given._replace(learner=learner), num_devices=1)
        np.testing.assert_allclose(means["learning_rate"], rate, rtol=1e-5)
        assert after.agent_steps == (updates + 1) * size
