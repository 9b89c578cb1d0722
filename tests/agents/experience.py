"""Time steps of random episodes, and rollouts that agents acted, in NumPy.

Axis legend: `T` time, `B` streams.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agents.networks import encoders
from podracers import parallel, types, unroll

P = jax.sharding.PartitionSpec
REPLICATED = P()


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


def with_exits(seed: int, timestep: types.TimeStep) -> types.TimeStep:
    """Returns time steps `[T, B]` in every other stream of which an agent may go out early."""
    rng, length = np.random.default_rng(seed), len(timestep.reward)
    active, discount = np.ones(timestep.reward.shape, bool), timestep.discount.copy()
    for row in range(0, active.shape[1], 2):
        for t in range(1, length):
            begins = timestep.step_type[t, row] == types.FIRST
            active[t, row] = begins or (active[t - 1, row] and rng.random() < 0.8)
            discount[t, row] *= active[t, row]
    return timestep._replace(observation={"active": active}, discount=discount)


def on_devices(function, num_devices=1, in_specs=(), out_specs=REPLICATED):
    """Returns the function, mapped over devices."""
    mesh = parallel.make_mesh(jax.devices()[:num_devices])
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def zeros(agent: Any) -> Any:
    """Returns a learner of zeros: to compile orthogonal matrices takes seconds."""
    shapes = jax.eval_shape(agent.init_learner, jax.random.key(0))
    return jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype)), shapes)


def moved(params: Any, scale: float, seed: int) -> Any:
    """Returns parameters that are moved by normal noise, which NumPy draws: nothing compiles."""
    rng = np.random.default_rng(seed)

    def move(x):
        noise = np.float32(scale) * rng.standard_normal(x.shape, np.float32)
        return (
            x + noise if isinstance(x, jax.core.Tracer) else jax.device_put(np.asarray(x) + noise)
        )

    return jax.tree.map(move, params)


def perturbed(learner: Any, scale: float, seed: int) -> Any:
    """Returns a learner with moved parameters."""
    params = moved(learner.params, scale, seed)
    return learner._replace(train_state=learner.train_state._replace(params=params))


def value_and_gradient(function: Any, *inputs: Any) -> tuple[Any, Any]:
    """Returns the outputs of a function, and the gradient of the sum of their sines, in NumPy."""

    def loss(*inputs):
        output = function(*inputs)
        return jnp.sum(jnp.sin(output)), output

    gradient = jax.jit(jax.grad(loss, range(len(inputs)), has_aux=True))
    gradient, output = jax.device_get(gradient(*inputs))
    return output, gradient


class Experience(NamedTuple):
    """An agent whose policy is far from uniform, and its second rollout; in NumPy."""

    agent: Any
    learner: Any
    rollout: types.Rollout


def acted(agent: Any, environment: Any, length: int, batch: int) -> Experience:
    """Returns the experience `[length, batch]` of an agent that acted with its parameters."""
    batched = unroll.BatchedEnvironment(environment)

    def run():
        learner = perturbed(zeros(agent), 0.5, seed=1)
        env_id = jnp.arange(batch, dtype=jnp.int32)
        start = unroll.init(agent, batched, env_id, batch, jax.random.key(2))

        def act(learner, start):
            params = agent.actor_params(learner)
            return unroll.unroll(agent, batched, params, start, jax.random.key(3), length)

        middle, first = act(learner, start)
        # Acting normalises by statistics of earlier data.
        statistics = agent.preprocess.update_statistics(learner.normalizer, first.timestep)
        learner = learner._replace(normalizer=statistics)
        return learner, act(learner, middle)[1]

    experience = Experience(agent, *jax.device_get(jax.jit(on_devices(run))()))
    timestep = experience.rollout.timestep
    assert timestep.truncated()[1:-1].any() and timestep.terminated()[1:-1].any()
    assert not timestep.first()[0].all()
    return experience


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
