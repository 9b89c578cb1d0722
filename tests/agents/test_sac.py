"""SAC's losses and gradients against slow ones, its actions, and replayed images.

Axis legend: `N` transitions, `D` components of an action, `A` actions.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from agents import optimization, replay, sac
from agents.networks import encoders
from agents.networks import sac as sac_networks
from podracers import agent as agent_lib
from podracers import environment, types
from tests import streams

BATCH = 6
GAMMA, TEMPERATURE = 0.9, 0.5
LOW, HIGH = np.array([-1.0, 1.0]), np.array([0.5, 3.0])


class _Case(NamedTuple):
    """An agent whose targets differ from its critics, and its data in NumPy."""

    agent: sac.SAC
    params: sac_networks.Params
    target: Any
    sample: replay.Sample


def _spec(actions: str) -> environment.EnvironmentSpec:
    spec = streams.RandomEpisodes(actions=actions, masked=actions == "discrete").spec
    if actions == "continuous":
        bounds = specs.BoundedArray((2,), np.float32, LOW.astype("f"), HIGH.astype("f"))
        return environment.EnvironmentSpec(spec.name, spec.observation, bounds)
    return spec


def _timestep(rng, length: int, masked: bool) -> types.TimeStep:
    """Returns `[length, N]`: within episodes, into both kinds of endings, and out of LAST."""
    shape = (length, BATCH)
    step_type = np.ones(shape, np.int8)
    discount = np.ones(shape, np.float32)
    step_type[-1, 0] = step_type[-1, 1] = types.LAST
    discount[-1, 1] = 0.0
    step_type[-2, 2], step_type[-1, 2] = types.LAST, types.FIRST  # its action was ignored
    step_type[-2, 3] = types.FIRST
    observation = rng.normal(size=(*shape, 3)).astype(np.float32)
    if masked:
        mask = np.arange(3) != rng.integers(0, 4, shape)[..., None]  # with 3, all are legal
        observation = {"features": observation, environment.ACTION_MASK: mask}
    reward = rng.normal(size=shape).astype(np.float32)
    return types.TimeStep(observation, reward, discount, step_type)


def _repeated(count: int) -> types.TimeStep:
    """Returns `[count]` equal first time steps."""
    return jax.tree.map(
        lambda x: jnp.tile(x, (count, *[1] * x.ndim)), types.restart(jnp.zeros((3,)))
    )


def _learner(agent: sac.SAC) -> optimization.ReplayLearner:
    """Returns a learner of zeros: to compile orthogonal matrices takes seconds."""
    shapes = jax.eval_shape(agent.init_learner, jax.random.key(0))
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _random(tree: Any, scale: float, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.normal(0.0, scale, x.shape).astype(np.float32), tree)


@functools.cache
def _case(actions: str) -> _Case:
    """Discrete actions are seen through an encoder and a stack of two frames."""
    encoder = encoders.MLP((5,)) if actions == "discrete" else None
    network = functools.partial(
        sac_networks.sac_network,
        hidden_sizes=(4, 4),
        encoder=encoder,
        frame_stack=2 if encoder is not None else 1,
    )
    agent = sac.SAC(_spec(actions), gamma=GAMMA, network=network, initial_temperature=TEMPERATURE)
    params = _random(_learner(agent).params, 0.5, seed=1)
    params = params._replace(log_temperature=np.float32(np.log(TEMPERATURE)))
    target = _random(params.critic, 0.5, seed=4)
    rng = np.random.default_rng(2)
    length = agent._network.memory_length + 2
    if actions == "discrete":
        action = rng.integers(0, 3, (length - 1, BATCH)).astype(np.int32)
    else:
        action = rng.uniform(LOW, HIGH, (length - 1, BATCH, 2)).astype(np.float32)
    rollout = types.Rollout(_timestep(rng, length, actions == "discrete"), action, (), ())
    weight = rng.uniform(0.5, 1.0, BATCH).astype(np.float32)
    keys = jax.random.split(jax.random.key(3), BATCH)
    sample = replay.Sample(rollout, replay.Item(jnp.zeros(BATCH), jnp.zeros(BATCH)), weight, keys)
    return _Case(agent, params, target, sample)


@functools.cache
def _learnt(actions: str) -> tuple[optimization.LossOutput, sac_networks.Params]:
    """Returns the output of the loss on a case, and its gradient."""
    agent, params, target, sample = _case(actions)

    def loss(params):
        learnt = agent._loss(params, sample, target)
        return learnt.metrics["loss/total"].result(), learnt

    gradient, learnt = jax.jit(jax.grad(loss, has_aux=True))(params)
    return jax.device_get(learnt), jax.device_get(gradient)


def _dense(params, x):
    return x @ np.asarray(params["kernel"], np.float64) + np.asarray(params["bias"], np.float64)


def _mlp(params, x, activation):
    for index in range(len(params)):
        x = activation(_dense(params[f"Dense_{index}"], x))
    return x


_RECTIFY = functools.partial(np.maximum, 0.0)


class _Slow:
    """The losses of one transition after another, in double precision."""

    def __init__(self, actions: str):
        self.case = _case(actions)
        self.discrete = actions == "discrete"
        keys = jax.vmap(jax.random.split)(self.case.sample.key)
        draw = jax.vmap(jax.vmap(lambda key: jax.random.normal(key, (2,))))
        self.noise = np.asarray(draw(keys))  # [N, 2, D] at a transition's start and at its end
        observation = self.case.sample.rollout.timestep.observation
        self.frames = observation["features"] if self.discrete else observation
        self.mask = observation[environment.ACTION_MASK] if self.discrete else None

    def seen(self, n, arrival):
        """Returns the encoder's input at a transition's start or end."""
        if not self.discrete:
            return self.frames[arrival, n].astype(np.float64)
        first = self.case.sample.rollout.timestep.first()[1 + arrival, n]
        before = self.frames[1 + arrival - (0 if first else 1), n]
        return np.concatenate([before, self.frames[1 + arrival, n]]).astype(np.float64)

    def encode(self, critic, seen):
        return _mlp(critic["encoder"], seen, np.tanh) if self.discrete else seen

    def values(self, critic, seen, action=()):
        features = np.concatenate([self.encode(critic, seen), action])
        return [
            _dense(critic[f"heads_{i}"], _mlp(critic[f"bodies_{i}"], features, _RECTIFY))
            for i in range(2)
        ]

    def expect(self, policy, encoder, critic, n, arrival):
        """Returns the expected value and the entropy; `encoder` is whose features it reads."""
        seen = self.seen(n, arrival)
        hidden = _mlp(policy["MLP_0"], self.encode(encoder, seen), _RECTIFY)
        outputs = _dense(policy["Dense_0"], hidden)
        if self.discrete:
            worse = np.minimum(*self.values(critic, seen))
            legal = [a for a in range(3) if self.mask[1 + arrival, n, a]]
            total = sum(np.exp(outputs[a]) for a in legal)
            policy = {a: np.exp(outputs[a]) / total for a in legal}
            entropy = -sum(p * np.log(p) for p in policy.values())
            return sum(policy[a] * worse[a] for a in legal), entropy
        mean, std = outputs[:2], np.exp(outputs[2:])
        noise = np.asarray(self.noise[n, int(arrival)], np.float64)
        raw = mean + std * noise
        action = np.tanh(raw)
        log_prob = -0.5 * noise**2 - np.log(std) - 0.5 * np.log(2.0 * np.pi)
        log_prob = np.sum(log_prob - np.log(1.0 - action**2))
        return min(v[0] for v in self.values(critic, seen, action)), -log_prob

    def target(self, n):
        _, params, target, sample = self.case
        timestep = sample.rollout.timestep
        value, entropy = self.expect(params.policy, params.critic, target, n, arrival=1)
        soft = value + TEMPERATURE * entropy
        return timestep.reward[-1, n] + GAMMA * timestep.discount[-1, n] * soft

    def taken(self, critic, n):
        action = self.case.sample.rollout.action[-1, n]
        if self.discrete:
            return [values[action] for values in self.values(critic, self.seen(n, 0))]
        portion = (action - LOW) / (HIGH - LOW) * 2.0 - 1.0
        return [values[0] for values in self.values(critic, self.seen(n, 0), portion)]

    def critic_loss(self, critic, n):
        return sum(0.5 * (taken - self.target(n)) ** 2 for taken in self.taken(critic, n))

    def policy_loss(self, policy, n):
        critic = self.case.params.critic
        value, entropy = self.expect(policy, critic, critic, n, arrival=0)
        return -value - TEMPERATURE * entropy

    def temperature_loss(self, log_temperature, n):
        _, params, _, _ = self.case
        _, entropy = self.expect(params.policy, params.critic, params.critic, n, arrival=0)
        target_entropy = 0.98 * np.log(self.mask[1, n].sum()) if self.discrete else -2.0
        return np.exp(log_temperature) * (entropy - target_entropy)

    def mean(self, loss, subject, weighted=True):
        """Returns the mean over all transitions but that out of LAST."""
        kept = [n for n in range(BATCH) if n != 2]
        weight = self.case.sample.weight if weighted else np.ones(BATCH)
        return sum(float(weight[n]) * loss(subject, n) for n in kept) / len(kept)


KINDS = pytest.mark.parametrize("actions", ["continuous", "discrete"])


@KINDS
def test_losses_equal_slow_ones(actions):
    slow, (learnt, _) = _Slow(actions), _learnt(actions)
    params = slow.case.params
    parts = (
        (slow.critic_loss, params.critic),
        (slow.policy_loss, params.policy),
        (slow.temperature_loss, params.log_temperature),
    )
    expected = {
        "loss/total": sum(slow.mean(*part) for part in parts),
        "loss/critic": slow.mean(*parts[0], weighted=False),
        "loss/policy": slow.mean(*parts[1], weighted=False),
        "value/target": slow.mean(lambda _, n: slow.target(n), None, weighted=False),
        "value/mean": slow.mean(
            lambda critic, n: np.mean(slow.taken(critic, n)), params.critic, weighted=False
        ),
        "policy/temperature": TEMPERATURE,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(learnt.metrics[name].result(), value, rtol=1e-4, err_msg=name)
    priority = [
        np.mean(np.abs(np.array(slow.taken(params.critic, n)) - slow.target(n)))
        for n in range(BATCH)
    ]
    np.testing.assert_allclose(
        learnt.priority, np.where(np.arange(BATCH) == 2, -1.0, priority), rtol=1e-4
    )


@KINDS
@pytest.mark.parametrize("part", ["policy", "critic", "log_temperature"])
def test_each_part_learns_from_its_own_loss_alone(actions, part):
    """Derivatives along random directions; the encoder is a part of the critics."""
    slow, (_, gradient) = _Slow(actions), _learnt(actions)
    loss = {
        "policy": slow.policy_loss,
        "critic": slow.critic_loss,
        "log_temperature": slow.temperature_loss,
    }[part]
    subject = jax.tree.map(lambda x: np.asarray(x, np.float64), getattr(slow.case.params, part))
    rng = np.random.default_rng(5)
    for _ in range(3):
        direction = jax.tree.map(lambda x: rng.normal(size=x.shape), subject)
        ends = [
            slow.mean(loss, jax.tree.map(lambda x, d: x + step * d, subject, direction))  # noqa: B023
            for step in (1e-6, -1e-6)
        ]
        products = jax.tree.map(lambda g, d: np.sum(g * d), getattr(gradient, part), direction)
        expected = (ends[0] - ends[1]) / 2e-6
        np.testing.assert_allclose(sum(jax.tree.leaves(products)), expected, rtol=1e-3, atol=1e-5)


def test_entropy_and_its_gradient_near_the_bounds():
    """In double precision, by a formula without cancellation: 1 - tanh(x)^2 = cosh(x)^-2."""
    key = jax.random.key(0)
    noise, std = np.asarray(jax.random.normal(key, (2,)), np.float64), np.exp([-1.0, 0.5])
    kind = sac_networks.head_from_spec(_spec("continuous"))

    def entropy(outputs):
        zero = jnp.zeros((2, 1, 1))
        return kind.expect(outputs, None, key[None], lambda _: zero).entropy[0]

    estimate = jax.jit(jax.value_and_grad(entropy))
    for mean in (-12.0, 0.3, 7.0, 12.0):
        value, gradient = estimate(jnp.array([[mean, -mean, -1.0, 0.5]]))
        raw = np.array([mean, -mean]) + std * noise
        density = -0.5 * noise**2 - np.log(std) - 0.5 * np.log(2.0 * np.pi)
        np.testing.assert_allclose(value, -np.sum(density + 2.0 * np.log(np.cosh(raw))), rtol=1e-5)
        expected = [-2.0 * np.tanh(raw), 1.0 - 2.0 * np.tanh(raw) * std * noise]
        np.testing.assert_allclose(gradient[0], np.ravel(expected), rtol=1e-4, atol=1e-5)


def test_continuous_actions_keep_their_bounds_and_their_units():
    kind = sac_networks.head_from_spec(_spec("continuous"))
    keys = jax.random.split(jax.random.key(0), 1000)
    outputs = jnp.tile(jnp.array([0.5, -9.0, 3.0, 3.0]), (1000, 1))
    for action in (kind.act(outputs, None, keys, mode=False), kind.random(None, keys)):
        assert np.all((action >= LOW) & (action <= HIGH))
        np.testing.assert_allclose(action.min(axis=0), LOW, atol=0.02)
        np.testing.assert_allclose(action.max(axis=0), HIGH, atol=0.02)
    np.testing.assert_allclose(kind.random(None, keys).mean(axis=0), (LOW + HIGH) / 2, atol=0.1)
    mode = kind.act(outputs[:1], None, keys[:1], mode=True)
    np.testing.assert_allclose(mode[0], [-1.0 + 0.75 * (np.tanh(0.5) + 1.0), 1.0], rtol=1e-5)
    np.testing.assert_allclose(kind.to_critics(mode)[0], [np.tanh(0.5), -1.0], atol=1e-6)


def test_discrete_actions_are_legal():
    kind = sac_networks.head_from_spec(_spec("discrete"))
    keys = jax.random.split(jax.random.key(0), 300)
    mask = jnp.tile(jnp.array([True, False, True]), (300, 1))
    outputs = jnp.tile(jnp.array([0.0, 9.0, 1.0]), (300, 1))
    random = np.asarray(kind.random(mask, keys))
    assert set(random) == {0, 2} and 110 < np.sum(random == 0) < 190
    assert set(np.asarray(kind.act(outputs, mask, keys, mode=False))) == {0, 2}
    assert set(np.asarray(kind.act(outputs, mask, keys, mode=True))) == {2}


def test_the_target_entropy_follows_the_mask():
    mask = jnp.array([[1, 1, 1, 1], [1, 0, 0, 1], [0, 0, 0, 0]], bool)
    expected = 0.5 * np.log([4.0, 2.0, 4.0])  # if no action is legal, all four are
    actual = sac_networks.Discrete(4).target_entropy(0.5, mask)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_actions_are_random_until_random_steps():
    network = functools.partial(sac_networks.sac_network, hidden_sizes=(4,))
    agent = sac.SAC(_spec("continuous"), network=network, random_steps=100)
    learner = _learner(agent)
    keys = jax.random.split(jax.random.key(1), 500)
    act = jax.jit(agent.act, static_argnames="evaluation")

    def spread(steps, evaluation=False):
        params = agent.actor_params(learner._replace(agent_steps=jnp.int32(steps)))
        # A policy with a small deviation.
        params.policy["Dense_0"]["bias"] = jnp.array([0.0, 0.0, -5.0, -5.0])
        action, _, _ = act(params, (), _repeated(500), keys, evaluation)
        return np.ptp(action, axis=0)

    np.testing.assert_allclose(spread(99), HIGH - LOW, atol=0.1)
    assert np.all(spread(100) < 0.1)
    assert np.all(spread(0, evaluation=True) == 0.0)


@pytest.mark.parametrize(
    ("actions", "option", "greedy"),
    [("continuous", None, True), ("discrete", None, False), ("discrete", True, True)],
)
def test_evaluations_are_greedy_by_option_and_for_continuous_actions(actions, option, greedy):
    network = functools.partial(sac_networks.sac_network, hidden_sizes=(4,))
    agent = sac.SAC(_spec(actions), network=network, greedy_evaluation=option)
    assert agent.greedy_evaluation is greedy
    assert (agent_lib.greedy(agent) is None) is greedy
    keys = jax.random.split(jax.random.key(1), 50)
    params = agent.actor_params(_learner(agent))
    act = jax.jit(agent.act, static_argnums=4)
    sampled, evaluated = (act(params, (), _repeated(50), keys, mode)[0] for mode in (False, True))
    assert len(np.unique(sampled, axis=0)) > 1
    if greedy:
        assert len(np.unique(evaluated, axis=0)) == 1
    else:
        np.testing.assert_array_equal(evaluated, sampled)


def test_weights_decay_and_the_temperature_does_not():
    network = functools.partial(sac_networks.sac_network, hidden_sizes=(4,))
    agent = sac.SAC(_spec("continuous"), network=network, weight_decay=0.1, learning_rate=0.5)
    params = jax.tree.map(jnp.ones_like, _learner(agent).params)
    chain = agent._optimizer.chain
    updates, _ = chain.update(jax.tree.map(jnp.zeros_like, params), chain.init(params), params)
    for leaf in jax.tree.leaves((updates.policy, updates.critic)):
        np.testing.assert_allclose(leaf, 0.1)
    assert updates.log_temperature == 0.0


def test_both_time_steps_are_shifted_separately_and_stacks_as_one():
    frames = np.random.default_rng(0).integers(0, 256, (3, BATCH, 8, 8, 1), np.uint8)
    timestep = _timestep(np.random.default_rng(1), 3, masked=False)
    timestep = timestep._replace(observation=frames, step_type=np.ones((3, BATCH), np.int8))
    keys = jax.random.split(jax.random.key(0), BATCH)
    rollout = types.Rollout(timestep, np.zeros((2, BATCH), np.int32), (), ())
    sample = replay.Sample(rollout, None, np.ones(BATCH), keys)
    shifts = []
    image = specs.BoundedArray((8, 8, 1), np.uint8, 0, 255)
    spec = environment.EnvironmentSpec("Images", image, specs.DiscreteArray(2))
    encoder = encoders.CNN((2,), hidden_sizes=())
    network = functools.partial(sac_networks.sac_network, encoder=encoder, frame_stack=2)
    agent = sac.SAC(spec, network=network, random_shift=2)
    for found in jax.jit(agent._policy_inputs)(timestep, sample):
        assert found.observation.shape == (BATCH, 8, 8, 2)
        shifts.append([])
        time = len(shifts)
        for n, image in enumerate(np.asarray(found.observation)):
            stack = np.concatenate([frames[time - 1, n], frames[time, n]], axis=-1)
            padded = np.pad(stack, ((2, 2), (2, 2), (0, 0)), mode="edge")
            shifts[-1] += [
                (n, top, left)
                for top in range(5)
                for left in range(5)
                if np.array_equal(padded[top : top + 8, left : left + 8], image)
            ]
    assert [len(each) for each in shifts] == [BATCH, BATCH]  # exactly one cut of each stack fits
    assert shifts[0] != shifts[1]
