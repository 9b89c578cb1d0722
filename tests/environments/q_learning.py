"""Tabular Q-learning: can what a task family shows be learnt from?"""

import jax
import jax.numpy as jnp
import numpy as np

from podracers import batch, tasks
from podracers import environment as environment_lib

NUM_STREAMS = 128
NUM_EPISODES = 1024


def learn(task, num_steps: int, gamma: float, seed: int = 0) -> float:
    """Learns from `num_steps` of each stream; returns the mean return of the greedy policy.

    Half of the streams act at random, the others mostly greedily. Errors are averaged over the
    streams that visit a row, with a step size that falls to a tenth.
    """
    rows_spec = task.spec.observation[tasks.ROWS]
    num_rows, num_states = rows_spec.shape[0], int(rows_spec.maximum)
    num_actions = task.spec.action.num_values
    batched = batch.BatchedEnvironment(task)
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
        key = jax.random.fold_in(jax.random.key(seed), time)
        action = act(table, timestep.observation, epsilon, key)
        state, arrival = batched.step(state, action)
        rows = timestep.observation[tasks.ROWS]
        best = jnp.max(values(table, arrival.observation), -1)
        chosen = values(table, timestep.observation)[jnp.arange(NUM_STREAMS), action]
        error = arrival.reward + gamma * arrival.discount * best - chosen
        weight = 1.0 - timestep.last()
        at = (rows, action[:, None])
        totals = jnp.zeros((2, num_states, num_actions))
        totals = totals.at[0, *at].add((weight * error)[:, None], mode="drop")
        totals = totals.at[1, *at].add(weight[:, None], mode="drop")
        step_size = 0.5 * (1.0 - 0.9 * time / num_steps) / num_rows
        table = table + step_size * totals[0] / jnp.maximum(totals[1], 1.0)
        return (table, state, arrival), None

    def evaluate(table, key):
        state, timestep = batched.init(jax.random.split(key, NUM_EPISODES))

        def step(carry, time):
            state, timestep, total, alive = carry
            action = jnp.argmax(values(table, timestep.observation), -1)
            state, timestep = batched.step(state, action)
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
        start = batched.init(jax.random.split(learn_key, NUM_STREAMS))
        (table, *_), _ = jax.lax.scan(step, (table, *start), jnp.arange(num_steps))
        return evaluate(table, evaluate_key)

    return float(np.asarray(run(jax.random.key(seed))))
