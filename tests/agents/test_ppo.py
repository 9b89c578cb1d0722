"""PPO's update against a slow one.

Axis legend: `T` time, `B` streams.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import streams
from tests.agents import experience

LENGTH, BATCH = experience.LENGTH, experience.BATCH


def _slow_advantages(rollout, values):
    """Sums discounted errors forward, to the end of the episode or of the rollout."""
    reward = np.clip(0.5 * rollout.timestep.reward, -1.0, 1.0)
    advantage = np.zeros((LENGTH, BATCH))
    for b in range(BATCH):
        for t in range(LENGTH):
            factor = 1.0
            for s in range(t, LENGTH):
                following = 0.9 * rollout.timestep.discount[s + 1, b] * values[s + 1, b]
                advantage[t, b] += factor * (reward[s + 1, b] + following - values[s, b])
                factor *= 0.9 * 0.8
                if rollout.timestep.last()[s + 1, b]:
                    break
    return advantage


def _slow_update(given):
    """Returns the parameters after one step of clipped Adam, and the loss before it."""
    agent, learner, rollout = given
    _, values = experience.outputs(agent, learner.params, rollout)
    values = np.asarray(values, np.float64)
    advantage = _slow_advantages(rollout, values)
    target = advantage + values[:-1]
    kept = ~rollout.timestep.last()[:-1]
    advantage = (advantage - advantage[kept].mean()) / advantage[kept].std()
    chosen = np.eye(3)[rollout.action]

    def loss(params):
        logits, values = experience.outputs(agent, params, rollout)
        log_p = jax.nn.log_softmax(logits[:-1])
        ratio = jnp.exp(jnp.sum(log_p * chosen, axis=-1) - rollout.extras.log_prob)
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
        per_step = -ratio * advantage + 0.25 * (values[:-1] - target) ** 2 - 0.1 * entropy
        return jnp.sum(jnp.where(kept, per_step, 0.0)) / kept.sum()

    value, gradient, norm = experience.clipped_gradient(loss, learner.params)
    stepped = jax.tree.map(lambda p, g: p - 0.02 * g / (np.abs(g) + 1e-2), learner.params, gradient)
    return stepped, {
        "loss/total": value,
        "gradient_norm": norm,
        "value/target": target[kept].mean(),
        "value/mean": values[:-1][kept].mean(),
        "policy/clip_fraction": 0.0,
    }


@pytest.fixture(scope="module", params=["feed_forward", "lstm"], name="slow")
def _slow(request):
    given = experience.collect("ppo", request.param)
    return given, *_slow_update(given)


@pytest.mark.parametrize("num_devices", [1, 4])
def test_an_update_equals_a_slow_one(slow, num_devices):
    """GAE, truncations, weights, standardised advantages, clipping and Adam, all at once."""
    given, params, expected = slow
    learner, means = experience.update(given, num_devices)
    streams.assert_close(learner.params, params, rtol=1e-3, atol=2e-5)
    for name, value in expected.items():
        np.testing.assert_allclose(means[name], value, rtol=1e-3, atol=1e-5)
