"""PPO's update against a slow one, and its minibatches of networks with stacks of frames.

Axis legend: `T` time, `B` streams.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents import returns
from tests.agents import experience

LENGTH, BATCH = experience.LENGTH, experience.BATCH


def _slow_update(given):
    """Returns the parameters after one step of clipped Adam, and the loss before it."""
    agent, learner, rollout = given
    outputs = functools.partial(experience.outputs, agent._policy.network, rollout=rollout)
    values = np.asarray(jax.jit(outputs)(learner.params).value)
    advantage = np.asarray(returns.gae(experience.learnt_timestep(rollout), values, 0.9, 0.8))
    target = advantage + values[:-1]
    kept = ~rollout.timestep.last()[:-1]
    advantage = (advantage - advantage[kept].mean()) / advantage[kept].std()
    chosen = np.eye(3)[rollout.action]

    def loss(params):
        logits, values = outputs(params)
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


@pytest.mark.parametrize(
    ("network", "num_devices"), [("frames", 4), pytest.param("lstm", 1, marks=pytest.mark.slow)]
)
def test_an_update_equals_a_slow_one(network, num_devices):
    """GAE, truncations, weights, standardised advantages, clipping and Adam, all at once."""
    given = experience.collect("ppo", network)
    experience.assert_update(given, _slow_update(given), num_devices)


def test_clip_and_entropy_cost_fall_with_the_agent_steps():
    """Half of the schedule is over after five rollouts: as if the options had these values."""
    given = experience.collect("ppo", "frames")
    moved = experience.perturbed(given.learner, 0.5, seed=7)
    learner = moved._replace(update=jnp.int32(5))

    def means(**options):
        agent = dataclasses.replace(given.agent, anneal_steps=10 * LENGTH * BATCH, **options)
        return experience.update(given._replace(agent=agent, learner=learner))[1]

    actual = means(
        entropy_cost=0.3, entropy_cost_final=0.1, clip_epsilon=0.4, clip_epsilon_final=0.05
    )
    expected = means(entropy_cost=0.2, clip_epsilon=0.225)
    assert expected["policy/clip_fraction"] > 0.0
    for name in ("loss/total", "policy/clip_fraction"):
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-5)
