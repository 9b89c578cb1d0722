"""Evaluation of rules: returns by segments of lifetimes, and optima."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents.meta import lifetime_evaluation
from environments.meta import delayed_chains, lifetimes, tabular_grids
from podracers import environment, tasks

FAMILY = lifetimes.Mixture(
    (
        tabular_grids.TabularGrids(("small",), num_actions=(9,)),
        delayed_chains.DelayedChains(("short",), short=(4, 4)),
    )
)


class _FirstAction:
    """Takes action 0 in the first half of its lifetime, and action 1 later."""

    def init_actor(self, env_id, num_envs, evaluation=False):
        del num_envs, evaluation
        return jnp.zeros(env_id.shape, jnp.int32)

    def act(self, params, actor_state, timestep, key, evaluation=False):
        del params, key
        assert evaluation
        mask = timestep.observation[environment.ACTION_MASK]
        late = actor_state[:, None] >= 100
        return jnp.where(late & mask[..., 1], 1, 0).astype(jnp.int32), actor_state + 1, ()


@pytest.fixture(scope="module", name="lives")
def _lives():
    candidate = lifetimes.Lifetimes(FAMILY, 3, period=40, min_periods=5, max_periods=5)
    key = jax.random.key(0)
    return lifetime_evaluation.live(_FirstAction(), candidate, (), key, 12, num_segments=4)


def test_returns_are_means_of_the_episodes_of_a_segment(lives):
    assert lives.returns.shape == (12, 4)
    chain = lives.task == 1
    assert 0 < chain.sum() < 12
    right = np.asarray(lives.params.parts[1].right)[chain]
    expected = np.where(right == 0, 1.0, -1.0)
    np.testing.assert_array_equal(lives.returns[chain][:, 0], expected)
    np.testing.assert_array_equal(lives.returns[chain][:, -1], -expected)


def test_the_optimum_is_that_of_each_task(lives):
    assert all(isinstance(x, tasks.TaskFamily) for x in (FAMILY, *FAMILY.members))
    optimum = lives.optimum(FAMILY)
    assert (optimum[lives.task == 1] == 1.0).all()
    grids = optimum[lives.task == 0]
    assert (grids > 2.0).all() and len(set(grids)) > 1
    assert (lives.returns[lives.task == 0] < grids[:, None]).all()
