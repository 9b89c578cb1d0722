"""Tabular A2C: its update by hand, and its returns in lifetimes."""

import jax
import jax.numpy as jnp
import numpy as np

from agents.meta import lifetime_evaluation
from agents.meta.lpg import tabular, tabular_a2c
from environments.meta import delayed_chains, lifetimes
from podracers import environment, tasks, types


def _chains(num_envs=4):
    family = delayed_chains.DelayedChains(("short",), short=(4, 4))
    return lifetimes.Lifetimes(family, num_envs, period=100, min_periods=4, max_periods=4)


def test_an_update_is_a_step_along_the_policy_gradient():
    # Two states and two actions: in state 0 both are taken, one pays 1, the other nothing.
    timestep = types.TimeStep(
        {
            tasks.ROWS: jnp.array([[[0], [0]], [[1], [1]]]),
            environment.ACTION_MASK: jnp.ones((2, 2, 2), bool),
        },
        reward=jnp.array([[0.0, 0.0], [1.0, 0.0]]),
        discount=jnp.array([[1.0, 1.0], [0.0, 0.0]]),
        step_type=jnp.array([[types.MID] * 2, [types.LAST] * 2], jnp.int8),
    )
    chunk = tabular.Chunk(timestep, jnp.array([[0, 1]]))
    agent = tabular_a2c.TabularA2C(
        _chains().spec, learning_rates=(8.0,), entropy_costs=(0.0,), critic_step_size=0.5
    )
    before = tabular_a2c.Agent(jnp.zeros((2, 2)), jnp.array([0.5, 7.0]))
    learn = jax.jit(agent._learn)
    after = learn(before, chunk, jnp.int32(0))
    # Advantages are 0.5 and -0.5, and a policy's score is 0.5 of its action, so each of the two
    # transitions moves the logits by 8 / 2 * 0.5 * 0.5.
    np.testing.assert_allclose(after.policy, [[2.0, -2.0], [0.0, 0.0]], atol=1e-6)
    np.testing.assert_allclose(after.values, [0.5, 7.0], atol=1e-6)
    rewarded = chunk._replace(timestep=timestep._replace(reward=jnp.array([[0, 0], [1.0, 1.0]])))
    np.testing.assert_allclose(learn(before, rewarded, jnp.int32(0)).values, [0.75, 7.0], atol=1e-6)


def test_it_learns_chains_by_the_drawn_arm():
    candidate = _chains()
    agent = tabular_a2c.TabularA2C(
        candidate.spec, learning_rates=(1e-6, 40.0), entropy_costs=(0.0,)
    )
    key, last = jax.random.key(0), []
    for logits in ([[0.0, -jnp.inf]], [[-jnp.inf, 0.0]]):
        lives = lifetime_evaluation.live(agent, candidate, jnp.array(logits), key, 8, 4)
        last.append(lives.returns[:, -1].mean())
    assert abs(last[0]) < 0.5 and last[1] > 0.95
