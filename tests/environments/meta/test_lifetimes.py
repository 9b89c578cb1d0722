"""Lifetimes: tasks that are drawn, episodes within them, and lengths that differ."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from environments import catch
from environments.meta import delayed_chains, lifetimes, tabular_grids
from podracers import environment, errors, tasks, types

MIXTURE = lifetimes.Mixture(
    (tabular_grids.TabularGrids(("small", "sparse")), delayed_chains.DelayedChains(("short",)))
)
NUM_STREAMS, NUM_ENVS, PERIOD = 40, 3, 10


def _begin(candidate, key):
    """Starts `NUM_STREAMS` lifetimes."""
    return jax.vmap(candidate.reset)(jax.random.split(key, NUM_STREAMS))


def _advance(candidate, state, timestep, action, key):
    """Steps all streams; where a lifetime had ended, another one begins."""
    stepped = jax.vmap(candidate.step)(state, action)
    last = timestep.last()

    def select(new, old):
        return jnp.where(last.reshape(last.shape + (1,) * (new.ndim - 1)), new, old)

    return jax.tree.map(select, _begin(candidate, key), stepped)


@pytest.fixture(scope="module", name="stream")
def _stream():
    """Time steps `[81, 40]` of random lifetimes, and the states after them."""
    candidate = lifetimes.Lifetimes(MIXTURE, NUM_ENVS, PERIOD, max_periods=4)

    def step(carry, key):
        state, timestep = carry
        mask = timestep.observation[environment.ACTION_MASK]
        act_key, reset_key = jax.random.split(key)
        action = jax.random.categorical(act_key, jnp.where(mask, 0.0, -jnp.inf))
        carry = _advance(candidate, state, timestep, action, reset_key)
        return carry, carry[1]

    @jax.jit
    def run(key):
        start = _begin(candidate, key)
        (state, _), later = jax.lax.scan(step, start, jax.random.split(key, 80))
        return state, jax.tree.map(lambda x, y: jnp.concatenate([x[None], y]), start[1], later)

    return jax.device_get(run(jax.random.key(0))[1])


def test_lifetimes_begin_with_periods_and_end_apart(stream):
    first = np.argwhere(stream.step_type == types.FIRST)
    assert set(first[:, 0] % PERIOD) == {0}
    counts = np.bincount(first[:, 0], minlength=81)[10:80:10]
    assert (counts > 0).all() and (counts < NUM_STREAMS).all()
    last = stream.step_type == types.LAST
    assert (stream.discount[last] == 1.0).all()


def test_episodes_within_lifetimes_keep_s1(stream):
    inner = stream.observation[tasks.STEP_TYPE]  # [81, 40, 3]
    begun = stream.step_type == types.FIRST
    assert (inner[begun] == types.FIRST).all()
    ended = inner[:-1] == types.LAST
    same = ~begun[1:][..., None] & np.ones_like(ended)
    np.testing.assert_array_equal((inner[1:] == types.FIRST)[same], ended[same])
    assert (stream.observation[tasks.REWARD][inner == types.FIRST] == 0.0).all()
    np.testing.assert_allclose(
        np.where(begun, 0.0, stream.observation[tasks.REWARD].mean(-1)), stream.reward, atol=1e-6
    )


def test_a_lifetime_has_one_task(stream):
    task, begun = stream.observation[tasks.TASK], stream.step_type == types.FIRST
    np.testing.assert_array_equal(task[1:][~begun[1:]], task[:-1][~begun[1:]])
    share = np.bincount(task[begun], minlength=3) / begun.sum()
    np.testing.assert_allclose(share, 1 / 3, atol=0.15)
    assert MIXTURE.task_names == ("small", "sparse", "short_chain")


def test_a_mixture_shows_one_of_its_families():
    spec = MIXTURE.spec.observation
    assert spec[tasks.ROWS].maximum == 676
    for seed in range(12):
        key = jax.random.key(seed)
        params = MIXTURE.sample(key)
        family = MIXTURE.families[int(params.family)]
        part = params.parts[int(params.family)]
        state, timestep = MIXTURE.reset(params, key)
        inner, expected = family.reset(part, key)
        for action in (1, 0, 1):
            rows = expected.observation[tasks.ROWS]
            assert timestep.observation[tasks.ROWS].tolist() == rows.tolist()
            assert timestep.observation[environment.ACTION_MASK].sum() in (2, 9, 18)
            assert timestep.reward == expected.reward
            state, timestep = MIXTURE.step(params, state, jnp.int32(action))
            inner, expected = family.step(part, inner, jnp.int32(action))


def test_rows_that_a_family_has_not_got_are_beyond_the_table():
    both = lifetimes.Mixture(
        (tabular_grids.TabularGrids(("small",)), delayed_chains.DelayedChains(("distractor",)))
    )
    for seed in range(8):
        params = both.sample(jax.random.key(seed))
        _, timestep = both.reset(params, jax.random.key(seed))
        rows = np.asarray(timestep.observation[tasks.ROWS])
        assert (rows < 100).sum() == (1 if params.family == 0 else 22)
        assert (rows[1:] == 100).all() or params.family == 1


def test_what_is_no_family_is_refused():
    with pytest.raises(errors.UserError, match="expected a family of tasks"):
        lifetimes.Lifetimes(catch.Catch)
    with pytest.raises(errors.UserError, match="max_periods"):
        lifetimes.Lifetimes(MIXTURE, min_periods=3, max_periods=2)
