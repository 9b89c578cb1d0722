"""Tabular Q-learning: can what a task family shows be learnt from?"""

import jax
import jax.numpy as jnp
import numpy as np

from podracers import environment as environment_lib
from podracers import tasks

NUM_STREAMS = 128
NUM_EPISODES = 1024


def begin(candidate, key, count):
    """Starts `count` streams of an environment."""
    return jax.vmap(candidate.reset)(jax.random.split(key, count))


def advance(candidate, state, timestep, action, key):
    """Steps all streams; where the episode had ended, another one begins."""
    stepped = jax.vmap(candidate.step)(state, action)
    fresh = begin(candidate, key, action.shape[0])
    last = timestep.last()

    def select(new, old):
        return jnp.where(last.reshape(last.shape + (1,) * (new.ndim - 1)), new, old)

    return jax.tree.map(select, fresh, stepped)


def to_a_tenth(progress):
    """Returns a step size that falls linearly, where `progress` goes from 0 to 1."""
    return 0.5 * (1.0 - 0.9 * progress)


def to_a_fiftieth(progress):
    """Returns a step size that falls geometrically."""
    return 0.5 * 0.02**progress


def learn(task, num_steps: int, gamma: float, starts=None, schedule=to_a_tenth) -> float:
    """Learns from `num_steps` of each stream; returns the mean return of the greedy policy.

    Half of the streams act at random, the others mostly greedily. Errors are averaged over the
    streams that visit a row.

    Args:
      task: what is learnt, and evaluated.
      num_steps: of each stream.
      gamma: the discount.
      starts: the same task with other starts, to learn in; None for its own.
      schedule: the step size by progress.
    """
    rows_spec = task.spec.observation[tasks.ROWS]
    num_rows, num_states = rows_spec.shape[0], int(rows_spec.maximum)
    num_actions = task.spec.action.num_values
    starts = starts or task
    epsilon = jnp.where(jnp.arange(NUM_STREAMS) % 2 == 0, 1.0, 0.1)

    def values(table, observation):
        rows = table.at[observation[tasks.ROWS]].get(mode="fill", fill_value=0.0)
        return jnp.where(observation[environment_lib.ACTION_MASK], rows.sum(1), -jnp.inf)

    def act(table, observation, epsilon, key):
        choice_key, explore_key = jax.random.split(key)
        mask = observation[environment_lib.ACTION_MASK]
        drawn = jax.random.categorical(choice_key, jnp.where(mask, 0.0, -jnp.inf))
        explores = jax.random.uniform(explore_key, epsilon.shape) < epsilon
        return jnp.where(explores, drawn, jnp.argmax(values(table, observation), -1))

    def step(carry, time):
        table, state, timestep = carry
        act_key, key = jax.random.split(jax.random.fold_in(jax.random.key(1), time))
        action = act(table, timestep.observation, epsilon, act_key)
        state, arrival = advance(starts, state, timestep, action, key)
        rows = timestep.observation[tasks.ROWS]
        best = jnp.max(values(table, arrival.observation), -1)
        chosen = values(table, timestep.observation)[jnp.arange(NUM_STREAMS), action]
        error = arrival.reward + gamma * arrival.discount * best - chosen
        weight = 1.0 - timestep.last()
        # How many streams update the same entry, for the mean of their errors; [B, F].
        same = (rows[:, None] == rows) & (action[:, None] == action)[..., None]
        count = jnp.sum(same * weight[:, None], axis=1)
        step_size = schedule(time / num_steps) / num_rows
        change = step_size * (weight * error)[:, None] / jnp.maximum(count, 1.0)
        table = table.at[rows, action[:, None]].add(change, mode="drop")
        return (table, state, arrival), None

    def evaluate(table, key):
        state, timestep = begin(task, key, NUM_EPISODES)

        def step(carry, time):
            state, timestep, total, alive = carry
            action = jnp.argmax(values(table, timestep.observation), -1)
            state, timestep = jax.vmap(task.step)(state, action)
            total += alive * timestep.reward
            return (state, timestep, total, alive & ~timestep.last()), None

        zero = jnp.zeros((NUM_EPISODES,))
        steps = jnp.arange(task.spec.max_episode_steps)
        carry, _ = jax.lax.scan(step, (state, timestep, zero, zero == 0.0), steps)
        return jnp.mean(carry[2])

    @jax.jit
    def run(key):
        learn_key, evaluate_key = jax.random.split(key)
        table = jnp.zeros((num_states, num_actions))
        start = begin(starts, learn_key, NUM_STREAMS)
        (table, *_), _ = jax.lax.scan(step, (table, *start), jnp.arange(num_steps))
        return evaluate(table, evaluate_key)

    return float(np.asarray(run(jax.random.key(0))))
