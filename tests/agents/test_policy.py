"""How PPO and IMPALA act, and that their learning sees the data of acting."""

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
    "network",
    ["feed_forward", "lstm", pytest.param("frames_normalized", marks=pytest.mark.slow)],
)
def test_ratios_are_one_in_the_first_gradient_step(algorithm, network):
    """Learning uses the inputs of acting: cores, resets, statistics."""
    given = experience.collect(algorithm, network)
    _, means = experience.update(given)
    assert abs(means["policy/kl"]) < 1e-7
    if network == "feed_forward":
        return
    assert not given.rollout.timestep.first()[0].all()
    zeros = jax.tree.map(np.zeros_like, given.rollout.actor_state)
    forgot = given._replace(rollout=given.rollout._replace(actor_state=zeros))
    _, means = experience.update(forgot)
    assert means["policy/kl"] > 1e-4


def _kl_after(given, timestep=None, **actor_state):
    """Returns the divergence of acting from learning with other inputs."""
    rollout = given.rollout
    rollout = rollout._replace(actor_state=rollout.actor_state._replace(**actor_state))
    rollout = rollout._replace(timestep=timestep or rollout.timestep)
    return experience.update(given._replace(rollout=rollout))[1]["policy/kl"]


def test_a_recurrent_network_sees_the_previous_action_and_reward(algorithm):
    """Over the boundary of rollouts, too, and rewards as they are learnt from."""
    given = experience.collect(algorithm, "lstm")
    timestep, action = given.rollout.timestep, given.rollout.actor_state.action
    assert action.dtype == np.int32 and len(np.unique(action)) > 1
    assert _kl_after(given, action=(action + 1) % 3) > 1e-4
    assert _kl_after(given, timestep._replace(reward=-timestep.reward)) > 1e-4
    clipped = np.clip(timestep.reward, -2.0, 2.0)  # at 1 after the scale of 0.5
    assert np.any(clipped != timestep.reward)
    assert abs(_kl_after(given, timestep._replace(reward=clipped))) < 1e-7


@pytest.mark.parametrize(
    ("network", "option", "sees"),
    [
        ({}, None, False),
        ({}, True, True),
        ({"frame_stack": 3}, None, False),
        ({"core": cores.GRU(8)}, None, True),
        ({"core": cores.GRU(8)}, False, False),
    ],
)
def test_an_option_decides_who_sees_the_previous_action_and_reward(
    algorithm, network, option, sees
):
    agent = experience.ALGORITHMS[algorithm](
        network=contract.tiny_network(**network), previous_action_and_reward=option
    )
    learner = jax.eval_shape(agent.init_learner, jax.random.key(0))
    kernel = learner.params["torsos_0"]["encoder"]["Dense_0"]["kernel"]
    features = 3 * network.get("frame_stack", 1)
    assert kernel.shape[0] == features + (3 + 1 if sees else 0)
    state = agent.init_actor(jnp.arange(BATCH), BATCH)
    assert jax.tree.map(jnp.shape, state.action) == ((BATCH,) if sees else ())


@pytest.mark.parametrize("network", ["feed_forward", "lstm"])
def test_what_happens_at_ignored_transitions_changes_nothing(algorithm, network):
    given = experience.collect(algorithm, network)
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


def test_the_learning_rate_falls_to_zero_in_global_agent_steps(algorithm):
    given = experience.collect(algorithm, "feed_forward")
    for update, portion in {0: 1.0, 5: 0.5, 9: 0.1, 10: 0.0, 15: 0.0}.items():
        learner = given.learner._replace(update=np.int32(update))
        after, means = experience.update(given._replace(learner=learner), num_devices=4)
        assert after.update == update + 1
        np.testing.assert_allclose(means["learning_rate"], 0.02 * portion, atol=1e-8)
        if portion == 0.0:
            streams.assert_same(after.params, learner.params)


@pytest.mark.parametrize("algorithm", ["ppo", pytest.param("impala", marks=pytest.mark.slow)])
def test_observations_are_normalised_by_statistics_of_before_the_rollout(algorithm):
    given = experience.collect(algorithm, "frames_normalized")
    before, (after, _) = given.learner.normalizer, experience.update(given)
    assert before.count == LENGTH * BATCH
    assert after.normalizer.count == 2 * LENGTH * BATCH
    seen = given.rollout.timestep.observation[:-1].mean(axis=(0, 1))
    expected = 0.5 * (before.mean + seen)
    np.testing.assert_allclose(after.normalizer.mean, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("actions", ["discrete", "continuous"])
def test_evaluations_sample_as_training_does_unless_they_are_greedy(algorithm, actions):
    environment = streams.RandomEpisodes(actions=actions)
    agent = experience.ALGORITHMS[algorithm].func(environment.spec, network=contract.tiny_network())
    params = agent.actor_params(agent.init_learner(jax.random.key(0)))
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
