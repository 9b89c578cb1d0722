"""PPO's update against a slow one, and what must not change it.

Axis legend: `T` time, `B` streams.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents import actor_critic, cores, ppo
from environments import probes
from podracers import agent as agent_lib
from podracers import batch, errors, parallel, types, unroll
from tests import contract, streams

P = jax.sharding.PartitionSpec
LENGTH, BATCH = 6, 8
ENVIRONMENT = streams.RandomEpisodes()
OPTIONS = {
    "learning_rate": 0.02,
    "anneal_steps": 10 * LENGTH * BATCH,
    "adam_epsilon": 1e-2,  # large, so that no rounding of a tiny gradient is blown up
    "max_grad_norm": 0.1,  # small enough to bind
    "gamma": 0.9,
    "gae_lambda": 0.8,
    "epochs": 1,
    "num_minibatches": 1,
    "entropy_cost": 0.1,
    "reward_scale": 0.5,
    "reward_clip": 1.0,
}
KINDS = {
    "feed_forward": {"network": contract.tiny_network()},
    "lstm": {"network": contract.tiny_network(cores.LSTM(8))},
    "frames_normalized": {
        "network": contract.tiny_network(cores.GRU(8), frame_stack=3),
        "normalize_observations": True,
    },
}


class Experience(NamedTuple):
    """An agent whose policy is far from uniform, and its second rollout."""

    agent: ppo.PPO
    learner: actor_critic.Learner
    rollout: types.Rollout


@functools.cache
def _experience(kind: str) -> Experience:
    agent = ppo.PPO(ENVIRONMENT.spec, **OPTIONS, **KINDS[kind])
    batched = batch.BatchedEnvironment(ENVIRONMENT)
    layout = parallel.make_mesh(jax.devices()[:1])

    def collect():
        learner = agent.init_learner(jax.random.key(0))
        leaves, tree = jax.tree.flatten(learner.params)
        keys = jax.random.split(jax.random.key(1), len(leaves))
        params = [x + 0.5 * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys)]
        learner = learner._replace(params=jax.tree.unflatten(tree, params))
        env_id = jnp.arange(BATCH, dtype=jnp.int32)
        start = unroll.init(agent, batched, env_id, BATCH, jax.random.key(2))
        key = jax.random.key(3)

        def act(learner, start):
            params = agent.actor_params(learner)
            return unroll.unroll(agent, batched, params, start, key, LENGTH)

        middle, first = act(learner, start)
        # What a normaliser knows before it acts: statistics of other data.
        state, _ = agent.update(types.AgentState(learner, ()), first, key)
        learner = learner._replace(normalizer=state.learner.normalizer)
        return learner, act(learner, middle)[1]

    mapped = jax.shard_map(collect, mesh=layout, in_specs=(), out_specs=P(), check_vma=False)
    learner, rollout = jax.jit(mapped)()
    return Experience(agent, jax.device_get(learner), jax.device_get(rollout))


@functools.cache
def _compiled(kind: str, num_devices: int):
    agent = _experience(kind).agent

    def update(learner, rollout):
        state, means = agent.update(types.AgentState(learner, ()), rollout, jax.random.key(4))
        return state.learner, parallel.global_sum(means)

    columns = P(None, parallel.AXIS)
    layout = types.Rollout(columns, columns, columns, actor_state=P(parallel.AXIS))
    mapped = jax.shard_map(
        update,
        mesh=parallel.make_mesh(jax.devices()[:num_devices]),
        in_specs=(P(), layout),
        out_specs=P(),
        check_vma=False,
    )
    return jax.jit(mapped)


def _update(kind: str, num_devices: int = 1, learner=None, rollout=None):
    experience = _experience(kind)
    learner = experience.learner if learner is None else learner
    rollout = experience.rollout if rollout is None else rollout
    learner, means = _compiled(kind, num_devices)(learner, rollout)
    return learner, {name: float(mean.result()) for name, mean in means.items()}


def _at(timestep, time):
    return jax.tree.map(lambda x: x[time], timestep)


def _outputs(agent, params, rollout):
    """Returns logits and values `[T + 1, B, ...]`, from one step of the network after another."""
    core, logits, values = rollout.actor_state, [], []
    for time in range(LENGTH + 1):
        output, core = agent._network.step(params, core, _at(rollout.timestep, time))
        logits.append(output.policy)
        values.append(output.value)
    return jnp.stack(logits), jnp.stack(values)


def _slow_advantages(rollout, values):
    """Sums discounted errors forward, to the end of the episode or of the rollout."""
    reward = np.clip(0.5 * rollout.timestep.reward, -1.0, 1.0)
    advantage = np.zeros((LENGTH, BATCH))
    for b in range(BATCH):
        for t in range(LENGTH):
            factor = 1.0
            for s in range(t, LENGTH):
                following = 0.9 * rollout.timestep.discount[s + 1, b] * values[s + 1, b]
                advantage[t, b] += factor * (reward[s + 1, b] + following - values[s, b])
                factor *= 0.9 * 0.8
                if rollout.timestep.last()[s + 1, b]:
                    break
    return advantage


def _slow_update(experience):
    """Returns the parameters after one step of clipped Adam, and the loss before it."""
    agent, learner, rollout = experience
    _, values = _outputs(agent, learner.params, rollout)
    values = np.asarray(values, np.float64)
    advantage = _slow_advantages(rollout, values)
    target = advantage + values[:-1]
    kept = ~rollout.timestep.last()[:-1]
    advantage = (advantage - advantage[kept].mean()) / advantage[kept].std()
    chosen = np.eye(3)[rollout.action]

    def loss(params):
        logits, values = _outputs(agent, params, rollout)
        log_p = jax.nn.log_softmax(logits[:-1])
        ratio = jnp.exp(jnp.sum(log_p * chosen, axis=-1) - rollout.extras.log_prob)
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
        per_step = -ratio * advantage + 0.25 * (values[:-1] - target) ** 2 - 0.1 * entropy
        return jnp.sum(jnp.where(kept, per_step, 0.0)) / kept.sum()

    value, gradient = jax.jit(jax.value_and_grad(loss))(learner.params)
    gradient = jax.device_get(gradient)
    norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(gradient)))
    assert norm > 0.2
    gradient = jax.tree.map(lambda leaf: leaf * 0.1 / norm, gradient)
    stepped = jax.tree.map(lambda p, g: p - 0.02 * g / (np.abs(g) + 1e-2), learner.params, gradient)
    return stepped, {
        "loss/total": value,
        "gradient_norm": norm,
        "value/target": target[kept].mean(),
        "value/mean": values[:-1][kept].mean(),
    }


@pytest.fixture(scope="module", params=["feed_forward", "lstm"], name="slow")
def _slow(request):
    return request.param, *_slow_update(_experience(request.param))


def test_the_protocol_and_the_data_are_what_the_tests_need():
    experience = _experience("lstm")
    assert isinstance(experience.agent, agent_lib.Agent)
    timestep = _at(experience.rollout.timestep, slice(1, -1))
    assert timestep.truncated().any() and timestep.terminated().any()
    assert np.ptp(experience.rollout.extras.log_prob) > 0.5


@pytest.mark.parametrize("num_devices", [1, 4])
def test_an_update_equals_a_slow_one(slow, num_devices):
    """GAE, truncations, weights, standardised advantages, clipping and Adam, all at once."""
    kind, params, expected = slow
    learner, means = _update(kind, num_devices)
    streams.assert_close(learner.params, params, rtol=1e-3, atol=2e-5)
    for name, value in expected.items():
        np.testing.assert_allclose(means[name], value, rtol=1e-3, atol=1e-5)
    assert learner.update == 1


@pytest.mark.parametrize("kind", KINDS)
def test_ratios_are_one_in_the_first_epoch(kind):
    """The network that learns sees what the one that acted saw: cores, resets, statistics."""
    _, means = _update(kind)
    assert abs(means["policy/kl"]) < 1e-7
    assert means["policy/clip_fraction"] == 0.0
    experience = _experience(kind)
    if kind == "feed_forward":
        return
    first = _at(experience.rollout.timestep, 0).first()
    assert not first.all()
    zeros = jax.tree.map(np.zeros_like, experience.rollout.actor_state)
    _, means = _update(kind, rollout=experience.rollout._replace(actor_state=zeros))
    assert means["policy/kl"] > 1e-4


@pytest.mark.parametrize("kind", ["feed_forward", "lstm"])
def test_what_happens_at_ignored_transitions_changes_nothing(kind):
    rollout = _experience(kind).rollout
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
    streams.assert_same(_update(kind, rollout=changed), _update(kind))
    # The final observation of a truncated one is what the return bootstraps from.
    truncated = timestep.truncated()
    changed = rollout._replace(
        timestep=timestep._replace(
            observation=np.where(truncated[..., None], 1e3, timestep.observation)
        ),
        extras=extras._replace(value=np.where(truncated[:-1], 1e3, extras.value)),
    )
    _, means = _update(kind, rollout=changed)
    assert abs(means["value/target"] - _update(kind)[1]["value/target"]) > 1e-2


@pytest.mark.parametrize("num_devices", [1, 4])
def test_the_learning_rate_falls_to_zero_in_global_agent_steps(num_devices):
    experience = _experience("feed_forward")
    for update, portion in {0: 1.0, 5: 0.5, 9: 0.1, 10: 0.0, 15: 0.0}.items():
        learner = experience.learner._replace(update=np.int32(update))
        after, means = _update("feed_forward", num_devices, learner=learner)
        np.testing.assert_allclose(means["learning_rate"], 0.02 * portion, atol=1e-8)
        if portion == 0.0:
            streams.assert_same(after.params, learner.params)


def test_observations_are_normalised_by_statistics_of_before_the_rollout():
    experience = _experience("frames_normalized")
    before, (after, _) = experience.learner.normalizer, _update("frames_normalized")
    assert before.count == LENGTH * BATCH
    assert after.normalizer.count == 2 * LENGTH * BATCH
    seen = experience.rollout.timestep.observation[:-1].mean(axis=(0, 1))
    expected = 0.5 * (before.mean + seen)
    np.testing.assert_allclose(after.normalizer.mean, expected, rtol=1e-4, atol=1e-5)


def test_illegal_actions_are_never_taken():
    environment = probes.MaskedAction()
    agent = ppo.PPO(environment.spec, network=contract.tiny_network())
    observation = jax.tree.map(lambda x: jnp.tile(x, (200, 1)), environment.observations())
    count = 600
    timestep = types.TimeStep(
        observation, jnp.zeros(count), jnp.ones(count), jnp.zeros(count, jnp.int8)
    )
    params = agent.actor_params(agent.init_learner(jax.random.key(0)))
    # A policy that is sure of itself, and wants what is illegal.
    params = jax.tree.map(lambda x: x + 3.0 * jax.random.normal(jax.random.key(1), x.shape), params)
    keys = jax.random.split(jax.random.key(2), count)
    for evaluation in (False, True):
        act = jax.jit(functools.partial(agent.act, evaluation=evaluation))
        action, _, extras = act(params, (), timestep, keys)
        legal = np.asarray(observation["action_mask"])[np.arange(count), action]
        assert legal.all()
        assert np.all(extras.log_prob > -50.0)
        assert len(np.unique(action)) > 1


@pytest.mark.parametrize(
    ("option", "value"),
    [("epochs", 0), ("num_minibatches", 1.5), ("gamma", 1.1), ("gae_lambda", -0.1)],
)
def test_impossible_options_are_errors(option, value):
    with pytest.raises(errors.UserError, match=f"PPO.{option}: expected"):
        ppo.PPO(ENVIRONMENT.spec, **{option: value})
