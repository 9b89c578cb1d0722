"""SAC's losses and gradients against slow ones, its actions, and replayed images.

Axis legend: `N` sequences, `U` transitions learnt from in each, `R = U N`, `D` components of an
action, `A` actions.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dm_env import specs

from agents import networks, sac
from agents.networks import cores, encoders
from agents.networks import sac as sac_networks
from agents.parts import inputs, optimization
from agents.replay import replay
from podracers import environment, errors, types
from tests import contract, streams
from tests.agents import experience

BATCH = 16
GAMMA, TEMPERATURE = 0.9, 0.5
LOW, HIGH = np.array([-1.0, 1.0]), np.array([0.5, 3.0])
PAIR = specs.Array((2,), np.float32)
TINY = functools.partial(sac_networks.sac_network, hidden_sizes=(4,))


class _Case(NamedTuple):
    """An agent whose targets differ from its critics, and its data in NumPy."""

    agent: sac.SAC
    params: sac_networks.Params
    target: Any
    sample: replay.Sample


def _spec(actions: str) -> environment.EnvironmentSpec:
    spec = streams.RandomEpisodes(masked=actions == "discrete").spec
    if actions != "discrete":
        bounds = specs.BoundedArray((2,), np.float32, LOW.astype("f"), HIGH.astype("f"))
        return environment.EnvironmentSpec(spec.name, spec.observation, bounds)
    return spec


@functools.cache
def _case(actions: str) -> _Case:
    """Discrete actions have an encoder of a part of the observation, in stacks of two frames.

    So does the recurrent network, of continuous actions.
    """
    is_discrete, spec = actions == "discrete", _spec(actions)
    options, lengths = {}, {}
    if actions == "recurrent":
        options = {"encoder": encoders.MLP((5,)), "frame_stack": 2, "core": cores.MinGRU(4)}
        lengths = {"sequence_length": 4, "burn_in": 2}
    if is_discrete:
        spec = dataclasses.replace(spec, observation=spec.observation | {"unread": PAIR})
        options = {"encoder": encoders.MLP((5,)), "frame_stack": 2}
        options |= {"policy_keys": ("features",), "critic_keys": ("features",)}
    network = functools.partial(sac_networks.sac_network, hidden_sizes=(4, 4), **options)
    agent = sac.SAC(spec, gamma=GAMMA, network=network, **lengths)
    params = experience.moved(experience.zeros(agent).params, 0.5, seed=7)
    params = params._replace(log_temperature=jnp.log(TEMPERATURE))
    target = experience.moved(params.critic, 0.7, seed=4)
    rng = np.random.default_rng(2)
    length = agent.buffer.sequence_length + 1
    observation = rng.normal(size=(length, BATCH, 3)).astype(np.float32)
    if is_discrete:
        action = rng.integers(0, 3, (length - 1, BATCH)).astype(np.int32)
        mask = np.arange(3) != rng.integers(0, 4, (length, BATCH))[..., None]
        unread = rng.normal(size=(length, BATCH, 2)).astype(np.float32)
        observation = {"features": observation, "unread": unread, environment.ACTION_MASK: mask}
    else:
        action = rng.uniform(LOW, HIGH, (length - 1, BATCH, 2)).astype(np.float32)
    timestep = experience.random_episodes(1, (length, BATCH))._replace(observation=observation)
    assert timestep.truncated()[-1].any() and timestep.terminated()[-1].any()
    state = ()
    if agent.net.is_recurrent:
        core = experience.moved(agent.net.initial_core(BATCH), 0.5, seed=5)
        state = inputs.ActorState(core, rng.uniform(LOW, HIGH, (BATCH, 2)).astype(np.float32))
    rollout = types.Rollout(timestep, action, (), state)
    weight = rng.uniform(0.5, 1.0, BATCH).astype(np.float32)
    keys = jax.random.split(jax.random.key(3), BATCH)
    return _Case(agent, params, target, replay.Sample(rollout, None, weight, keys))


def _dense(params, x):
    return x @ params["kernel"] + params["bias"]


def _mlp(params, x, activation):
    for index in range(len(params)):
        x = activation(_dense(params[f"Dense_{index}"], x))
    return x


def _rows(actions: str, x, arrival: int):
    """Returns `[R, ...]` of `[T + 1, N, ...]` at the starts (0) or ends (1) of transitions."""
    buffer = _case(actions).agent.buffer
    begin = buffer.sequence_length - buffer.learnt_states + arrival
    return x[begin : begin + buffer.learnt_states].reshape(-1, *x.shape[2:])


def _units(action):
    return (action - LOW) / (HIGH - LOW) * 2.0 - 1.0


def _slow_outputs(encoder):
    """Returns the outputs `[T + 1, N, F]` of the recurrent network, from one step after another."""
    agent, _, _, sample = _case("recurrent")
    timestep, action, _, (core, previous), *_ = sample.rollout
    outputs = []
    for time in range(len(timestep.reward)):
        now = jax.tree.map(lambda x: x[time], timestep)  # noqa: B023
        going = ~now.first()
        seen = {
            "observation": now.observation,
            "previous_action": _units(action[time - 1] if time else previous) * going[:, None],
            "previous_reward": now.reward * going,
        }
        output, core = agent.net.memory.step(encoder, core, now._replace(observation=seen))
        outputs.append(output)
        if time + 1 == agent.burn_in:
            core = jax.lax.stop_gradient(core)
    return jnp.stack(outputs)


def _slow_losses(actions: str, params: sac_networks.Params):
    """Returns the losses of `params` `[3, R]`, the targets `[R]` and the values `[2, R]`.

    `arrival` is 0 at the start of a transition, and 1 at its end.
    """
    agent, constant, target_critic, sample = _case(actions)
    rows = functools.partial(_rows, actions)
    timestep, action = sample.rollout.timestep, rows(sample.rollout.action, 0)
    is_discrete = actions == "discrete"
    shape = 2, agent.buffer.learnt_states
    keys = jax.vmap(lambda key: jax.random.split(key, shape), out_axes=2)(sample.key).reshape(2, -1)
    noise = jax.vmap(jax.vmap(lambda key: jax.random.normal(key, (2,))))(keys)  # [2, R, D]

    outputs = {}  # of the recurrent network, by the id of the critics

    def features(critic, arrival):
        if actions == "recurrent":
            if id(critic) not in outputs:
                outputs[id(critic)] = _slow_outputs(critic["encoder"])
            return rows(outputs[id(critic)], arrival)
        if not is_discrete:
            return rows(timestep.observation, arrival)
        frames, first = timestep.observation["features"], rows(timestep.first(), arrival)
        before = np.where(first[:, None], rows(frames, arrival), rows(frames, arrival - 1))
        stack = np.concatenate([before, rows(frames, arrival)], axis=-1)
        return _mlp(critic["encoder"], stack, jnp.tanh)

    def values(critic, arrival, action):
        seen = jnp.concatenate([features(critic, arrival), action], axis=-1)
        hidden = [_mlp(critic[f"bodies_{i}"], seen, jax.nn.relu) for i in range(2)]
        return jnp.stack([_dense(critic[f"heads_{i}"], hidden[i]) for i in range(2)])

    def expect(policy, critic, arrival):
        """Returns the expected value under `critic`, and the entropy, `[N]` each."""
        hidden = _mlp(policy["MLP_0"], features(constant.critic, arrival), jax.nn.relu)
        outputs = _dense(policy["Dense_0"], hidden)
        if is_discrete:
            mask = rows(timestep.observation[environment.ACTION_MASK], arrival)
            log_p = jax.nn.log_softmax(jnp.where(mask, outputs, -1e30))
            worse = jnp.min(values(critic, arrival, jnp.zeros((BATCH, 0))), axis=0)
            return jnp.sum(jnp.exp(log_p) * worse, -1), -jnp.sum(jnp.exp(log_p) * log_p, -1)
        mean, log_std, z = outputs[:, :2], outputs[:, 2:], noise[arrival]
        raw = mean + jnp.exp(log_std) * z
        # log(1 - tanh(x)^2), whose digits would cancel where actions are near their bounds.
        log_slope = 2.0 * (np.log(2.0) - raw - jax.nn.softplus(-2.0 * raw))
        log_prob = -0.5 * z**2 - log_std - 0.5 * np.log(2.0 * np.pi) - log_slope
        value = jnp.min(values(critic, arrival, jnp.tanh(raw))[..., 0], axis=0)
        return value, -jnp.sum(log_prob, -1)

    value, entropy = expect(constant.policy, target_critic, 1)
    soft_value = value + TEMPERATURE * entropy
    target = rows(timestep.reward, 1) + GAMMA * rows(timestep.discount, 1) * soft_value
    if is_discrete:
        taken = values(params.critic, 0, jnp.zeros((BATCH, 0)))[:, np.arange(BATCH), action]
        mask = rows(timestep.observation[environment.ACTION_MASK], 0)
        target_entropy = 0.98 * np.log(mask.sum(axis=-1))
    else:
        taken, target_entropy = values(params.critic, 0, _units(action))[..., 0], -2.0
    value, entropy = expect(params.policy, constant.critic, 0)
    policy_loss = -value - TEMPERATURE * entropy
    critic_loss = jnp.sum(0.5 * (taken - jax.lax.stop_gradient(target)) ** 2, axis=0)
    _, entropy = expect(constant.policy, constant.critic, 0)
    temperature_loss = jnp.exp(params.log_temperature) * (entropy - target_entropy)
    return jnp.stack([policy_loss, critic_loss, temperature_loss]), target, taken


@pytest.mark.parametrize(
    "actions", ["discrete", "recurrent", pytest.param("continuous", marks=pytest.mark.slow)]
)
def test_losses_and_gradients_equal_slow_ones(actions):
    """Each part learns from its own loss alone; encoder and core are a part of the critics."""
    agent, params, target, sample = _case(actions)
    kept = ~_rows(actions, sample.rollout.timestep.last(), 0)
    assert 1 < np.sum(~kept) < kept.size / 2
    weight = np.tile(sample.weight, agent.buffer.learnt_states)

    def loss(params):
        learnt = agent.loss(params, sample, optimization.Context(0.0, target))
        return learnt.loss.result(), learnt

    def slow_loss(params):
        losses, target, taken = _slow_losses(actions, params)
        total = jnp.mean((jnp.sum(losses, axis=0) * weight)[kept])
        return total, (losses[:, kept], target[kept], jnp.abs(taken - target), taken[:, kept])

    gradient, learnt = jax.device_get(jax.jit(jax.grad(loss, has_aux=True))(params))
    evaluate = jax.jit(jax.value_and_grad(slow_loss, has_aux=True))
    results = jax.device_get(evaluate(params))
    (total, (losses, targets, error, taken)), slow_gradient = results
    streams.assert_close(gradient, slow_gradient, rtol=1e-3, atol=1e-5)
    expected = {
        "loss/policy": losses[0].mean(),
        "loss/critic": losses[1].mean(),
        "value/target": targets.mean(),
        "value/mean": taken.mean(),
        "policy/temperature": TEMPERATURE,
    }
    np.testing.assert_allclose(learnt.loss.result(), total, rtol=1e-4)
    for name, value in expected.items():
        np.testing.assert_allclose(learnt.metrics[name].result(), value, rtol=1e-4, err_msg=name)
    for index, priority in enumerate(learnt.priority):
        sizes = np.mean(error, axis=0)[index::BATCH][kept[index::BATCH]]
        expected = 0.9 * sizes.max() + 0.1 * sizes.mean() if sizes.size else -1.0
        np.testing.assert_allclose(priority, expected, rtol=1e-4)


def test_policy_and_critics_read_their_own_parts():
    agent, _ = contract.AGENTS["sac_asymmetric"]()
    net, params = agent.net, experience.moved(experience.zeros(agent).params, 0.5, seed=7)
    seen, _ = net.observe({}, net.initial_core(1), networks.zero_timestep(agent.spec))

    def read(output):
        gradient = jax.grad(lambda x: jnp.sum(output(net.encode(params.critic, x))))(seen)
        return [name for name, x in gradient.items() if np.any(x)]

    action = jnp.zeros((1, 2))
    assert read(lambda x: net.outputs(params.policy, x)) == ["state"]
    assert read(lambda x: net.values(params.critic, x, action)) == ["privileged_state"]


def test_continuous_actions_keep_their_bounds_and_their_units():
    kind = sac_networks.head_from_spec(_spec("continuous"))
    keys = jax.random.split(jax.random.key(0), 1000)
    outputs = jnp.tile(jnp.array([0.5, -9.0, 3.0, 3.0]), (1000, 1))
    sampled = streams.evaluate(lambda: kind.to_action(kind.sample(outputs, None, keys)))
    random = streams.evaluate(kind.random, None, keys)
    for action in (sampled, random):
        assert np.all((action >= LOW) & (action <= HIGH))
        np.testing.assert_allclose(action.min(axis=0), LOW, atol=0.02)
        np.testing.assert_allclose(action.max(axis=0), HIGH, atol=0.02)
    np.testing.assert_allclose(random.mean(axis=0), (LOW + HIGH) / 2, atol=0.1)
    mode = kind.to_action(kind.mode(outputs[:1], None))
    np.testing.assert_allclose(mode[0], [-1.0 + 0.75 * (np.tanh(0.5) + 1.0), 1.0], rtol=1e-5)
    np.testing.assert_allclose(kind.to_critics(mode)[0], [np.tanh(0.5), -1.0], atol=1e-6)


def test_discrete_actions_are_legal():
    kind = sac_networks.head_from_spec(_spec("discrete"))
    keys = jax.random.split(jax.random.key(0), 300)
    mask = jnp.tile(jnp.array([True, False, True]), (300, 1))
    outputs = jnp.tile(jnp.array([0.0, 9.0, 1.0]), (300, 1))
    random = np.asarray(kind.random(mask, keys))
    assert set(random) == {0, 2} and 110 < np.sum(random == 0) < 190
    assert set(np.asarray(kind.sample(outputs, mask, keys))) == {0, 2}
    assert set(np.asarray(kind.mode(outputs, mask))) == {2}
    # If no action is legal, all four are.
    mask = jnp.array([[1, 1, 1, 1], [1, 0, 0, 1], [0, 0, 0, 0]], bool)
    actual = sac_networks.Discrete(4).target_entropy(0.5, mask)
    np.testing.assert_allclose(actual, 0.5 * np.log([4.0, 2.0, 4.0]), rtol=1e-6)


def _actions(agent, learner, evaluation=False):
    """Returns the actions of 500 streams that see the same."""
    start = types.restart(agent.spec.zero_observation())
    timestep = jax.tree.map(lambda x: jnp.tile(x, (500, *[1] * x.ndim)), start)
    keys = jax.random.split(jax.random.key(1), 500)
    act = jax.jit(agent.act, static_argnums=4)
    return act(agent.actor_params(learner), (), timestep, keys, evaluation)[0]


def test_actions_are_random_until_random_steps():
    agent = sac.SAC(_spec("continuous"), network=TINY, random_steps=100)
    learner = experience.zeros(agent)
    # A policy with a small deviation.
    learner.params.policy["Dense_0"]["bias"] = jnp.array([0.0, 0.0, -5.0, -5.0])

    def spread(steps, evaluation=False):
        params = learner._replace(agent_steps=jnp.float32(steps))
        return np.ptp(_actions(agent, params, evaluation), axis=0)

    np.testing.assert_allclose(spread(99), HIGH - LOW, atol=0.1)
    assert np.all(spread(100) < 0.1)
    assert np.all(spread(0, evaluation=True) == 0.0)


@pytest.mark.parametrize(
    ("policy_period", "earlier"),  # gradient steps: a multiple of six
    [(1, 0), (2, errors.INT32_MAX - 1), (3, 0)],
)
def test_policy_and_temperature_pause_and_the_critics_do_not(policy_period, earlier):
    """Steps that are left out do not move the moments of Adam."""
    agent = sac.SAC(_spec("continuous"), network=TINY, policy_period=policy_period)
    reference = optax.scale_by_adam(eps=agent.adam_epsilon)
    params = experience.zeros(agent).params
    state, chain = agent._optimizer.chain.init(params), agent._optimizer.chain
    expected_states = [reference.init(part) for part in params]
    state, expected_states = jax.tree.map(
        lambda x: x + earlier if x.dtype == jnp.int32 else x, (state, expected_states)
    )
    update, other = jax.jit(chain.update), jax.jit(reference.update)
    for step in range(5):
        gradient = optax.tree.full_like(params, 1.0 + step * step)
        updates, state = jax.device_get(update(gradient, state, params))
        for index, (part, update_of_part) in enumerate(zip(gradient, updates, strict=True)):
            expected = jax.tree.map(jnp.zeros_like, part)
            if index == 1 or step % policy_period == 0:
                expected, expected_states[index] = other(part, expected_states[index])
            streams.assert_close(update_of_part, expected, rtol=1e-6)


@pytest.mark.parametrize("policy_period", [1, 2])
def test_weights_decay_and_the_temperature_does_not(policy_period):
    options = {"weight_decay": 0.1, "learning_rate": 0.5, "policy_period": policy_period}
    agent = sac.SAC(_spec("continuous"), network=TINY, **options)
    zeros = experience.zeros(agent).params
    params, chain = jax.tree.map(jnp.ones_like, zeros), agent._optimizer.chain
    updates, _ = streams.evaluate(chain.update, zeros, chain.init(params), params)
    for leaf in jax.tree.leaves((updates.policy, updates.critic)):
        np.testing.assert_allclose(leaf, 0.1)
    assert updates.log_temperature == 0.0


class _Pixel(nn.Module):
    """An encoder that returns the number of a pixel, in the last two frames."""

    def __call__(self, observation):
        return observation["observation"][:, 4, 4].astype(jnp.float32)


class _Echo(nn.Module):
    """A core that returns its inputs."""

    def initial_state(self, batch_size):
        return jnp.zeros((batch_size, 1))

    def __call__(self, state, features, first):
        return features, state


@pytest.mark.parametrize("recurrent", [False, True])
def test_stacks_are_shifted_as_one_and_time_steps_separately_unless_recurrent(recurrent):
    number = np.arange(64, dtype=np.uint8).reshape(8, 8, 1)
    frames = np.stack([np.tile(number + 64 * time, (BATCH, 1, 1, 1)) for time in range(3)])
    shape = (3, BATCH)
    timestep = types.TimeStep(frames, np.zeros(shape), np.ones(shape), np.ones(shape, np.int8))
    keys = jax.random.split(jax.random.key(0), BATCH)
    image = specs.BoundedArray((8, 8, 1), np.uint8, 0, 255)
    spec = environment.EnvironmentSpec("Images", image, specs.DiscreteArray(2))
    options = {"encoder": encoders.CNN((2,), hidden_sizes=())}
    state, lengths = (), {}
    if recurrent:
        options, lengths = {"encoder": _Pixel(), "core": _Echo()}, {"sequence_length": 2}
    network = functools.partial(sac_networks.sac_network, frame_stack=2, **options)
    agent = sac.SAC(spec, network=network, random_shift=2, **lengths)
    if recurrent:  # the frame before the first one
        core = agent.net.initial_core(BATCH)
        earlier = {"observation": frames[0][:, None] - 64}
        core = core._replace(frames=core.frames | earlier)
        state = inputs.ActorState(core, np.zeros(BATCH, np.int32))
    rollout = types.Rollout(timestep, np.zeros((2, BATCH), np.int32), (), state)
    sample = replay.Sample(rollout, None, np.ones(BATCH), keys)
    find = functools.partial(agent._observations, {}, shift_keys=jnp.stack([keys, keys[::-1]]))
    shifts = np.asarray(jax.jit(find)(sample))  # [U + 1, N, ...]
    shown = (shifts if recurrent else shifts[:, :, 4, 4]).astype(int)  # [U + 1, N, 2]
    time = np.arange(len(shown))[:, None] + [-1, 0]  # of both frames of a stack
    numbers = (shown - 64 * (time[:, None] + (0 if recurrent else 1))) % 256
    assert set(numbers.ravel()) <= {
        8 * row + column for row in range(2, 7) for column in range(2, 7)
    }
    np.testing.assert_array_equal(numbers[..., 0], numbers[..., 1])
    assert np.any(numbers[0] != numbers[1]) != recurrent
    assert len(np.unique(numbers[0])) > 2
