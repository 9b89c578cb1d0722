"""Gymnax under the contract: true last observations, and time limits that truncate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from environments import gymnax
from podracers import errors, types
from podracers.training import check

registration = pytest.importorskip("gymnax.registration")

# One of each kind: binary planes, float vector, continuous action, integer observation, a limit
# that is a float, one that depends on the size.
QUICK = [
    "Breakout-MinAtar",
    "CartPole-v1",
    "Pendulum-v1",
    "FrozenLake-misc",
    "BernoulliBandit-misc",
    "DeepSea-bsuite",
]
SLOW = [
    "Acrobot-v1",
    "Asterix-MinAtar",
    "Catch-bsuite",
    "DiscountingChain-bsuite",
    "FourRooms-misc",
    "Freeway-MinAtar",
    "GaussianBandit-misc",
    "MemoryChain-bsuite",
    "MetaMaze-misc",
    "MountainCar-v0",
    "MountainCarContinuous-v0",
    "PointRobot-misc",
    "Pong-misc",
    "Reacher-misc",
    "Seaquest-MinAtar",
    "SimpleBandit-bsuite",
    "SpaceInvaders-MinAtar",
    "Swimmer-misc",
    "UmbrellaChain-bsuite",
]
EVERY = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


def compiled(function):
    """Returns a jitted function that is compiled fast and runs slowly."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


@pytest.mark.parametrize("name", EVERY)
def test_keeps_the_contract(name):
    check.check_environment(gymnax.Gymnax(name), num_steps=150)


@pytest.fixture(scope="module")
def breakout():
    """Returns episodes under our adaptor, and what gymnax's own `step` says of the same steps."""
    env = gymnax.Gymnax("Breakout-MinAtar", {"max_steps_in_episode": 9})
    inner, params = env._built

    def body(carry, key):
        state, alive = carry
        action_key, step_key = jax.random.split(key)
        action = check.random_action(env.spec.action, None, action_key)
        after, timestep = env.step(state, action)
        theirs = inner.step(step_key, state.inner, action, params)
        return (after, alive & ~timestep.last()), (alive, timestep, theirs)

    def stream(key):
        reset_key, key = jax.random.split(key)
        state, first = env.reset(reset_key)
        _, out = jax.lax.scan(body, (state, jnp.array(True)), jax.random.split(key, 12))
        return first, *out

    keys = jax.random.split(jax.random.key(0), 32)
    return jax.tree.map(np.asarray, compiled(jax.vmap(stream))(keys))


def test_last_observation_is_the_true_one(breakout):
    _, alive, timestep, theirs = breakout
    final = theirs[5]["final_observation"]
    np.testing.assert_array_equal(timestep.observation[alive], final[alive].astype(bool))
    ends = alive & (timestep.step_type == types.LAST)
    # Gymnax's own observation of these steps is already of the next episode.
    assert (theirs[0][ends].astype(bool) != timestep.observation[ends]).any()


def test_termination_and_truncation_are_told_apart(breakout):
    _, alive, timestep, (_, _, reward, terminated, truncated, _) = breakout
    last = timestep.step_type == types.LAST
    np.testing.assert_array_equal(last[alive], (terminated | truncated)[alive])
    np.testing.assert_array_equal(timestep.discount[alive], 1.0 - terminated[alive])
    np.testing.assert_array_equal(timestep.reward[alive], reward[alive])
    # The ball falls past the paddle in some streams, and the clock runs out in others.
    ends = alive & last
    assert set(timestep.discount[ends].tolist()) == {0.0, 1.0}
    assert (np.argmax(ends, axis=1)[(ends & (timestep.discount == 1.0)).any(axis=1)] == 8).all()


def test_minatar_observations_are_small_and_lossless(breakout):
    first, _, timestep, theirs = breakout
    assert timestep.observation.dtype == first.observation.dtype == np.bool_
    assert set(np.unique(theirs[5]["final_observation"])) == {0.0, 1.0}


def test_dynamics_draw_new_noise_at_every_step():
    """FrozenLake slips: the same move from the same place ends up in different ones."""
    env = gymnax.Gymnax("FrozenLake-misc")

    @compiled
    def slide(key):
        state, _ = env.reset(key)
        moves = [env.step(state._replace(steps=jnp.int32(n)), jnp.int32(1))[1] for n in range(12)]
        return jnp.stack([timestep.observation for timestep in moves])

    assert len(np.unique(slide(jax.random.key(0)))) > 1


def test_specs():
    spec = gymnax.Gymnax("Breakout-MinAtar").spec
    assert (spec.observation.shape, spec.observation.dtype) == ((10, 10, 4), np.bool_)
    assert (spec.action.num_values, spec.max_episode_steps) == (3, 1000)
    assert gymnax.Gymnax("DeepSea-bsuite", {"size": 5}).spec.max_episode_steps == 5
    pendulum = gymnax.Gymnax("Pendulum-v1").spec.action
    assert isinstance(pendulum, specs.BoundedArray)
    assert (pendulum.shape, pendulum.minimum.tolist()) == ((1,), [-2.0])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Breakout-MinAtr", {}, "no environment 'Breakout-MinAtr'; did you mean 'Breakout-Min"),
        ("CartPole-v1", {"max_step_in_episode": 3}, "did you mean 'max_steps_in_episode'"),
    ],
)
def test_a_users_mistake_is_named(name, options, message):
    with pytest.raises(errors.UserError, match=message):
        _ = gymnax.Gymnax(name, options).spec


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(errors.UserError, match="gymnax"):
        _ = gymnax.Gymnax("CartPole-v1").spec
