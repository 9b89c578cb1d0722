"""R2D2's loss and priorities against slow ones, and how it acts.

Axis legend: `T` time, `B` streams, `L` transitions of a sequence, `U` of them after the burn-in,
`N` sequences, `A` actions.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents import networks, policy, r2d2, replay, returns
from agents.networks import cores, encoders
from podracers import errors, types, unroll
from tests import streams
from tests.agents import experience

GAMMA, STEPS, BURN_IN, MIX = 0.9, 3, 4, 0.9
LENGTH, NUM = 16, 6
ENVIRONMENT = streams.RandomEpisodes(masked=True)
NETWORK = functools.partial(
    networks.q_network,
    encoder=encoders.MLP((8,)),
    core=cores.LSTM(8),
    frame_stack=2,
    dueling=True,
    head_hidden_sizes=(8,),
)


def _agent(spec=ENVIRONMENT.spec, **options) -> r2d2.R2D2:
    options = {
        "network": NETWORK,
        "gamma": GAMMA,
        "n_step": STEPS,
        "sequence_length": LENGTH,
        "burn_in": BURN_IN,
        "priority_mix": MIX,
        "reward_scale": 0.5,
        "batch_size": NUM,
    } | options
    return r2d2.R2D2(spec, **options)


AGENT = _agent()


class Experience(NamedTuple):
    """Parameters, and two rollouts that the first of them acted; in NumPy."""

    params: Any
    target: Any
    rollout: types.Rollout  # the second one, so that its first state is not that of a reset


@pytest.fixture(scope="module", name="given")
def _given():
    batched = unroll.BatchedEnvironment(ENVIRONMENT)

    def run():
        shapes = jax.eval_shape(AGENT.init_learner, jax.random.key(0)).params
        params = experience.moved(jax.tree.map(lambda x: jnp.zeros(x.shape), shapes), 0.5, seed=1)
        acting = policy.ActorParams(params, ())
        env_id = jnp.arange(NUM, dtype=jnp.int32)
        start = unroll.init(AGENT, batched, env_id, NUM, jax.random.key(2))

        def act(start):
            return unroll.unroll(AGENT, batched, acting, start, jax.random.key(3), LENGTH)

        middle, _ = act(start)
        return Experience(params, experience.moved(params, 0.5, seed=4), act(middle)[1])

    given = jax.device_get(jax.jit(run)())
    last = given.rollout.timestep.last()
    assert given.rollout.timestep.truncated().any() and given.rollout.timestep.terminated().any()
    assert not given.rollout.timestep.first()[0].all() and last[BURN_IN:].any(axis=0).all()
    return given


def _sample(rollout: types.Rollout, weight=None) -> replay.Sample:
    """Returns a rollout as replay returns it."""
    rollout = r2d2._replay_item(rollout)
    rollout = rollout._replace(timestep=AGENT._preprocess.apply((), rollout.timestep))
    weight = jnp.ones(NUM) if weight is None else weight
    return replay.Sample(rollout, None, weight, None)


def _slow_values(params, rollout):
    """Returns `[T + 1, B, A]`; rewards are not clipped."""
    q_values = experience.outputs(AGENT._network, params, rollout, clip=np.inf)
    return np.asarray(q_values, np.float64)


def _h(x):
    return np.sign(x) * (np.sqrt(np.abs(x) + 1.0) - 1.0) + 1e-3 * x


def _inverse(x):
    root = np.sqrt(1.0 + 4e-3 * (np.abs(x) + 1.0 + 1e-3))
    return np.sign(x) * (((root - 1.0) / 2e-3) ** 2 - 1.0)


def _legal(q_values, rollout):
    return np.where(rollout.timestep.observation["action_mask"], q_values, -np.inf)


def _slow_errors(rollout, taken, bootstrap, until=LENGTH):
    """Returns errors `[until - BURN_IN, B]` against rescaled n-step returns of scaled rewards."""
    timestep = rollout.timestep._replace(reward=0.5 * rollout.timestep.reward)
    timestep, values = jax.tree.map(
        lambda x: x[BURN_IN : until + 1], (timestep, _inverse(bootstrap).astype(np.float32))
    )
    goal = np.asarray(returns.n_step(timestep, values, GAMMA, STEPS), np.float64)
    return _h(goal) - taken[BURN_IN:until]


def _slow_priority(errors_, last):
    """Returns priorities `[B]` from the errors of steps that were not ignored."""
    sizes = [np.abs(column[~ended]) for column, ended in zip(errors_.T, last.T)]
    return np.array([MIX * size.max() + (1.0 - MIX) * size.mean() for size in sizes])


def _chosen(q_values, action):
    return np.take_along_axis(q_values, action[..., None], axis=-1)[..., 0]


@pytest.fixture(scope="module", name="loss")
def _loss():
    def loss(params, target, rollout, weight):
        learnt = AGENT._loss(params, _sample(rollout, weight), target)
        return learnt.metrics["loss/total"].result(), learnt

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True, allow_int=True))


def test_the_loss_equals_a_slow_one(given, loss):
    """Burn-in, double Q-learning among legal actions, truncations, rescaling, weights."""
    params, target, rollout = given
    weight = np.linspace(0.2, 1.0, NUM).astype(np.float32)
    _, learnt = loss(params, target, rollout, weight)
    online, older = _slow_values(params, rollout), _slow_values(target, rollout)
    best = np.argmax(_legal(online, rollout), axis=-1)
    assert np.any(best != np.argmax(online, axis=-1))
    assert np.any(best != np.argmax(_legal(older, rollout), axis=-1))
    error = _slow_errors(rollout, _chosen(online[:-1], rollout.action), _chosen(older, best))
    last = rollout.timestep.last()[BURN_IN:-1]
    expected = np.sum((0.5 * error**2 * weight)[~last]) / np.sum(~last)
    np.testing.assert_allclose(learnt.metrics["loss/total"].result(), expected, rtol=1e-4)
    np.testing.assert_allclose(learnt.priority, _slow_priority(error, last), rtol=1e-4)


def test_no_gradient_passes_the_burn_in_or_the_target(given, loss):
    (online, target, rollout), _ = loss(*given, np.ones(NUM, np.float32))
    assert all(np.all(leaf == 0.0) for leaf in jax.tree.leaves(target))
    assert all(np.any(leaf != 0.0) for leaf in jax.tree.leaves(online))
    features = rollout.timestep.observation["features"]
    assert np.all(features[:BURN_IN] == 0.0) and np.any(features[BURN_IN] != 0.0)
    assert all(
        np.all(leaf == 0.0)
        for leaf in jax.tree.leaves(rollout.actor_state.core)
        if leaf.dtype == np.float32
    )


def test_initial_priorities_equal_slow_ones(given):
    """All but the last time step, whose value acting has not computed yet."""
    params, _, rollout = given
    online = _slow_values(params, rollout)
    taken = _chosen(online[:-1], rollout.action)
    best = np.max(_legal(online, rollout), axis=-1)
    np.testing.assert_allclose(rollout.extras.taken, taken, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(rollout.extras.value, _inverse(best)[:-1], rtol=1e-4, atol=1e-4)
    actual = AGENT._initial_priority((), rollout)
    error = _slow_errors(rollout, taken, best, until=LENGTH - 1)
    expected = _slow_priority(error, rollout.timestep.last()[BURN_IN:-2])
    np.testing.assert_allclose(actual, expected[None], rtol=1e-4)


def test_illegal_actions_are_never_taken(given):
    """Neither at random nor as the best."""
    timestep, action = given.rollout.timestep, given.rollout.action
    legal = _chosen(timestep.observation["action_mask"][:-1], action)
    assert legal.all()
    greedy = np.argmax(_legal(_slow_values(given.params, given.rollout), given.rollout)[:-1], -1)
    assert np.any(greedy != action) and np.mean(greedy == action) > 0.5


def test_streams_explore_by_their_global_number():
    part = AGENT.init_actor(jnp.arange(4, 8), 8).epsilon
    whole = AGENT.init_actor(jnp.arange(8), 8).epsilon
    np.testing.assert_array_equal(part, whole[4:])
    np.testing.assert_allclose(whole, 0.4 ** (1.0 + np.arange(8)), rtol=1e-6)
    np.testing.assert_allclose(AGENT.init_actor(jnp.arange(1), 1).epsilon, 0.4)
    np.testing.assert_allclose(AGENT.init_actor(jnp.arange(3), 8, True).epsilon, 1e-3)


def test_steps_that_would_never_be_learnt_from_are_refused(given):
    longer = _agent(sequence_length=LENGTH + BURN_IN - 1)
    with pytest.raises(
        errors.UserError, match=r"expected at least 20 with rollouts of 16.* got 19"
    ):
        longer.init_memory(given.rollout)
