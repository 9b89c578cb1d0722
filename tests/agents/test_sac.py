"""SAC's losses and gradients against slow ones, and its policies near their bounds.

Axis legend: `N` transitions, `D` components of an action, `A` actions.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from agents import optimization, preprocessing, replay, sac
from agents.networks import encoders, sac_heads
from agents.networks import sac as sac_networks
from podracers import agent as agent_lib
from podracers import environment, errors, types
from tests import streams

BATCH = 6
GAMMA, TEMPERATURE = 0.9, 0.5
LOW, HIGH = np.array([-1.0, 1.0]), np.array([0.5, 3.0])


class _Case(NamedTuple):
    """An agent whose targets differ from its critics, and what it is to learn from, in NumPy."""

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
    """Returns `[length, N]`: from within episodes and into truncations, terminations, and FIRST."""
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
    """Returns what the agent makes of a case, and the gradient of its loss."""
    agent, params, target, sample = _case(actions)

    def loss(params):
        learnt = agent._loss(params, sample, target)
        return learnt.metrics["loss/total"].result(), learnt

    gradient, learnt = jax.jit(jax.grad(loss, has_aux=True))(params)
    return jax.device_get(learnt), jax.device_get(gradient)


@jax.jit
def _noise(keys):
    """Returns standard normal numbers, `[N, 2, D]`: at a transition's start and at its end."""
    keys = jax.vmap(jax.random.split)(keys)
    return jax.vmap(jax.vmap(lambda key: jax.random.normal(key, (2,))))(keys)


def _dense(params, x):
    return x @ np.asarray(params["kernel"], np.float64) + np.asarray(params["bias"], np.float64)


def _mlp(params, x, activation):
    for index in range(len(params)):
        x = activation(_dense(params[f"Dense_{index}"], x))
    return x


def _rectify(x):
    return np.maximum(x, 0.0)


class _Slow:
    """The losses of one transition after another, in double precision."""

    def __init__(self, actions: str):
        self.case = _case(actions)
        self.discrete = actions == "discrete"
        self.noise = np.asarray(_noise(self.case.sample.key))
        observation = self.case.sample.rollout.timestep.observation
        self.frames = observation["features"] if self.discrete else observation
        self.mask = observation[environment.ACTION_MASK] if self.discrete else None

    def seen(self, n, arrival):
        """Returns what encoders see of a transition's start or of its end."""
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
            _dense(critic[f"heads_{i}"], _mlp(critic[f"bodies_{i}"], features, _rectify))
            for i in range(2)
        ]

    def expect(self, policy, encoder, critic, n, arrival):
        """Returns the expected value and the entropy; `encoder` is whose features it reads."""
        seen = self.seen(n, arrival)
        hidden = _mlp(policy["MLP_0"], self.encode(encoder, seen), _rectify)
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

    def goal(self, n):
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
        return sum(0.5 * (taken - self.goal(n)) ** 2 for taken in self.taken(critic, n))

    def policy_loss(self, policy, n):
        critic = self.case.params.critic
        value, entropy = self.expect(policy, critic, critic, n, arrival=0)
        return -value - TEMPERATURE * entropy

    def temperature_loss(self, log_temperature, n):
        _, params, _, _ = self.case
        _, entropy = self.expect(params.policy, params.critic, params.critic, n, arrival=0)
        wanted = 0.98 * np.log(self.mask[1, n].sum()) if self.discrete else -2.0
        return np.exp(log_temperature) * (entropy - wanted)

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
        "value/target": slow.mean(lambda _, n: slow.goal(n), None, weighted=False),
        "value/mean": slow.mean(
            lambda critic, n: np.mean(slow.taken(critic, n)), params.critic, weighted=False
        ),
        "policy/temperature": TEMPERATURE,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(learnt.metrics[name].result(), value, rtol=1e-4, err_msg=name)
    priority = [
        np.mean(np.abs(np.array(slow.taken(params.critic, n)) - slow.goal(n))) for n in range(BATCH)
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


@jax.jit
def _entropy(outputs, keys):
    """Returns the estimate of the entropy of the first row, and its gradient."""
    kind = sac_heads.head_from_spec(_spec("continuous"))

    def entropy(outputs):
        zero = jnp.zeros((2, 1, 1))
        return kind.expect(outputs, None, keys, lambda _: zero).entropy[0]

    return jax.value_and_grad(entropy)(outputs)


@pytest.mark.parametrize("mean", [-12.0, 0.3, 7.0, 12.0])
def test_entropy_and_its_gradient_near_the_bounds(mean):
    """In double precision, and by a formula that does not cancel: 1 - tanh(x)^2 = cosh(x)^-2."""
    keys = jax.random.split(jax.random.key(0), 1)
    value, gradient = _entropy(jnp.array([[mean, -mean, -1.0, 0.5]]), keys)
    noise = np.asarray(jax.random.normal(keys[0], (2,)), np.float64)
    std = np.exp([-1.0, 0.5])
    raw = np.array([mean, -mean]) + std * noise
    density = -0.5 * noise**2 - np.log(std) - 0.5 * np.log(2.0 * np.pi)
    np.testing.assert_allclose(value, -np.sum(density + 2.0 * np.log(np.cosh(raw))), rtol=1e-5)
    expected = np.concatenate([-2.0 * np.tanh(raw), 1.0 - 2.0 * np.tanh(raw) * std * noise])
    np.testing.assert_allclose(gradient[0], expected, rtol=1e-4, atol=1e-5)


def test_continuous_actions_keep_their_bounds_and_their_units():
    kind = sac_heads.head_from_spec(_spec("continuous"))
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
    kind = sac_heads.head_from_spec(_spec("discrete"))
    keys = jax.random.split(jax.random.key(0), 300)
    mask = jnp.tile(jnp.array([True, False, True]), (300, 1))
    outputs = jnp.tile(jnp.array([0.0, 9.0, 1.0]), (300, 1))
    random = np.asarray(kind.random(mask, keys))
    assert set(random) == {0, 2} and 110 < np.sum(random == 0) < 190
    assert set(np.asarray(kind.act(outputs, mask, keys, mode=False))) == {0, 2}
    assert set(np.asarray(kind.act(outputs, mask, keys, mode=True))) == {2}


def test_the_target_entropy_follows_the_mask():
    kind = sac_heads.Discrete(4)
    mask = jnp.array([[1, 1, 1, 1], [1, 0, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]], bool)
    expected = 0.5 * np.log([4.0, 2.0, 1.0, 4.0])  # where nothing is legal, all four are
    np.testing.assert_allclose(kind.target_entropy(0.5, mask), expected, rtol=1e-6)
    np.testing.assert_allclose(kind.target_entropy(0.5, None), expected[0])


def test_actions_are_random_until_random_steps():
    network = functools.partial(sac_networks.sac_network, hidden_sizes=(4,))
    agent = sac.SAC(_spec("continuous"), network=network, random_steps=100)
    learner = _learner(agent)
    timestep = types.restart(jnp.zeros((3,)))
    timestep = jax.tree.map(lambda x: jnp.tile(x, (500, *[1] * x.ndim)), timestep)
    keys = jax.random.split(jax.random.key(1), 500)

    act = jax.jit(agent.act, static_argnames="evaluation")

    def spread(steps, evaluation=False):
        params = agent.actor_params(learner._replace(agent_steps=jnp.int32(steps)))
        # A policy that is sure of what it does.
        params.policy["Dense_0"]["bias"] = jnp.array([0.0, 0.0, -5.0, -5.0])
        action, _, _ = act(params, (), timestep, keys, evaluation)
        return np.ptp(action, axis=0)

    np.testing.assert_allclose(spread(99), HIGH - LOW, atol=0.1)
    assert np.all(spread(100) < 0.1)
    assert np.all(spread(0, evaluation=True) == 0.0)


@pytest.mark.parametrize("actions", ["continuous", "discrete"])
@pytest.mark.parametrize("option", [None, True, False])
def test_evaluations_of_continuous_actions_are_greedy_and_of_discrete_ones_sampled(actions, option):
    """By default; the option decides for either kind."""
    network = functools.partial(sac_networks.sac_network, hidden_sizes=(4,))
    agent = sac.SAC(_spec(actions), network=network, greedy_evaluation=option)
    greedy = actions == "continuous" if option is None else option
    assert agent.greedy_evaluation is greedy
    assert (agent_lib.greedy(agent) is None) is greedy
    timestep = jax.tree.map(
        lambda x: jnp.tile(x, (50, *[1] * x.ndim)), types.restart(jnp.zeros((3,)))
    )
    keys = jax.random.split(jax.random.key(1), 50)
    params = agent.actor_params(_learner(agent))
    act = jax.jit(agent.act, static_argnums=4)
    sampled, evaluated = (act(params, (), timestep, keys, mode)[0] for mode in (False, True))
    assert len(np.unique(sampled, axis=0)) > 1
    if greedy:
        assert len(np.unique(evaluated, axis=0)) == 1
    else:
        np.testing.assert_array_equal(evaluated, sampled)


def test_layers_of_the_policy_and_of_both_critics_may_be_normalised():
    network = functools.partial(sac_networks.sac_network, hidden_sizes=(4,), layer_norm=True)
    agent = sac.SAC(_spec("continuous"), network=network)
    params = jax.eval_shape(agent.init_learner, jax.random.key(0)).params
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(params)]
    normalised = [path for path in paths if "LayerNorm" in path and "scale" in path]
    assert [path.split("[")[0] for path in normalised] == [".policy", ".critic", ".critic"]


def test_bodies_may_be_of_another_kind_and_there_may_be_one_critic():
    """Its value is the expected one: there is nothing to take the lower of."""
    network = functools.partial(
        sac_networks.sac_network,
        policy_body=encoders.SimBa(4, 1),
        critic_body=encoders.SimBa(6, 2),
        num_critics=1,
    )
    agent = sac.SAC(_spec("continuous"), network=network)
    params = _random(_learner(agent).params, 0.5, seed=1)
    assert params.policy["SimBa_0"]["Dense_0"]["kernel"].shape == (3, 4)
    assert params.critic.keys() == {"bodies_0", "heads_0"}
    assert params.critic["bodies_0"]["Dense_3"]["kernel"].shape == (6, 24)
    features, action = jnp.ones((2, 3)), jnp.zeros((2, 2))
    values = agent._network.values(params.critic, features, action)
    assert values.shape == (1, 2, 1)
    keys = jax.random.split(jax.random.key(1), 2)
    outputs = agent._network.outputs(params.policy, features)

    def critics(action):
        return agent._network.values(params.critic, features, action)

    found = agent._kind.expect(outputs, None, keys, critics)
    raw = agent._kind._head.sample(outputs, None, keys)
    np.testing.assert_allclose(found.value, critics(jnp.tanh(raw))[0, :, 0], rtol=1e-5)
    with pytest.raises(errors.UserError, match="num_critics: expected a positive int, got 0"):
        sac_networks.sac_network(_spec("continuous"), agent._kind, num_critics=0)


def test_weights_decay_and_the_temperature_does_not():
    agent = sac.SAC(_spec("continuous"), weight_decay=0.1, learning_rate=0.5)
    params = jax.tree.map(jnp.ones_like, _learner(agent).params)
    chain = agent._optimizer.chain
    updates, _ = chain.update(jax.tree.map(jnp.zeros_like, params), chain.init(params), params)
    for leaf in jax.tree.leaves((updates.policy, updates.critic)):
        np.testing.assert_allclose(leaf, 0.1)
    assert updates.log_temperature == 0.0


def test_images_are_encoded_once_for_all():
    """Bytes stay bytes, and what acting needs of the critics is their encoder."""
    spec = environment.EnvironmentSpec(
        "Images", specs.Array((8, 8, 1), np.uint8), specs.DiscreteArray(2)
    )
    encoder = encoders.CNN((2,), hidden_sizes=(4,))
    network = functools.partial(
        sac_networks.sac_network, hidden_sizes=(4,), encoder=encoder, frame_stack=3
    )
    agent = sac.SAC(spec, network=network, normalize_observations=True)
    params = agent.actor_params(_learner(agent))
    assert set(params.encoder) == {"encoder"}
    kernel = params.encoder["encoder"]["_Convolutions_0"]["Conv_0"]["kernel"]
    assert kernel.shape == (3, 3, 3, 2)
    assert isinstance(params.normalizer, preprocessing.Statistics)
    state = agent.init_actor(jnp.arange(4), 4)
    assert state.frames.dtype == jnp.uint8
    timestep = types.restart(jnp.ones((8, 8, 1), jnp.uint8))
    timestep = jax.tree.map(lambda x: jnp.tile(x, (4, *[1] * x.ndim)), timestep)
    keys = jax.random.split(jax.random.key(1), 4)
    action, state, _ = jax.jit(agent.act)(params, state, timestep, keys)
    assert action.shape == (4,) and np.all(state.frames == 1)


def _pixel_agent(**options) -> sac.SAC:
    """Returns an agent of two actions that sees a stack of two images."""
    image = specs.BoundedArray((8, 8, 1), np.uint8, 0, 255)
    spec = environment.EnvironmentSpec("Images", image, specs.DiscreteArray(2))
    network = functools.partial(
        sac_networks.sac_network,
        hidden_sizes=(4,),
        encoder=encoders.CNN((2,), hidden_sizes=()),
        trunk_size=3,
        frame_stack=2,
    )
    return sac.SAC(spec, network=network, **options)


def test_both_time_steps_of_a_transition_are_shifted_apart_and_stacks_as_one():
    frames = np.random.default_rng(0).integers(0, 256, (3, BATCH, 8, 8, 1), np.uint8)
    timestep = _timestep(np.random.default_rng(1), 3, masked=False)
    timestep = timestep._replace(observation=frames, step_type=np.ones((3, BATCH), np.int8))
    keys = jax.random.split(jax.random.key(0), BATCH)
    rollout = types.Rollout(timestep, np.zeros((2, BATCH), np.int32), (), ())
    sample = replay.Sample(rollout, None, np.ones(BATCH), keys)
    shifts = []
    for found in _pixel_agent(random_shift=2)._policy_inputs(timestep, sample):
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


def test_each_has_a_trunk_and_convolutions_learn_from_critics_alone():
    agent = _pixel_agent()
    params = _random(_learner(agent).params, 0.5, seed=1)
    assert params.policy["trunk"].keys() == {"Dense_0", "LayerNorm_0"}
    assert params.critic["trunk"].keys() == params.policy["trunk"].keys()
    assert params.critic["bodies_0"]["Dense_0"]["kernel"].shape == (3, 4)
    images = np.random.default_rng(2).integers(0, 256, (BATCH, 8, 8, 2), np.uint8)
    features = agent._network.encode(params.critic, images)
    assert features.shape == (BATCH, 8 * 8 * 2)
    dense, norm = (params.policy["trunk"][name] for name in ("Dense_0", "LayerNorm_0"))
    hidden = _dense(dense, np.asarray(features, np.float64))
    hidden -= hidden.mean(axis=-1, keepdims=True)
    hidden /= np.sqrt(hidden.var(axis=-1, keepdims=True) + 1e-6)
    hidden = np.tanh(hidden * norm["scale"] + norm["bias"])
    expected = _dense(params.policy["Dense_0"], _mlp(params.policy["MLP_0"], hidden, _rectify))
    outputs = agent._network.outputs(params.policy, features)
    np.testing.assert_allclose(outputs, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("actions", "options", "message"),
    [
        ("multi_discrete", {}, "SAC needs continuous actions or one discrete .* use PPO or IMPALA"),
        ("continuous", {"target_entropy": 0.7}, "less than 0.693, .* got 0.7"),
        ("discrete", {"target_entropy": 1.0}, "less than 1, .* got 1.0"),
        ("discrete", {"random_steps": -1}, "random_steps: expected an int of at least 0, got -1"),
        ("discrete", {"initial_temperature": 0.0}, "initial_temperature: expected a positive"),
        ("discrete", {"random_shift": 1.5}, "random_shift: expected an int of at least 0, got 1.5"),
        ("discrete", {"random_shift": 4}, "random_shift: expected 0, because there is no image"),
        ("discrete", {"weight_decay": -0.1}, "weight_decay: expected 0 or more, got -0.1"),
        ("discrete", {"target_rate": 1.1}, r"target_rate: expected a number in \[0, 1\]"),
    ],
)
def test_what_cannot_work_is_refused(actions, options, message):
    with pytest.raises(errors.UserError, match=message):
        sac.SAC(_spec(actions), **options)
