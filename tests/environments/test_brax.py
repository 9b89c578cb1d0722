"""Brax under the contract, in environments that compile fast."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from environments import brax
from podracers import contract, types
from tests import streams

pytest.importorskip("brax")

LENGTH = 15


def play(env: brax.Brax, pushes: list[float], steps: int = LENGTH) -> types.TimeStep:
    """Returns `[T, B]` time steps of streams with a constant action each."""

    def stream(push):
        state, _ = env.reset(jax.random.key(0))
        action = jnp.broadcast_to(push, env.spec.action.shape)
        return jax.lax.scan(lambda s, _: env.step(s, action), state, None, steps)[1]

    run = jax.jit(jax.vmap(stream, out_axes=1))
    return jax.tree.map(np.asarray, run(jnp.asarray(pushes)))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fast", {}),
        pytest.param("ant", {"backend": "spring"}, marks=pytest.mark.slow),
    ],
)
def test_keeps_the_contract(name, options):
    contract.check_environment(brax.Brax(name, options, episode_length=5), num_steps=12)


@pytest.mark.slow
def test_length_truncates_and_a_fall_terminates():
    pendulum = brax.Brax("inverted_pendulum", {"backend": "spring"}, episode_length=LENGTH)
    assert (pendulum.spec.action.minimum, pendulum.spec.max_episode_steps) == (-1.0, LENGTH)
    timestep = play(pendulum, [0.0, 1.0])
    fallen = np.abs(timestep.observation[..., 1]) > 0.2  # [T, B]
    np.testing.assert_array_equal(fallen.any(axis=0), [False, True])
    np.testing.assert_array_equal(timestep.discount, np.where(fallen, 0.0, 1.0))
    at_end = np.arange(1, LENGTH + 1)[:, None] >= LENGTH
    np.testing.assert_array_equal(timestep.step_type == types.LAST, fallen | at_end)
    np.testing.assert_array_equal(timestep.reward, 1.0)


@pytest.mark.parametrize(
    ("backend", "name", "unread"),
    [("spring", "link.inertia.mass", "body_mass"), ("mjx", "body_mass", "link.inertia.mass")],
)
def test_parameters_are_those_of_the_backend(backend, name, unread):
    pendulum = brax.Brax("inverted_pendulum", {"backend": backend})
    parameters = pendulum.parameters
    assert {name, "geom_friction"} <= parameters.keys() and unread not in parameters
    heavy = pendulum.with_parameters({name: 2.0 * parameters[name]})
    np.testing.assert_array_equal(heavy.parameters[name], 2.0 * parameters[name])
    streams.assert_same(pendulum.parameters, parameters)  # the original is unchanged


class Exploding:
    action_size = 1

    def reset(self, key):
        del key
        from brax.envs import base  # noqa: PLC0415  (slow to import)

        return base.State(None, jnp.ones(3), jnp.zeros(()), jnp.zeros(()))

    def step(self, state, action):
        bad = jnp.where(action[0] == 0.0, 0.0, jnp.nan)
        return state.replace(obs=state.obs.at[1].add(bad), reward=1.0 + bad)


def test_a_simulation_that_diverges_terminates(monkeypatch):
    from brax import envs  # noqa: PLC0415

    monkeypatch.setitem(envs._envs, "exploding", Exploding)
    env = brax.Brax("exploding")
    timestep = play(env, [0.0, 0.5], steps=1)
    assert timestep.step_type.tolist() == [[types.MID, types.LAST]]
    assert timestep.discount.tolist() == [[1.0, 0.0]]
    assert timestep.reward.tolist() == [[1.0, 0.0]]
    assert timestep.observation.tolist() == [[[1.0, 1.0, 1.0], [1.0, 0.0, 1.0]]]
