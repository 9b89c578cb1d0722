"""R2D2's loss and priorities against slow ones, and how it acts.

Axis legend: `T` time, `B` streams, `A` actions.
"""

import functools

import jax
import numpy as np
import pytest

from agents import networks, r2d2, sac
from agents.networks import cores, encoders
from agents.networks import sac as sac_networks
from agents.parts import categorical, optimization, returns
from agents.replay import replay
from podracers import errors
from tests import streams
from tests.agents import experience

BURN_IN, LENGTH, NUM = 4, 16, 6
ENVIRONMENT = streams.RandomEpisodes(masked=True)
AGENT = r2d2.R2D2(
    ENVIRONMENT.spec,
    network=functools.partial(
        networks.q_network,
        encoder=encoders.MLP((8,)),
        core=cores.LSTM(8),
        frame_stack=2,
        dueling=True,
        head_hidden_sizes=(8,),
    ),
    gamma=0.9,
    n_step=3,
    sequence_length=LENGTH,
    burn_in=BURN_IN,
    priority_mix=0.9,
    reward_scale=0.5,
    batch_size=NUM,
)


@pytest.fixture(scope="module", name="case")
def _case():
    """Returns parameters, older ones, and a rollout that the first of them acted."""
    _, learner, rollout = experience.acted(AGENT, ENVIRONMENT, LENGTH, NUM)
    assert rollout.timestep.last()[BURN_IN:].any(axis=0).all()
    return learner.params, experience.moved(learner.params, 0.5, seed=4), rollout


def _slow_values(params, rollout):
    """Returns `[T + 1, B, A]`; rewards are not clipped."""
    return np.asarray(experience.outputs(AGENT.net, params, rollout, clip=np.inf))


def _legal(q_values, rollout):
    return np.where(rollout.timestep.observation["action_mask"], q_values, -np.inf)


def _chosen(q_values, action):
    return np.take_along_axis(q_values, action[..., None], axis=-1)[..., 0]


def _slow_errors(rollout, taken, bootstrap, until=LENGTH):
    """Returns errors `[until - BURN_IN, B]` against rescaled n-step returns, and priorities."""
    timestep = rollout.timestep._replace(reward=0.5 * rollout.timestep.reward)
    timestep, bootstrap = jax.tree.map(lambda x: x[BURN_IN : until + 1], (timestep, bootstrap))

    @jax.jit
    def goals():
        values = categorical.signed_parabolic(bootstrap)
        return categorical.signed_hyperbolic(returns.n_step(timestep, values, 0.9, 3))

    error, last = np.asarray(goals()) - taken[BURN_IN:until], timestep.last()[:-1]
    sizes = [np.abs(column[~ended]) for column, ended in zip(error.T, last.T)]
    return error, np.array([0.9 * size.max() + 0.1 * size.mean() for size in sizes])


@pytest.fixture(scope="module", name="loss")
def _loss():
    def loss(params, target, rollout, weight):
        context = optimization.Context(0.0, target)
        rollout = AGENT.stored(rollout)
        rollout = rollout._replace(timestep=AGENT.preprocess.apply((), rollout.timestep))
        learnt = AGENT.loss(params, replay.Sample(rollout, None, weight, None), context)
        return learnt.loss.result(), learnt

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True, allow_int=True))


def test_the_loss_equals_a_slow_one(case, loss):
    """Burn-in, double Q-learning among legal actions, truncations, rescaling, weights."""
    params, target, rollout = case
    weight = np.linspace(0.2, 1.0, NUM).astype(np.float32)
    results = jax.device_get(loss(params, target, rollout, weight))
    (gradient, target_gradient, data_gradient), learnt = results
    online, older = _slow_values(params, rollout), _slow_values(target, rollout)
    best = np.argmax(_legal(online, rollout), axis=-1)
    assert np.any(best != np.argmax(online, axis=-1))
    assert np.any(best != np.argmax(_legal(older, rollout), axis=-1))
    taken = _chosen(online[:-1], rollout.action)
    error, priority = _slow_errors(rollout, taken, _chosen(older, best))
    last = rollout.timestep.last()[BURN_IN:-1]
    expected = np.sum((0.5 * error**2 * weight)[~last]) / np.sum(~last)
    np.testing.assert_allclose(learnt.loss.result(), expected, rtol=1e-4)
    np.testing.assert_allclose(learnt.priority, priority, rtol=1e-4)
    # No gradient passes the burn-in or the target.
    assert all(np.any(leaf != 0.0) for leaf in jax.tree.leaves(gradient))
    assert all(np.all(leaf == 0.0) for leaf in jax.tree.leaves(target_gradient))
    features = data_gradient.timestep.observation["features"]
    assert np.all(features[:BURN_IN] == 0.0) and np.any(features[BURN_IN] != 0.0)
    for leaf in jax.tree.leaves(data_gradient.actor_state.core):
        assert leaf.dtype != np.float32 or np.all(leaf == 0.0)


def test_initial_priorities_equal_slow_ones(case):
    """All but the last time step, whose value acting has not computed yet."""
    params, _, rollout = case
    online = _slow_values(params, rollout)
    taken = _chosen(online[:-1], rollout.action)
    best = np.max(_legal(online, rollout), axis=-1)
    np.testing.assert_allclose(rollout.extras.taken, taken, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        rollout.extras.value, categorical.signed_parabolic(best)[:-1], rtol=1e-4, atol=1e-4
    )
    _, priority = _slow_errors(rollout, taken, best, until=LENGTH - 1)
    priorities = jax.jit(AGENT.initial_priorities)((), rollout)
    np.testing.assert_allclose(priorities, priority[None], rtol=1e-4)
    # Actions are legal, and most of them are the best ones.
    assert _chosen(rollout.timestep.observation["action_mask"][:-1], rollout.action).all()
    is_greedy = np.argmax(_legal(online, rollout)[:-1], axis=-1) == rollout.action
    assert 0.5 < np.mean(is_greedy) < 1.0


def test_streams_explore_by_their_global_number():
    @functools.partial(jax.jit, static_argnums=(1, 2))
    def epsilon(env_id, num_envs, evaluation=False):
        return AGENT.init_actor(env_id, num_envs, evaluation).epsilon

    whole = 0.4 ** (1.0 + np.arange(8))
    np.testing.assert_allclose(epsilon(np.arange(8), 8), whole, rtol=1e-6)
    np.testing.assert_allclose(epsilon(np.arange(4, 8), 8), whole[4:], rtol=1e-6)
    np.testing.assert_allclose(epsilon(np.arange(1), 1), 0.4)
    np.testing.assert_allclose(epsilon(np.arange(3), 8, True), 1e-3)


def test_steps_that_would_never_be_learnt_from_are_refused(case):
    options = {"sequence_length": LENGTH + BURN_IN - 1, "burn_in": BURN_IN}
    network = functools.partial(sac_networks.sac_network, core=cores.LSTM(8))
    recurrent = sac.SAC(ENVIRONMENT.spec, network=network, **options)
    for longer in (r2d2.R2D2(ENVIRONMENT.spec, **options), recurrent):
        with pytest.raises(errors.UserError, match=r"\.sequence_length: expected at least 20"):
            longer.init_memory(case[2])
