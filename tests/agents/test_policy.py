"""How PPO and IMPALA act, and that they learn from the inputs of acting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents.networks import cores
from podracers import agent as agent_lib
from tests import contract, streams
from tests.agents import experience

LENGTH, BATCH = experience.LENGTH, experience.BATCH


@pytest.fixture(params=experience.ALGORITHMS, name="algorithm")
def _algorithm(request):
    return request.param


@pytest.mark.parametrize(
    "network", ["lstm", pytest.param("frames_normalized", marks=pytest.mark.slow)]
)
def test_ratios_are_one_in_the_first_gradient_step(algorithm, network):
    """Learning uses the inputs of acting: cores, resets, statistics."""
    given = experience.collect(algorithm, network)
    updated, means = experience.update(given)
    assert abs(means["policy/kl"]) < 1e-7
    if network == "frames_normalized":  # by the statistics of before the rollout
        before, after = given.learner.normalizer, updated.normalizer
        assert (before.count, after.count) == (LENGTH * BATCH, 2 * LENGTH * BATCH)
        observed = given.rollout.timestep.observation[:-1].mean(axis=(0, 1))
        expected = 0.5 * (before.mean + observed)
        np.testing.assert_allclose(after.mean, expected, rtol=1e-4, atol=1e-5)
    zeros = jax.tree.map(np.zeros_like, given.rollout.actor_state)
    forgot = given._replace(rollout=given.rollout._replace(actor_state=zeros))
    _, means = experience.update(forgot)
    assert means["policy/kl"] > 1e-4


@pytest.mark.parametrize(
    ("network", "option", "is_input"),
    [
        ({}, None, False),
        ({}, True, True),
        ({"frame_stack": 3}, None, False),
        ({"core": cores.GRU(8)}, None, True),
        ({"core": cores.GRU(8)}, False, False),
    ],
)
def test_the_option_and_the_default_of_the_previous_action_and_reward(network, option, is_input):
    agent = experience.ALGORITHMS["ppo"](
        network=contract.tiny_network(**network), previous_action_and_reward=option
    )
    learner = jax.eval_shape(agent.init_learner, jax.random.key(0))
    kernel = learner.params["torsos_0"]["encoder"]["Dense_0"]["kernel"]
    features = 3 * network.get("frame_stack", 1)
    assert kernel.shape[0] == features + (3 + 1 if is_input else 0)
    state = agent.init_actor(jnp.arange(BATCH), BATCH)
    assert jax.tree.map(jnp.shape, state.action) == ((BATCH,) if is_input else ())


def test_ignored_transitions_change_nothing(algorithm):
    given = experience.collect(algorithm, "lstm")
    rollout = given.rollout
    timestep, extras = rollout.timestep, rollout.extras
    last = timestep.last()
    ignored = last[:-1]
    # The final observation of a terminated episode is worth nothing, whatever it shows.
    terminated = timestep.terminated()[..., None]
    following = np.concatenate([np.zeros((1, BATCH), bool), last[:-1]])
    assert ignored.sum() > 4
    changed = rollout._replace(
        timestep=timestep._replace(
            observation=np.where(terminated, 1e3, timestep.observation),
            reward=np.where(following, -7.0, timestep.reward),
        ),
        action=np.where(ignored, 2 - rollout.action, rollout.action),
        extras=extras._replace(
            raw=np.where(ignored, 2 - extras.raw, extras.raw),
            log_prob=np.where(ignored, -9.0, extras.log_prob),
            value=np.where(timestep.terminated()[:-1], 1e3, extras.value),
        ),
    )
    expected = experience.update(given)
    streams.assert_same(experience.update(given._replace(rollout=changed)), expected)
    # The return bootstraps from the final observation of a truncated episode.
    truncated = timestep.truncated()
    changed = rollout._replace(
        timestep=timestep._replace(
            observation=np.where(truncated[..., None], 1e3, timestep.observation)
        ),
        extras=extras._replace(value=np.where(truncated[:-1], 1e3, extras.value)),
    )
    _, means = experience.update(given._replace(rollout=changed))
    assert abs(means["value/target"] - expected[1]["value/target"]) > 1e-2


def test_the_learning_rate_falls_to_zero(algorithm):
    given = experience.collect(algorithm, "lstm")
    for update, portion in {0: 1.0, 5: 0.5, 9: 0.1, 10: 0.0, 15: 0.0}.items():
        learner = given.learner._replace(update=np.int32(update))
        after, means = experience.update(given._replace(learner=learner))
        assert after.update == update + 1
        np.testing.assert_allclose(means["learning_rate"], 0.02 * portion, atol=1e-8)
        if portion == 0.0:
            streams.assert_same(after.params, learner.params)


@pytest.mark.parametrize(("algorithm", "actions"), [("ppo", "continuous"), ("impala", "discrete")])
def test_evaluations_sample_as_training_does_unless_they_are_greedy(algorithm, actions):
    environment = streams.RandomEpisodes(actions=actions)
    agent = experience.ALGORITHMS[algorithm].func(environment.spec, network=contract.tiny_network())
    params = agent.actor_params(jax.jit(agent.init_learner)(jax.random.key(0)))
    _, timestep = environment.reset(jax.random.key(1))
    count = 100
    timestep = jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), timestep)
    keys = jax.random.split(jax.random.key(2), count)

    def actions_of(agent, evaluation):
        start = agent.init_actor(jnp.arange(count), count, evaluation)
        return jax.jit(agent.act, static_argnums=4)(params, start, timestep, keys, evaluation)[0]

    trained = actions_of(agent, False)
    assert len(np.unique(trained)) > 1
    np.testing.assert_array_equal(actions_of(agent, True), trained)
    greedy = agent_lib.greedy(agent)
    np.testing.assert_array_equal(actions_of(greedy, False), trained)
    assert np.all(np.ptp(actions_of(greedy, True), axis=0) == 0)
