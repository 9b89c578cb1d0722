"""Lifetimes: random tasks, episodes within them, and lengths that differ."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from environments.meta import delayed_chains, lifetimes, tabular_grids
from podracers import environment, host_contract, tasks, types
from podracers.sebulba import jax_host

MIXTURE = lifetimes.Mixture(
    (tabular_grids.TabularGrids(("small", "sparse")), delayed_chains.DelayedChains(("short",)))
)
NUM_STREAMS, NUM_ENVS, PERIOD = 40, 3, 10


@pytest.fixture(scope="module", name="stream")
def _stream():
    """Time steps `[81, 40]` of random lifetimes."""
    candidate = lifetimes.Lifetimes(MIXTURE, NUM_ENVS, PERIOD, max_periods=4)
    factory = jax_host.JaxHostEnvironment(candidate)
    host = factory.make(jax.random.key(0), np.arange(NUM_STREAMS, dtype=np.int32), 1)
    return host_contract.record(host, factory.spec, 80).timestep


def test_copies_have_the_same_tasks():
    """A class is called once: later gin may have other bindings."""
    fixed = lifetimes.FixedTask(tabular_grids.TabularGrids)
    assert dataclasses.replace(fixed, seed=1).family is fixed.family
    many = lifetimes.Lifetimes(delayed_chains.DelayedChains)
    assert dataclasses.replace(many, period=8).family is many.family
    mixture = lifetimes.Mixture((delayed_chains.DelayedChains,))
    assert dataclasses.replace(mixture).members == mixture.members


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
    assert np.ptp(stream.observation[tasks.ROWS][begun], axis=1).any()  # episodes differ
    ended = inner[:-1] == types.LAST
    same = ~begun[1:][..., None] & np.ones_like(ended)
    np.testing.assert_array_equal((inner[1:] == types.FIRST)[same], ended[same])
    reward = stream.observation[tasks.REWARD]
    assert (reward[inner == types.FIRST] == 0.0).all()
    np.testing.assert_allclose(np.where(begun, 0.0, reward.mean(-1)), stream.reward, atol=1e-6)


def test_a_lifetime_has_one_task(stream):
    task, begun = stream.observation[tasks.TASK], stream.step_type == types.FIRST
    np.testing.assert_array_equal(task[1:][~begun[1:]], task[:-1][~begun[1:]])
    share = np.bincount(task[begun], minlength=3) / begun.sum()
    np.testing.assert_allclose(share, 1 / 3, atol=0.15)
    assert MIXTURE.task_names == ("small", "sparse", "short_chain")


@pytest.mark.parametrize(
    "variants", [("short",), pytest.param(("short", "distractor"), marks=pytest.mark.slow)]
)
def test_a_mixture_shows_one_of_its_families_and_pads_its_rows(variants):
    chains = delayed_chains.DelayedChains(variants)
    mixture = lifetimes.Mixture((tabular_grids.TabularGrids(("small",)), chains))
    num_rows = mixture.spec.observation[tasks.ROWS].shape[0]
    sample, reset, step = map(jax.jit, (mixture.sample, mixture.reset, mixture.step))
    inner_of = {x: (jax.jit(x.reset), jax.jit(x.step)) for x in mixture.members}
    names = set()
    for seed in range(12):
        key = jax.random.key(seed)
        params = sample(key)
        family, part = (x[int(params.family)] for x in (mixture.members, params.parts))
        name = mixture.task_names[int(mixture.task(params))]
        assert name == family.task_names[int(family.task(part))]
        state, timestep = reset(params, key)
        inner_reset, inner_step = inner_of[family]
        inner, expected = inner_reset(part, key)
        for action in (1, 0, 1):
            rows = expected.observation[tasks.ROWS].tolist()
            rows += [100] * (num_rows - len(rows))  # 100 is beyond the table, as 61 in chains
            rows = [100 if row == 61 and family is chains else row for row in rows]
            assert timestep.observation[tasks.ROWS].tolist() == rows
            mask = expected.observation[environment.ACTION_MASK]
            assert timestep.observation[environment.ACTION_MASK].sum() == mask.sum()
            assert timestep.reward == expected.reward
            state, timestep = step(params, state, jnp.int32(action))
            inner, expected = inner_step(part, inner, jnp.int32(action))
        names.add(name)
    assert names == set(mixture.task_names)
