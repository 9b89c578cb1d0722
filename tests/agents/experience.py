"""A rollout of random episodes, and the update that an agent makes of it.

Axis legend: `T` time, `B` streams.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agents import impala, ppo
from agents.networks import cores, encoders
from podracers import parallel, types, unroll
from tests import contract, streams

P = jax.sharding.PartitionSpec
LENGTH, BATCH = 6, 8
ENVIRONMENT = streams.RandomEpisodes()
NETWORKS = {
    "feed_forward": {"network": contract.tiny_network()},
    "lstm": {"network": contract.tiny_network(cores.LSTM(8))},
    "frames": {"network": contract.tiny_network(frame_stack=3)},
    "frames_normalized": {
        "network": contract.tiny_network(cores.GRU(8), frame_stack=3),
        "normalize_observations": True,
    },
}
_SHARED = {
    "learning_rate": 0.02,
    "anneal_steps": 10 * LENGTH * BATCH,
    "max_grad_norm": 0.1,  # small enough to bind
    "gamma": 0.9,
    "num_minibatches": 1,
    "entropy_cost": 0.1,
    "reward_scale": 0.5,
    "reward_clip": 1.0,
}
# Epsilons are large, so that no rounding of a tiny gradient is blown up.
ALGORITHMS = {
    "ppo": functools.partial(
        ppo.PPO, ENVIRONMENT.spec, **_SHARED, adam_epsilon=1e-2, gae_lambda=0.8, epochs=1
    ),
    "impala": functools.partial(
        impala.IMPALA, ENVIRONMENT.spec, **_SHARED, optimizer_epsilon=1e-2, vtrace_lambda=0.8
    ),
}


def random_episodes(seed: int, shape: tuple[int, int]) -> types.TimeStep:
    """Returns time steps `[T, B]` of short episodes, terminated or truncated, without observations.

    Streams begin anywhere in an episode.
    """
    rng = np.random.default_rng(seed)
    step_type = np.full(shape, types.MID, np.int8)
    previous = rng.choice([types.FIRST, types.MID, types.LAST], shape[1])
    for row in step_type:
        row[rng.random(shape[1]) < 0.3] = types.LAST
        row[previous == types.LAST] = types.FIRST
        previous = row
    terminated = (step_type == types.LAST) & (rng.random(shape) < 0.5)
    reward = rng.normal(size=shape) * (step_type != types.FIRST)
    discount = 1.0 - terminated
    return types.TimeStep((), reward.astype(np.float32), discount.astype(np.float32), step_type)


class Experience(NamedTuple):
    """An agent whose policy is far from uniform, and its second rollout; in NumPy."""

    agent: Any
    learner: Any
    rollout: types.Rollout


def moved(params: Any, scale: float, seed: int) -> Any:
    """Returns parameters that are moved by normal noise."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    noise = [scale * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys)]
    return jax.tree.map(jnp.add, params, jax.tree.unflatten(tree, noise))


def perturbed(learner: Any, scale: float, seed: int) -> Any:
    """Returns a learner with moved parameters."""
    params = moved(learner.params, scale, seed)
    return learner._replace(train_state=learner.train_state._replace(params=params))


@functools.cache
def collect(algorithm: str, network: str) -> Experience:
    """Returns the experience of an actor-critic that acted with its learner's parameters."""
    return acted(ALGORITHMS[algorithm](**NETWORKS[network]), ENVIRONMENT)


def acted(agent: Any, environment: streams.RandomEpisodes) -> Experience:
    """Returns the experience of an agent that acted with its learner's parameters."""
    batched = unroll.BatchedEnvironment(environment)

    def run():
        shapes = jax.eval_shape(agent.init_learner, jax.random.key(0))
        # Not `init_learner`: to compile orthogonal matrices takes seconds.
        learner = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        learner = perturbed(learner, 0.5, seed=1)
        env_id = jnp.arange(BATCH, dtype=jnp.int32)
        start = unroll.init(agent, batched, env_id, BATCH, jax.random.key(2))
        key = jax.random.key(3)

        def act(learner, start):
            params = agent.actor_params(learner)
            return unroll.unroll(agent, batched, params, start, key, LENGTH)

        middle, first = act(learner, start)
        # Acting normalises by statistics of earlier data.
        state, _ = agent.update(types.AgentState(learner, ()), first, key)
        learner = learner._replace(normalizer=state.learner.normalizer)
        return learner, act(learner, middle)[1]

    layout = parallel.make_mesh(jax.devices()[:1])
    mapped = jax.shard_map(run, mesh=layout, in_specs=(), out_specs=P(), check_vma=False)
    given = Experience(agent, *jax.device_get(jax.jit(mapped)()))
    timestep = given.rollout.timestep
    assert timestep.truncated()[1:-1].any() and timestep.terminated()[1:-1].any()
    assert not timestep.first()[0].all()
    return given


@functools.cache
def _compiled(agent: Any, num_devices: int):
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


def update(experience: Experience, num_devices: int = 1) -> tuple[Any, dict[str, float]]:
    """Returns the learner after one update, and the means of its metrics."""
    agent, learner, rollout = experience
    learner, means = _compiled(agent, num_devices)(learner, rollout)
    return learner, {name: float(mean.result()) for name, mean in means.items()}


def assert_update(given: Experience, expected: tuple[Any, dict[str, float]], num_devices: int):
    """Asserts that an update gives the expected parameters and metrics."""
    learner, means = update(given, num_devices)
    streams.assert_close(learner.params, expected[0], rtol=1e-3, atol=2e-5)
    for name, value in expected[1].items():
        np.testing.assert_allclose(means[name], value, rtol=1e-3, atol=1e-5, err_msg=name)


def outputs(network: Any, params: Any, rollout: types.Rollout, clip: float = 1.0) -> Any:
    """Returns a network's outputs `[T + 1, B, ...]`, from one step of it after another.

    Rewards are scaled by 0.5 and clipped where the network sees them.
    """
    core, action, *_ = rollout.actor_state
    step, results = jax.jit(network.step), []
    for time in range(len(rollout.timestep.reward)):
        timestep = jax.tree.map(lambda x: x[time], rollout.timestep)  # noqa: B023
        if network.is_recurrent:
            going = ~timestep.first()
            seen = {
                "observation": encoders.without_mask(timestep.observation),
                "previous_action": np.eye(3, dtype=np.float32)[action] * going[:, None],
                "previous_reward": np.clip(0.5 * timestep.reward, -clip, clip) * going,
            }
            timestep = timestep._replace(observation=seen)
            action = rollout.action[min(time, len(rollout.action) - 1)]
        output, core = step(params, core, timestep)
        results.append(output)
    return jax.tree.map(lambda *xs: jnp.stack(xs), *results)


def learnt_timestep(rollout: types.Rollout) -> types.TimeStep:
    """Returns the time steps with scaled and clipped rewards, for `agents.returns`."""
    reward = np.clip(0.5 * rollout.timestep.reward, -1.0, 1.0)
    return rollout.timestep._replace(reward=reward)


def clipped_gradient(loss, params: Any) -> tuple[float, Any, float]:
    """Returns the loss, its gradient scaled down to a norm of 0.1, and the norm before."""
    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    gradient = jax.device_get(gradient)
    norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(gradient)))
    assert norm > 0.2
    return float(value), jax.tree.map(lambda leaf: leaf * 0.1 / norm, gradient), norm
