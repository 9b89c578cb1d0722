"""PPO's update against a slow one, and its minibatches of networks with stacks of frames.

Axis legend: `T` time, `B` streams.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents import minibatches, policy, ppo, returns
from agents.networks import cores
from podracers import parallel
from tests import streams
from tests.agents import experience

LENGTH, BATCH = experience.LENGTH, experience.BATCH
NUM_FRAMES = 3  # of the network "frames"
P = jax.sharding.PartitionSpec


def _slow_update(given):
    """Returns the parameters after one step of clipped Adam, and the loss before it."""
    agent, learner, rollout = given
    outputs = functools.partial(experience.outputs, agent._policy.network, rollout=rollout)
    values = np.asarray(jax.jit(outputs)(learner.params).value)
    advantage = np.asarray(returns.gae(experience.learnt_timestep(rollout), values, 0.9, 0.8))
    target = advantage + values[:-1]
    kept = ~rollout.timestep.last()[:-1]
    advantage = (advantage - advantage[kept].mean()) / advantage[kept].std()
    chosen = np.eye(3)[rollout.action]

    def loss(params):
        logits, values = outputs(params)
        log_p = jax.nn.log_softmax(logits[:-1])
        ratio = jnp.exp(jnp.sum(log_p * chosen, axis=-1) - rollout.extras.log_prob)
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
        per_step = -ratio * advantage + 0.25 * (values[:-1] - target) ** 2 - 0.1 * entropy
        return jnp.sum(jnp.where(kept, per_step, 0.0)) / kept.sum()

    value, gradient, norm = experience.clipped_gradient(loss, learner.params)
    stepped = jax.tree.map(lambda p, g: p - 0.02 * g / (np.abs(g) + 1e-2), learner.params, gradient)
    return stepped, {
        "loss/total": value,
        "gradient_norm": norm,
        "value/target": target[kept].mean(),
        "value/mean": values[:-1][kept].mean(),
        "policy/clip_fraction": 0.0,
    }


@pytest.fixture(
    scope="module",
    params=["feed_forward", pytest.param("lstm", marks=pytest.mark.slow), "frames"],
    name="slow",
)
def _slow(request):
    given = experience.collect("ppo", request.param)
    return given, *_slow_update(given)


@pytest.mark.parametrize("num_devices", [1, 4])
def test_an_update_equals_a_slow_one(slow, num_devices):
    """GAE, truncations, weights, standardised advantages, clipping and Adam, all at once."""
    given, params, expected = slow
    learner, means = experience.update(given, num_devices)
    streams.assert_close(learner.params, params, rtol=1e-3, atol=2e-5)
    for name, value in expected.items():
        np.testing.assert_allclose(means[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("update", [0, 5])
def test_clip_and_entropy_cost_fall_with_the_agent_steps(update):
    """Half of the schedule is over after five rollouts: as if the options had these values."""
    given = experience.collect("ppo", "feed_forward")
    portion = max(1.0 - update / 10.0, 0.0)
    moved = experience.perturbed(given.learner, 0.5, seed=7)
    learner = moved._replace(update=jnp.int32(update))

    def means(**options):
        agent = dataclasses.replace(given.agent, anneal_steps=10 * LENGTH * BATCH, **options)
        return experience.update(given._replace(agent=agent, learner=learner))[1]

    actual = means(
        entropy_cost=0.3, entropy_cost_final=0.1, clip_epsilon=0.4, clip_epsilon_final=0.05
    )
    expected = means(entropy_cost=0.1 + 0.2 * portion, clip_epsilon=0.05 + 0.35 * portion)
    constant = means(entropy_cost=0.3, clip_epsilon=0.4)
    assert expected["policy/clip_fraction"] > 0.0
    for name in ("loss/total", "policy/clip_fraction"):
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-5)
        assert (actual[name] == pytest.approx(constant[name])) == (update == 0)


@functools.cache
def _minibatches(num_devices):
    """Returns the tags `[M, N]` of the transitions of each minibatch, and their stacks."""
    agent, _, rollout = experience.collect("ppo", "frames")
    network = agent._policy.network
    length, batch = LENGTH, BATCH // num_devices

    def run(key, timestep, core, tag):
        zeros = jnp.zeros((length, batch))
        current = jax.tree.map(lambda x: x[:-1], timestep)
        extras = policy.Extras(zeros, zeros, tag)
        whole = ppo._Batch(current, extras, zeros, zeros, zeros)
        items = minibatches.deal(network, whole, core, key, 2)

        def look(item):
            part, before = minibatches.select(network, whole, core, item)
            first = part.timestep.first()
            stacks, _ = cores.stack_frames(
                before.frames, part.timestep.observation, first, NUM_FRAMES
            )
            return part.extras.value.ravel(), stacks.reshape(-1, stacks.shape[-1])

        return jax.lax.map(look, items)

    columns, rows = P(None, parallel.AXIS), P(parallel.AXIS)
    mapped = jax.shard_map(
        run,
        mesh=parallel.make_mesh(jax.devices()[:num_devices]),
        in_specs=(P(), columns, rows, columns),
        out_specs=columns,
        check_vma=False,
    )
    tag = jnp.arange(LENGTH * BATCH).reshape(LENGTH, BATCH)
    core = rollout.actor_state.core
    return jax.device_get(jax.jit(mapped)(jax.random.key(5), rollout.timestep, core, tag))


def test_stacks_of_drawn_transitions_are_those_of_the_whole_unroll():
    """Frames from before the rollout, within an episode, and at the start of one."""
    _, _, rollout = experience.collect("ppo", "frames")
    timestep, frames = rollout.timestep, rollout.actor_state.core.frames
    assert timestep.first()[1:-1].any() and not timestep.first()[0].all() and np.any(frames)
    expected, _ = cores.stack_frames(frames, timestep.observation, timestep.first(), NUM_FRAMES)
    tags, stacks = _minibatches(1)
    np.testing.assert_array_equal(np.sort(tags.ravel()), np.arange(LENGTH * BATCH))
    np.testing.assert_array_equal(stacks, expected[tags // BATCH, tags % BATCH])
    for minibatch in tags:  # transitions of all streams, and not of the same times
        np.testing.assert_array_equal(np.bincount(minibatch % BATCH), LENGTH // 2)
        assert len(set(minibatch // BATCH)) > LENGTH // 2


def test_minibatches_of_stacks_do_not_depend_on_the_devices():
    def in_order(tags, stacks):
        order = np.argsort(tags, axis=1)
        return np.take_along_axis(tags, order, 1), np.take_along_axis(stacks, order[..., None], 1)

    streams.assert_same(in_order(*_minibatches(4)), in_order(*_minibatches(1)))
