"""Small tasks for tests of LPG, and chunks of random transitions."""

import functools

import jax
import numpy as np

from agents.meta import lpg
from agents.meta.lpg import meta_training, tabular
from environments.meta import delayed_chains, lifetimes, tabular_grids
from podracers import environment, tasks, types

CHUNK_LENGTH, UPDATES = 4, 2
PERIOD = CHUNK_LENGTH * (UPDATES + 1)


def candidate(num_envs: int = 3, max_periods: int = 3, **options) -> lifetimes.Lifetimes:
    """Returns lifetimes in two kinds of tasks."""
    families = (
        tabular_grids.TabularGrids(("small",)),
        delayed_chains.DelayedChains(("short",), short=(2, 4)),
    )
    return lifetimes.Lifetimes(
        lifetimes.Mixture(families), num_envs, PERIOD, max_periods=max_periods, **options
    )


def agent(**options) -> lpg.LPG:
    """Returns a meta-learner of such lifetimes, small enough to compile fast."""
    defaults = {
        "spec": candidate().spec,
        "chunk_length": CHUNK_LENGTH,
        "updates": UPDATES,
        "hidden_size": 8,
        "prediction_size": 5,
        "learning_rate": 1e-2,
        "agent_learning_rates": (4.0, 8.0),
    }
    return lpg.LPG(**(defaults | options))


def batch(agent: lpg.LPG, seed: int, num_states: int = 6) -> meta_training._Batch:
    """Returns the random rollout of one lifetime, of `updates + 1` chunks."""
    rng = np.random.default_rng(seed)
    shape = (agent.updates + 1, agent.chunk_length + 1, 7)
    num_actions = agent.spec.action.maximum.max() + 1
    legal = np.arange(num_actions) < 4
    step_type = rng.choice([types.MID, types.LAST], shape, p=[0.7, 0.3]).astype(np.int8)
    terminated = (step_type == types.LAST) & (rng.random(shape) < 0.5)
    timestep = types.TimeStep(
        {
            tasks.ROWS: rng.integers(0, num_states, (*shape, 1)),
            environment.ACTION_MASK: np.broadcast_to(legal, (*shape, num_actions)),
        },
        rng.normal(size=shape).astype(np.float32),
        1.0 - terminated.astype(np.float32),
        step_type,
    )
    action = rng.integers(0, 4, (shape[0], shape[1] - 1, shape[2]))
    initial = tabular.init_agent(agent.spec, agent.prediction_size)
    return jax.tree.map(
        jax.device_put,
        meta_training._Batch(
            agent=jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), initial),
            chunk=tabular.Chunk(timestep, action),
            arm=np.int32(0),
            advantage=10.0 * rng.normal(size=action.shape[1:]).astype(np.float32),
        ),
    )


@functools.cache
def rule_params():
    """Returns parameters of the rule of `agent()`, with heads that are not small."""
    params = jax.jit(agent().rule.init)(jax.random.key(0))
    return jax.tree.map(lambda x: 2.0 * x + 0.1, jax.device_get(params))
