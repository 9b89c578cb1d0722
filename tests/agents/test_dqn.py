"""DQN's loss against a slow one, and the update that agents with replay have in common.

Axis legend: `T` time, `N` drawn sequences, `A` actions, `Z` atoms.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax

from agents import dqn, networks
from agents.networks import encoders, heads
from agents.parts import optimization
from agents.replay import replay
from podracers import errors, types
from tests import streams
from tests.agents import experience

N_STEP, FRAMES, BATCH, GAMMA = 3, 2, 64, 0.9
ENVIRONMENT = streams.RandomEpisodes(masked=True)
ATOMS = np.linspace(-4.0, 2.0, 7)
CATEGORICAL = heads.CategoricalReturn(-4.0, 2.0, 7)


def _agent(**options):
    network = functools.partial(
        networks.q_network, encoder=encoders.MLP((8,)), frame_stack=FRAMES, dueling=True
    )
    return dqn.DQN(ENVIRONMENT.spec, network=network, gamma=GAMMA, n_step=N_STEP, **options)


def _sample():
    """Returns sequences in which episodes end anywhere, in either way."""
    rng = np.random.default_rng(0)
    shape = (FRAMES - 1 + N_STEP + 1, BATCH)
    mask = rng.random((*shape, 3)) < 0.7
    observation = {
        "features": rng.normal(size=(*shape, 3)).astype(np.float32),
        "action_mask": mask | ~mask.any(-1, keepdims=True),
    }
    timestep = experience.random_episodes(0, shape)._replace(observation=observation)
    action = rng.integers(0, 3, (shape[0] - 1, BATCH)).astype(np.int32)
    return replay.Sample(
        rollout=jax.device_put(types.Rollout(timestep, action, (), ())),
        item=None,
        weight=jnp.asarray(rng.random(BATCH), jnp.float32),
        key=jax.random.split(jax.random.key(0), BATCH),
    )


def _params(agent, seed):
    """Returns parameters whose values differ from action to action."""
    return experience.moved(experience.zeros(agent).params, 0.5, seed)


def _softmax(logits):
    return np.exp(logits) / np.sum(np.exp(logits), axis=-1, keepdims=True)


def _slow_losses(agent, params, target, sample):
    """Returns the losses `[N]` and the mean targets `[N]`; both without meaning after LAST."""
    timestep, action = jax.device_get((sample.rollout.timestep, sample.rollout.action))
    core = agent.net.initial_core(BATCH)

    unrolled, project = jax.jit(agent.net.unroll), jax.jit(rlax.categorical_l2_project)

    def unroll(params):  # [T + 1, N, ...], of every time step
        output = np.asarray(unrolled(params, core, sample.rollout.timestep)[0], np.float64)
        return output, output if agent.distribution is None else _softmax(output) @ ATOMS

    (output, values), (later, later_values) = unroll(params), unroll(target)
    losses, targets, begin = np.zeros(BATCH), np.zeros(BATCH), FRAMES - 1
    for b in range(BATCH):
        total, discount = 0.0, 1.0
        for t in range(begin + 1, begin + N_STEP + 1):
            total += discount * timestep.reward[t, b]
            discount *= GAMMA * timestep.discount[t, b]
            if timestep.step_type[t, b] == types.LAST:
                break
        selector = values[t, b] if agent.double else later_values[t, b]
        best = np.argmax(np.where(timestep.observation["action_mask"][t, b], selector, -np.inf))
        taken = action[begin, b]
        targets[b] = total + discount * later_values[t, b, best]
        if agent.distribution is None:
            losses[b] = 0.5 * (targets[b] - values[begin, b, taken]) ** 2
        else:
            atoms, probabilities = total + discount * ATOMS, _softmax(later[t, b, best])
            expected = project(atoms, probabilities, ATOMS)
            ratio = np.maximum(expected, 1e-30) / _softmax(output[begin, b, taken])
            losses[b] = np.sum(expected * np.log(ratio))
    return losses, targets


@pytest.mark.parametrize(
    ("distribution", "double"),
    [(None, False), (CATEGORICAL, True)],
    ids=["value", "categorical"],
)
def test_the_loss_equals_a_slow_one(distribution, double):
    """Returns to the end of episodes, frames, masks, weights and the projection, all at once."""
    agent = _agent(distribution=distribution, double=double, huber=1e6)
    sample = _sample()
    params, target = _params(agent, 1), _params(agent, 2)
    losses, targets = _slow_losses(agent, params, target, sample)
    kept = np.asarray(sample.rollout.timestep.step_type[FRAMES - 1] != types.LAST)
    assert 5 < np.sum(~kept) < 30
    context = optimization.Context(0.0, target)
    output = jax.jit(agent.loss)(params, sample, context)
    total = jax.grad(lambda p: agent.loss(p, sample, context).loss.total)
    assert "scatter" not in str(jax.make_jaxpr(total)(params))  # a TPU's is a loop over numbers
    loss = np.sum((sample.weight * losses)[kept]) / kept.sum()
    np.testing.assert_allclose(output.loss.result(), loss, rtol=1e-4)
    value = output.metrics["value/target"].result()
    np.testing.assert_allclose(value, targets[kept].mean(), rtol=1e-4, atol=1e-5)
    priority = losses if distribution else np.sqrt(2.0 * losses)
    priority = np.where(kept, priority, -1.0)
    np.testing.assert_allclose(output.priority, priority, rtol=1e-3, atol=1e-4)


def test_learnt_distributions_are_drawn_again():
    """Rounding makes divergences negative, and replay reads these as "nothing to learn"."""
    agent = dataclasses.replace(_agent(distribution=CATEGORICAL), gamma=1.0)
    sample = _sample()
    features = sample.rollout.timestep.observation["features"]
    shape = features.shape[:2]
    observation = {
        "features": jnp.broadcast_to(features[:1], features.shape),
        "action_mask": jnp.broadcast_to(jnp.arange(3) == 0, features.shape),
    }
    step_type = jnp.full(shape, types.MID)
    timestep = types.TimeStep(observation, jnp.zeros(shape), jnp.ones(shape), step_type)
    action = jnp.zeros_like(sample.rollout.action)
    sample = sample._replace(rollout=types.Rollout(timestep, action, (), ()))
    params = _params(agent, 1)
    priority = jax.jit(agent.loss)(params, sample, optimization.Context(0.0, params)).priority
    assert 0.0 <= jnp.min(priority) <= jnp.max(priority) < 1e-6


def test_noise_is_of_each_sequence_and_of_each_parameters(monkeypatch):
    agent = _agent(noisy=True)
    params, sample, keys = _params(agent, 1), _sample(), []
    time = jnp.zeros((2, BATCH), jnp.int32)
    same = jax.tree.map(
        lambda x: np.broadcast_to(np.asarray(x)[:, :1], x.shape), sample.rollout.timestep
    )
    outputs = jax.jit(agent._outputs)(params, same, time, sample.key)
    assert np.unique(outputs[0], axis=0).shape[0] == BATCH
    np.testing.assert_array_equal(outputs[0], outputs[1])  # one noise for both time steps
    evaluate = dqn.DQN._outputs

    def recorded(self, params, timestep, time, key):
        keys.append(jax.random.key_data(key))
        return evaluate(self, params, timestep, time, key)

    monkeypatch.setattr(dqn.DQN, "_outputs", recorded)
    context = optimization.Context(0.0, params)
    online, target = jax.jit(lambda: (agent.loss(params, sample, context), keys))()[1]
    assert np.all(np.any(online != target, axis=-1))


@pytest.mark.parametrize(("evaluation", "count"), [(False, 3), (True, 1)])
def test_noise_explores_in_training_alone(evaluation, count):
    agent = _agent(noisy=True, epsilon=0.0, epsilon_steps=1)
    learner = jax.jit(agent.init_learner)(jax.random.key(0))._replace(agent_steps=jnp.float32(10))
    same = jax.device_get(_sample().rollout.timestep)
    same = jax.tree.map(lambda x: np.repeat(x[0, :1], BATCH, 0), same)
    same.observation["action_mask"] = np.ones((BATCH, 3), bool)
    key = jax.random.split(jax.random.key(1), BATCH)
    core = agent.init_actor(jnp.arange(BATCH), BATCH)
    act = jax.jit(functools.partial(agent.act, evaluation=evaluation))
    assert np.unique(act(agent.actor_params(learner), core, same, key)[0]).size == count


NUM_ENVS, LENGTH = 4, 5


@pytest.fixture
def counting_loss(monkeypatch):
    """A loss with a gradient of -1: each gradient step of Adam adds the learning rate."""

    def loss(self, params, sample, context):
        reward = sample.rollout.timestep.reward[1:]
        loss = jnp.broadcast_to(-params["w"], reward.shape)
        priority = jnp.ones(sample.weight.shape)
        metrics = {"reward": types.Mean.of(reward)}
        return optimization.LossOutput(types.Mean.of(loss), metrics, priority)

    monkeypatch.setattr(dqn.DQN, "init_params", lambda self, key: {"w": jnp.zeros(())})
    monkeypatch.setattr(dqn.DQN, "loss", loss)


def _run(updates, reward=0.0, **options):
    """Returns the learners `[U]` and the metrics `[U]` after each rollout of a long episode."""
    options = {"batch_size": 4, "replay_capacity": 200, "min_replay": 1} | options
    agent = dqn.DQN(streams.RandomEpisodes().spec, learning_rate=0.5, **options)
    shape = (LENGTH + 1, NUM_ENVS)
    step_type = jnp.full(shape, types.MID, jnp.int8)
    timestep = types.TimeStep(
        jnp.zeros((*shape, 3)), jnp.full(shape, reward), jnp.ones(shape), step_type
    )
    rollout = types.Rollout(timestep, jnp.zeros((LENGTH, NUM_ENVS), jnp.int32), (), ())

    def run():
        learner = agent.init_learner(jax.random.key(0))

        def step(state, key):
            state, metrics = agent.update(state, rollout, key)
            return state, (state.learner, {k: m.result() for k, m in metrics.items()})

        state = types.AgentState(learner, agent.init_memory(rollout))
        return jax.lax.scan(step, state, jax.random.split(jax.random.key(1), updates))[1]

    return jax.device_get(jax.jit(experience.on_devices(run))())


@pytest.mark.parametrize(
    "ratio, expected",
    [
        (0.1, [0, 1, 0, 1]),  # twenty transitions a rollout, in batches of four
        (1.3, [6, 7, 6, 7]),
    ],
)
def test_the_replay_ratio_decides_the_number_of_gradient_steps(counting_loss, ratio, expected):
    learner, metrics = _run(4, replay_ratio=ratio)
    np.testing.assert_array_equal(metrics["replay/gradient_steps"], expected)
    np.testing.assert_array_equal(learner.gradient_steps, np.cumsum(expected))
    np.testing.assert_array_equal(learner.agent_steps, 20 * np.arange(1, 5))
    np.testing.assert_allclose(learner.params["w"], 0.5 * np.cumsum(expected), rtol=1e-4)


def test_a_replay_ratio_without_any_gradient_step_is_a_user_error(counting_loss):
    with pytest.raises(errors.UserError, match="replay_ratio = 1e-09"):
        _run(1, replay_ratio=1e-9)


def test_nothing_is_learnt_before_the_minimum_of_replay(counting_loss):
    learner, metrics = _run(4, min_replay=60, replay_ratio=1.0, reward=-7.0, reward_clip=2.0)
    np.testing.assert_array_equal(metrics["replay/gradient_steps"], [0, 0, 5, 5])
    np.testing.assert_array_equal(metrics["replay/size"], [20, 40, 60, 80])
    assert learner.params["w"][1] == 0.0
    np.testing.assert_array_equal(metrics["reward"], [np.nan, np.nan, -2.0, -2.0])


@pytest.mark.parametrize(
    ("options", "updates"),
    [
        ({"replay_ratio": 0.1}, 2),
        ({"replay_ratio": 0.13, "min_replay": 41}, 4),  # 0.65 of a step an update: not in the third
        ({"replay_ratio": 1.0, "min_replay": 40}, 2),
        ({"replay_ratio": 1.0, "n_step": 16}, 4),
    ],
)
def test_the_first_update_with_a_gradient_step_is_known_before(counting_loss, options, updates):
    steps = _run(updates, **options)[1]["replay/gradient_steps"]
    assert not np.any(steps[:-1]) and steps[-1]
    agent = dqn.DQN(streams.RandomEpisodes().spec, **{"batch_size": 4, "min_replay": 1} | options)
    agent.check_run(NUM_ENVS, LENGTH, updates)
    with pytest.raises(errors.UserError, match=f"at least {20 * updates}"):
        agent.check_run(NUM_ENVS, LENGTH, updates - 1)


def test_targets_are_copied_periodically_or_follow_slowly(counting_loss):
    learner, _ = _run(4, replay_ratio=0.4, target_period=3)  # two steps a rollout
    np.testing.assert_allclose(learner.target["w"], [0.0, 1.5, 3.0, 3.0], rtol=1e-4)
    learner, _ = _run(2, replay_ratio=0.2, target_period=1, target_rate=0.25)
    np.testing.assert_allclose(learner.target["w"], [0.125, 0.34375], rtol=1e-4)


def test_schedules_count_agent_steps(counting_loss, monkeypatch):
    """The learning rate falls to 0, and the importance exponent rises to 1."""
    exponents, sample = [], replay.Replay.sample

    def recorded(self, memory, key, exponent):
        jax.debug.callback(lambda x: exponents.append(float(x)), exponent)
        return sample(self, memory, key, exponent)

    monkeypatch.setattr(replay.Replay, "sample", recorded)
    options = {"priority_exponent": 0.5, "importance_exponent": 0.4, "importance_steps": 40}
    learner, _ = _run(3, replay_ratio=0.2, anneal_steps=40, **options)
    np.testing.assert_allclose(learner.params["w"], 0.25, rtol=1e-4)
    jax.effects_barrier()
    np.testing.assert_allclose(exponents, [0.7, 1.0, 1.0], rtol=1e-6)
