"""PPO, IMPALA and PQN: their updates against slow ones, their schedules, and how they act.

Axis legend: `T` time, `B` streams.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents import impala, networks, ppo, pqn
from agents.networks import cores, encoders
from agents.parts import actor_critic, optimization, returns
from podracers import parallel, types
from tests import contract, streams
from tests.agents import experience

P = jax.sharding.PartitionSpec
LENGTH, BATCH = 6, 8
MASKED = streams.RandomEpisodes(masked=True)
NETWORKS = {
    "feed_forward": {},
    "frames": {"frame_stack": 3},
    "frames_gru": {"core": cores.GRU(8), "frame_stack": 3},
    "lstm": {"core": cores.LSTM(8)},
    "stack": {"core": cores.Stack(cores.MinGRU(8))},
}
OPTIONS = {
    "learning_rate": 0.02,
    "anneal_steps": 10 * LENGTH * BATCH,
    "max_grad_norm": 0.1,  # small enough to bind
    "gamma": 0.9,
    "num_minibatches": 1,
    "reward_scale": 0.5,
    "reward_clip": 1.0,
}
# Epsilons are large, so that no rounding of a tiny gradient is blown up.
AGENTS = {
    "ppo": (
        ppo.PPO,
        {"entropy_cost": 0.1, "adam_epsilon": 1e-2, "gae_lambda": 0.8, "epochs": 1}
        | {"clip_rho": 0.95},
    ),
    "impala": (
        impala.IMPALA,
        {"entropy_cost": 0.1, "optimizer_epsilon": 1e-2} | {"vtrace_lambda": 0.8},
    ),
    "pqn": (
        pqn.PQN,
        {"q_lambda": 0.8, "epochs": 1, "epsilon": 0.5, "epsilon_steps": 2 * LENGTH * BATCH},
    ),
}


def _agent(name, network, environment=None, **options):
    """Returns an agent and an environment, by default one with masks."""
    make, agent_options = AGENTS[name]
    environment = environment or MASKED
    if name == "pqn":
        encoder = encoders.MLP((8,), layer_norm=True)
        network = functools.partial(networks.q_network, encoder=encoder, **network)
    else:
        network = contract.tiny_network(**network)
    return make(environment.spec, network=network, **OPTIONS | agent_options | options), environment


@functools.cache
def _acted(name, network, normalize=False):
    """Returns the experience of an agent that acted with its learner's parameters."""
    agent, environment = _agent(name, NETWORKS[network], normalize_observations=normalize)
    return experience.acted(agent, environment, LENGTH, BATCH)


@functools.cache
def _compiled(agent: Any, num_devices: int):
    def update(learner, rollout):
        state, means = agent.update(types.AgentState(learner, ()), rollout, jax.random.key(4))
        return state.learner, parallel.global_sum(means)

    columns = P(None, parallel.AXIS)
    rows = P(parallel.AXIS)
    rollout = types.Rollout(columns, columns, columns, actor_state=rows, age=rows)
    return jax.jit(experience.on_devices(update, num_devices, (P(), rollout)))


def _update(acted, num_devices=1):
    """Returns the learner after one update, and the means of its metrics."""
    agent, learner, rollout = acted
    learner, means = _compiled(agent, num_devices)(learner, rollout)
    return learner, {name: float(mean.result()) for name, mean in means.items()}


def _slow_ppo(before, timestep, rollout, kept, values):
    """Returns the loss `[T, B]` of outputs, the value targets, and metrics."""
    advantage = streams.evaluate(lambda: returns.gae(timestep, values, 0.9, 0.8))
    target = advantage + values[:-1]
    advantage = (advantage - advantage[kept].mean()) / advantage[kept].std()
    # Two updates after a policy acted, the proximal one is two thirds of the way to the newest.
    share = np.where(rollout.age == 2, 2 / 3, 0.0) if np.size(rollout.age) else np.zeros(BATCH)
    move = share * np.asarray(_log_prob(before, rollout)[0] - rollout.extras.log_prob)
    rho = np.where(share > 0.0, np.minimum(np.exp(move), 0.95), 1.0)

    def loss(output):
        log_prob, bonus = _log_prob(output, rollout)
        ratio = jnp.exp(log_prob - rollout.extras.log_prob - move)
        clipped = jnp.clip(ratio, 0.8, 1.2)
        surrogate = jnp.minimum(ratio * advantage, clipped * advantage)
        return -rho * surrogate + 0.25 * (output.value[:-1] - target) ** 2 - bonus

    log_ratio = np.asarray(_log_prob(before, rollout)[0] - rollout.extras.log_prob) - move
    divergence = rho * (np.exp(log_ratio) - 1.0 - log_ratio)
    metrics = {"policy/rho": rho[kept].mean(), "value/mean": values[:-1][kept].mean()}
    metrics["policy/kl"] = divergence[kept].mean()
    if share.any():
        assert (rho == 0.95).any() and np.ptp(rho[kept]) > 0.05
    else:
        metrics |= {"policy/clip_fraction": 0.0}
    return loss, target, metrics


def _slow_impala(before, timestep, rollout, kept, values):
    log_ratio = np.asarray(_log_prob(before, rollout)[0] - rollout.extras.log_prob)
    ratio = np.exp(log_ratio)
    rho = np.minimum(ratio, 1.0)
    assert np.ptp(ratio[kept]) > 0.5  # far enough from the policy that acted
    target, advantage = streams.evaluate(
        lambda: returns.vtrace(timestep, before.value, log_ratio, 0.9, 0.8)
    )

    def loss(output):
        log_prob, bonus = _log_prob(output, rollout)
        return -log_prob * advantage + 0.25 * (output.value[:-1] - target) ** 2 - bonus

    value = before.value[:-1]
    return loss, target, {"policy/rho": rho[kept].mean(), "value/mean": value[kept].mean()}


def _slow_pqn(before, timestep, rollout, kept, values):
    best = np.where(timestep.observation["action_mask"], before, -np.inf).max(axis=-1)
    target = streams.evaluate(lambda: returns.lambda_returns(timestep, best, 0.9, 0.8))

    def taken(output):
        return jnp.sum(output[:-1] * np.eye(3)[rollout.action], axis=-1)

    metrics = {"value/mean": taken(before)[kept].mean()}
    return lambda output: 0.5 * (taken(output) - target) ** 2, target, metrics


def _log_prob(output, rollout):
    """Returns the log-probabilities of the actions, and the weighted entropies."""
    mask = rollout.timestep.observation["action_mask"]
    log_p = jax.nn.log_softmax(jnp.where(mask, output.policy, -1e30)[:-1])
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    return jnp.sum(log_p * np.eye(3)[rollout.action], axis=-1), 0.1 * entropy


SLOW = {"ppo": _slow_ppo, "impala": _slow_impala, "pqn": _slow_pqn}
FIRST_STEP = {
    "ppo": lambda g: g / (np.abs(g) + 1e-2),
    "impala": lambda g: g / (np.sqrt(0.01 * g**2) + 1e-2),
    # In its first steps rectified Adam does not trust its second moment, and divides by nothing.
    "pqn": lambda g: g,
}


@pytest.mark.parametrize(
    ("name", "network", "num_devices", "is_old"),
    [
        ("ppo", "frames", 4, False),
        ("ppo", "frames", 4, True),
        ("impala", "feed_forward", 4, True),
        ("pqn", "frames", 4, False),
        pytest.param("ppo", "lstm", 1, True, marks=pytest.mark.slow),
        pytest.param("impala", "lstm", 1, True, marks=pytest.mark.slow),
        pytest.param("pqn", "lstm", 1, False, marks=pytest.mark.slow),
        pytest.param("ppo", "stack", 4, False, marks=pytest.mark.slow),
    ],
)
def test_an_update_equals_a_slow_one(name, network, num_devices, is_old):
    """Masks, truncations, resets of memory, weights, rewards, clipping and the optimizer at once.

    Older parameters acted, if `is_old`; in every other stream, by their number, the newest.
    """
    acted = _acted(name, network)
    if is_old:
        move = jax.jit(functools.partial(experience.perturbed, scale=0.2, seed=5))
        age = np.where(np.arange(BATCH) % 2 == 0, 2, 0).astype(np.int32)
        rollout = acted.rollout._replace(age=age)
        acted = acted._replace(learner=jax.device_get(move(acted.learner)), rollout=rollout)
    # Only one action is legal at the end, seldom the one of the highest value.
    mask = acted.rollout.timestep.observation["action_mask"].copy()
    mask[-1] = [True, False, False]
    observation = acted.rollout.timestep.observation | {"action_mask": mask}
    timestep = acted.rollout.timestep._replace(observation=observation)
    acted = acted._replace(rollout=acted.rollout._replace(timestep=timestep))
    agent, learner, rollout = acted
    network = agent.net
    outputs = functools.partial(experience.outputs, network, rollout=rollout)
    reward = np.clip(0.5 * rollout.timestep.reward, -1.0, 1.0)
    timestep, kept = rollout.timestep._replace(reward=reward), ~rollout.timestep.last()[:-1]
    before = jax.device_get(jax.jit(outputs)(learner.params))
    values = None
    if name == "ppo":  # without memory the values of acting
        is_recurrent = network.is_recurrent
        values = np.asarray(before.value)
        values = values if is_recurrent else np.concatenate([rollout.extras.value, values[-1:]])
    per_step, target, expected = SLOW[name](before, timestep, rollout, kept, values)

    def loss(params):
        return jnp.sum(jnp.where(kept, per_step(outputs(params)), 0.0)) / kept.sum()

    value, gradient = jax.device_get(jax.jit(jax.value_and_grad(loss))(learner.params))
    norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(gradient)))
    assert norm > 0.2
    params = jax.tree.map(
        lambda p, g: p - 0.02 * FIRST_STEP[name](g * 0.1 / norm), learner.params, gradient
    )
    expected |= {"loss/total": value, "gradient_norm": norm, "value/target": target[kept].mean()}
    learner, means = _update(acted, num_devices)
    streams.assert_close(learner.params, params, rtol=1e-3, atol=2e-5)
    for metric, value in expected.items():
        np.testing.assert_allclose(means[metric], value, rtol=1e-3, atol=1e-5, err_msg=metric)


@pytest.mark.parametrize(
    ("name", "network", "normalize"),
    [
        ("ppo", "lstm", False),
        pytest.param("impala", "lstm", False, marks=pytest.mark.slow),
        pytest.param("ppo", "frames_gru", True, marks=pytest.mark.slow),
        pytest.param("impala", "frames_gru", True, marks=pytest.mark.slow),
    ],
)
def test_ratios_are_one_in_the_first_gradient_step(name, network, normalize):
    """Learning uses the inputs of acting: cores, resets, statistics."""
    acted = _acted(name, network, normalize)
    updated, means = _update(acted)
    assert abs(means["policy/kl"]) < 1e-7
    if normalize:  # by the statistics of before the rollout
        before, after = acted.learner.normalizer, updated.normalizer
        assert (before.count, after.count) == (LENGTH * BATCH, 2 * LENGTH * BATCH)
        observed = acted.rollout.timestep.observation["features"][:-1].mean(axis=(0, 1))
        expected = 0.5 * (before.mean["features"] + observed)
        np.testing.assert_allclose(after.mean["features"], expected, rtol=1e-4, atol=1e-5)
    zeros = jax.tree.map(np.zeros_like, acted.rollout.actor_state)
    forgot = acted._replace(rollout=acted.rollout._replace(actor_state=zeros))
    assert _update(forgot)[1]["policy/kl"] > 1e-4


@pytest.mark.parametrize(
    ("network", "option", "is_input"),
    [
        ("frames", None, False),
        ("feed_forward", True, True),
        ("lstm", None, True),
        ("lstm", False, False),
    ],
)
def test_the_option_and_the_default_of_the_previous_action_and_reward(network, option, is_input):
    agent, _ = _agent("ppo", NETWORKS[network], previous_action_and_reward=option)
    learner = jax.eval_shape(agent.init_learner, jax.random.key(0))
    kernel = learner.params["torsos_0"]["encoder"]["Dense_0"]["kernel"]
    features = 3 * NETWORKS[network].get("frame_stack", 1)
    assert kernel.shape[0] == features + (3 + 1 if is_input else 0)
    state = agent.init_actor(jnp.arange(BATCH), BATCH)
    assert jax.tree.map(jnp.shape, state.action) == ((BATCH,) if is_input else ())


@pytest.mark.parametrize("name", ["ppo", "pqn", pytest.param("impala", marks=pytest.mark.slow)])
def test_the_learning_rate_and_epsilon_fall_with_agent_steps(name):
    acted = _acted(name, "lstm" if name == "impala" else "frames")
    for updates, portion in {0: 1.0, 1: 0.9, 5: 0.5, 10: 0.0, 15: 0.0}.items():
        steps = LENGTH * BATCH
        counts = {"update": np.int32(updates), "agent_steps": np.float32(updates * steps)}
        learner = acted.learner._replace(**counts)
        after, means = _update(acted._replace(learner=learner))
        assert after.update == updates + 1
        assert after.agent_steps == (updates + 1) * steps
        np.testing.assert_allclose(means["learning_rate"], 0.02 * portion, rtol=1e-5, atol=1e-8)
        if portion == 0.0:
            streams.assert_same(after.params, learner.params)
        if name == "pqn":
            epsilon = acted.agent.actor_params(learner).exploration
            np.testing.assert_allclose(epsilon, max(1.0 - 0.25 * updates, 0.5))


def test_the_divergence_of_ppo_is_that_from_the_proximal_policy():
    """The actions of a policy (0.9, 0.1), which an update made (0.5, 0.5), in their shares."""
    agent, _ = _agent("ppo", {}, clip_rho=5.0)
    params = experience.zeros(agent).params  # of a uniform policy
    legal = np.broadcast_to([True, True, False], (11, 1, 3))
    observation = {"features": np.zeros((11, 1, 3), np.float32), "action_mask": legal}
    reward, going = np.zeros((11, 1), np.float32), np.full((11, 1), types.MID, np.int8)
    timestep = types.TimeStep(observation, reward, reward + 1.0, going)
    action = np.int32([[0]] * 9 + [[1]])
    log_prob = np.log(np.where(action == 0, 0.9, 0.1)).astype(np.float32)
    extras = actor_critic.Extras(action, log_prob, reward[1:])
    rollout = types.Rollout(timestep, action, extras, (), age=np.ones(1, np.int32))
    extras, rho = jax.jit(agent._proximal)(params, (), timestep, rollout)
    current = jax.tree.map(lambda x: x[:-1], timestep)
    batch = actor_critic.Batch(current, extras, reward[1:], reward[1:], reward[1:] + 1.0, rho)
    context = optimization.Context(jnp.float32(0.0))
    metrics = jax.jit(agent.loss)(params, (batch, ()), context).metrics
    proximal = np.sqrt([0.9 * 0.5, 0.1 * 0.5])  # not normalised
    expected = np.sum(0.5 - proximal - proximal * np.log(0.5 / proximal))
    np.testing.assert_allclose(expected, 0.123, atol=1e-3)
    np.testing.assert_allclose(metrics["policy/kl"].result(), expected, rtol=1e-4)


def test_clip_and_entropy_cost_of_ppo_fall_with_agent_steps():
    """Half of the schedule is over after five rollouts: as if the options had these values."""
    acted = _acted("ppo", "frames")
    learner = experience.perturbed(acted.learner, 0.5, seed=7)
    learner = learner._replace(agent_steps=jnp.float32(5 * LENGTH * BATCH))

    def means(**options):
        agent = dataclasses.replace(acted.agent, **options)
        return _update(acted._replace(agent=agent, learner=learner))[1]

    actual = means(
        entropy_cost=0.3, entropy_cost_final=0.1, clip_epsilon=0.4, clip_epsilon_final=0.05
    )
    expected = means(entropy_cost=0.2, clip_epsilon=0.225)
    assert expected["policy/clip_fraction"] > 0.0
    for metric in ("loss/total", "policy/clip_fraction"):
        np.testing.assert_allclose(actual[metric], expected[metric], rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"optimizer": "adam"}, 1.0 / (1.0 + 0.1)),
        ({"rmsprop_epsilon_in_sqrt": True}, 1.0 / np.sqrt(0.01 + 0.1)),
        ({"rmsprop_decay": 0.75}, 1.0 / (0.5 + 0.1)),
    ],
)
def test_the_first_step_of_each_optimizer_of_impala(options, expected):
    agent = impala.IMPALA(MASKED.spec, max_grad_norm=10.0, optimizer_epsilon=0.1, **options)
    gradient, chain = {"x": np.ones((2,), np.float32)}, agent._optimizer.chain
    direction, _ = jax.jit(lambda: chain.update(gradient, chain.init(gradient)))()
    np.testing.assert_allclose(direction["x"], expected, rtol=1e-5)
