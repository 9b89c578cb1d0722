"""Randomised dynamics: the draw of the factors, and the dynamics with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from environments import brax, cartpole, pendulum, playground, randomized, wrappers
from podracers import unroll
from tests import streams

RANGES = {"mass": (0.5, 2.0), "gravity": (0.8, 1.2)}
KEY = jax.random.key(0)
SHORT = pendulum.Pendulum(max_episode_steps=3)


def play(candidate, key=KEY, num_streams=3, num_steps=9):
    """Returns the states and time steps `[T, B, ...]` of streams with one action each."""
    batched = unroll.BatchedEnvironment(candidate)
    action = jnp.linspace(-1.0, 1.0, num_streams)
    spec = candidate.spec.action
    action = jnp.broadcast_to(action.reshape(-1, *[1] * len(spec.shape)), (3, *spec.shape))
    action = (action > 0 if spec.dtype.kind == "i" else action).astype(spec.dtype)

    def step(carry, _):
        following = batched.step(carry[0], action)
        return following, following

    @jax.jit
    def run(key):
        first = batched.init(jax.random.split(key, num_streams))
        return jax.lax.scan(step, first, None, num_steps)[1]

    return run(key)


def test_factors_are_constant_in_an_episode_and_differ_between_episodes_and_streams():
    candidate = randomized.Randomized(SHORT, RANGES)
    state, timestep = play(candidate)
    factors = {name: np.asarray(x) for name, x in state.environment.factors.items()}
    assert factors.keys() == RANGES.keys()
    episodes = np.asarray(state.episode)  # [T, B]
    assert episodes.max() == 2
    for name, (low, high) in RANGES.items():
        rows = [np.unique(factors[name][episodes == e]) for e in range(3)]
        assert [row.size for row in rows] == [3, 3, 3]  # one of each stream
        assert np.unique(np.concatenate(rows)).size == 9
        assert np.all((low <= factors[name]) & (factors[name] <= high))
    again, _ = play(candidate)
    streams.assert_same(again, state)
    np.testing.assert_array_equal(timestep.observation[..., 2], state.environment.inner.speed)


def test_factors_are_uniform_and_do_not_depend_on_other_parameters():
    def draw(ranges):
        candidate = randomized.Randomized(SHORT, ranges)
        return streams.evaluate(jax.vmap(candidate.reset), jax.random.split(KEY, 2000))

    state, timestep = draw(RANGES)
    numbers = np.stack([state.factors["mass"], state.factors["gravity"], *timestep.observation.T])
    np.testing.assert_allclose(numbers[:2].mean(axis=1), [1.25, 1.0], atol=0.04)
    np.testing.assert_allclose(numbers[:2].std(axis=1), [0.433, 0.1155], rtol=0.05)
    correlations = np.corrcoef(numbers)[:2]
    assert np.all(np.abs(correlations - np.eye(*correlations.shape)) < 0.1)
    alone, _ = draw({"gravity": RANGES["gravity"]})
    np.testing.assert_array_equal(alone.factors["gravity"], state.factors["gravity"])


@pytest.mark.parametrize(
    ("make", "ranges"),
    [
        (pendulum.Pendulum, {"mass": (1.1, 1.9), "length": (1.1, 1.9), "gravity": (1.1, 1.9)}),
        (
            cartpole.CartPole,
            dict.fromkeys(
                ("gravity", "cart_mass", "pole_mass", "half_length", "force"), (1.1, 1.9)
            ),
        ),
    ],
)
def test_a_step_is_that_of_the_environment_with_the_drawn_parameters(make, ranges):
    for name in ranges:
        candidate = randomized.Randomized(make, {name: ranges[name]})
        state, timestep = candidate.reset(KEY)
        plain_state, plain = make().reset(KEY)
        streams.assert_same((state.inner, timestep), (plain_state, plain))
        scaled = make(**{name: getattr(make(), name) * float(state.factors[name])})
        action = jnp.ones(scaled.spec.action.shape, scaled.spec.action.dtype)
        # The state moves, so that every parameter has an effect.
        state = state._replace(inner=state.inner._replace(angle=jnp.float32(0.1)))
        stepped, timestep = candidate.step(state, action)
        streams.assert_close((stepped.inner, timestep), scaled.step(state.inner, action), rtol=1e-6)
        nominal = make().step(state.inner, action)[1]
        assert np.abs(timestep.observation - nominal.observation).max() > 1e-4


@pytest.mark.parametrize(
    ("plain", "names", "package"),
    [
        (cartpole.CartPole(), ("pole_mass", "cart_mass", "half_length"), "jax"),
        (SHORT, ("mass", "gravity"), "jax"),
        pytest.param(
            brax.Brax("inverted_pendulum"),
            ("link.inertia.mass", "dof.damping"),
            "brax",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            playground.Playground("CartpoleBalance"),
            ("body_mass", "dof_damping"),
            "mujoco_playground",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_evaluations_play_the_nominal_environment(plain, names, package):
    pytest.importorskip(package)
    ranges = dict.fromkeys(names, (1.1, 1.9))
    wrapped = wrappers.TimeLimit(lambda: randomized.Randomized(plain, ranges), max_episode_steps=7)
    state, expected = play(wrappers.TimeLimit(plain, max_episode_steps=7))
    nominal, actual = play(wrapped.evaluation_environment)
    streams.assert_same(actual, expected)
    streams.assert_same(nominal.environment.inner.inner, state.environment.inner)
    moved, timestep = play(wrapped)
    assert jax.tree.structure(moved) == jax.tree.structure(nominal)  # for `Searchable`
    assert not np.array_equal(timestep.observation, expected.observation)
    assert not hasattr(wrappers.TimeLimit(plain), "evaluation_environment")


def test_factors_may_be_observed():
    candidate = randomized.Randomized(SHORT, RANGES, observe=True)
    for environment in (candidate, candidate.evaluation_environment):
        state, timestep = play(environment)
        factors = state.environment.factors
        assert timestep.observation.keys() == candidate.spec.observation.keys()
        np.testing.assert_array_equal(
            timestep.observation["factors"],
            np.stack([factors["mass"], factors["gravity"]], axis=-1),
        )
    np.testing.assert_array_equal(timestep.observation["factors"], 1.0)
    np.testing.assert_array_equal(timestep.observation["observation"], play(SHORT)[1].observation)
