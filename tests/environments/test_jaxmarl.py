"""JaxMARL under the contract: limits truncate, the dead share rewards, critics read the state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from environments import jaxmarl
from podracers import contract, environment, types

package = pytest.importorskip("jaxmarl.registration")

QUICK = "MPE_simple_speaker_listener_v4"  # its agents have different observations and actions
NAMES = {
    name
    for name in package.registered_envs
    if name.startswith(("MPE", "overcooked", "SMAX", "Heuristic")) and name != "MPE_simple_v3"
}
SMAX = functools.partial(jaxmarl.JaxMARL, "HeuristicEnemySMAX")


@pytest.mark.parametrize(
    "name", [QUICK, *(pytest.param(x, marks=pytest.mark.slow) for x in sorted(NAMES - {QUICK}))]
)
def test_keeps_the_contract(name):
    options = {} if name.startswith("MPE_simple_facmac_") else {"max_steps": 15}
    if name == "MPE_simple_world_comm_v3":  # by default its leader's actions are longer vectors
        options["action_type"] = "Discrete"
    env = jaxmarl.JaxMARL(name, options, state=True, agent_id=True)
    contract.check_environment(env, num_steps=40)


def test_the_observations_of_different_agents_have_one_shape():
    """The speaker observes 3 numbers and has 3 actions; the listener 11 and 5."""
    env = jaxmarl.JaxMARL(QUICK, state=True, agent_id=True)
    _, timestep = env.reset(jax.random.key(0))
    agent, state, mask = (timestep.observation[x] for x in ("agent", "state", "action_mask"))
    assert (agent.shape, state.shape) == ((2, 11 + 2), (2, 3 + 11 + 2))
    np.testing.assert_array_equal(agent[0, 3:11], 0.0)
    np.testing.assert_array_equal(agent[:, 11:], np.eye(2))
    np.testing.assert_array_equal(state[0, :14], [*agent[0, :3], *agent[1, :11]])
    np.testing.assert_array_equal(state[0, :14], state[1, :14])
    np.testing.assert_array_equal(mask, [[True] * 3 + [False] * 2, [True] * 5])


def _play(env, num_steps):
    """Returns time steps of an episode in which each agent takes its last legal action."""

    @jax.jit
    def play(key):
        def step(carry, _):
            state, timestep = carry
            mask = timestep.observation[environment.ACTION_MASK]
            last = mask.shape[-1] - 1 - jnp.argmax(mask[..., ::-1], axis=-1)
            following = env.step(state, last)
            return following, following[1]

        return jax.lax.scan(step, env.reset(key), None, num_steps)[1]

    return jax.device_get(play(jax.random.key(0)))


def test_the_last_step_of_the_limit_truncates():
    """One step later than `max_steps`, as in JaxMARL."""
    timestep = _play(jaxmarl.JaxMARL(QUICK, {"max_steps": 5}), 6)
    assert timestep.step_type[:, 0].tolist() == [types.MID] * 5 + [types.LAST]
    np.testing.assert_array_equal(timestep.discount, 1.0)


def test_a_dead_unit_has_its_teams_rewards_until_the_battle_ends():
    """Allies stand and shoot at enemies in range, who kill them one after another."""
    timestep = _play(SMAX({"scenario": "2s3z"}), 100)
    end = int(np.argmax(timestep.last()[:, 0]))
    num_legal = timestep.observation[environment.ACTION_MASK].sum(axis=-1)[:end]
    first_death = int(np.argmax((num_legal == 1).any(axis=1)))
    reward = timestep.reward[first_death + 1 : end + 1]
    assert np.sum(reward[:, 0]) > 0.0
    np.testing.assert_array_equal(reward, np.broadcast_to(reward[:, :1], reward.shape))
    np.testing.assert_array_equal(timestep.discount[:end], 1.0)
    assert timestep.terminated()[end].all() and not timestep.metrics["win"][end].any()


def test_overcooked_reports_the_return_without_shaping():
    env = jaxmarl.JaxMARL("overcooked", {"layout": "cramped_room"}, shaping=1.0)
    assert env.evaluation_environment.shaping == 0.0

    def play(key):
        def step(state, key):
            return env.step(state, jax.random.randint(key, (2,), 0, 6))

        timestep = jax.lax.scan(step, env.reset(key)[0], jax.random.split(key, 399))[1]
        return jnp.sum(timestep.reward, axis=0), timestep.metrics["task_return"][-1]

    # Random cooks put onions into pots, for 3 each, and seldom deliver.
    shaped, task = jax.jit(jax.vmap(play))(jax.random.split(jax.random.key(0), 16))
    assert np.all(task == 0.0) and np.all(shaped % 3.0 == 0.0) and np.sum(shaped) > 0.0
