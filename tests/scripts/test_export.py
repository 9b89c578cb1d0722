"""Exported policies equal their agents, without this project.

Axis legend: `B` streams, `T` time.
"""

import functools
import json
import pathlib
import re
import sys
import zipfile

import flax.linen as nn
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from agents import alphazero, dqn, networks, ppo, sac
from agents.networks import cores, encoders
from agents.networks import muzero as muzero_networks
from agents.networks import network as network_lib
from environments import catch, wrappers
from podracers import agent as agent_lib
from podracers import environment, precision, types
from podracers.commands import export
from podracers.training import trained
from tests import contract, documented, processes

pytestmark = pytest.mark.exact

T = 5
_ACTION = specs.BoundedArray((2,), np.float32, np.array([-1, 0], np.float32), 3.0)


@pytest.fixture(autouse=True)
def _optimized():
    """Compiles with all optimizations, which fold constants."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def _program(agent, spec, **options):
    """Returns the program of an agent whose parameters are drawn, statistics included."""
    shapes = jax.eval_shape(lambda: agent.actor_params(agent.init_learner(jax.random.key(0))))
    draw = np.random.default_rng(0).normal

    def leaf(path, x):
        values = draw(0.0, 0.5, x.shape) if jnp.issubdtype(x.dtype, jnp.floating) else 0
        is_statistic = "normalizer" in jax.tree_util.keystr(path)
        return jnp.full(x.shape, abs(values) if is_statistic else values, x.dtype)

    params = jax.tree_util.tree_map_with_path(leaf, shapes)
    return export.Program(agent, params, spec, precision.Precision(**options))


def _timestep(spec, first, rng):
    """Draws a time step of streams, whose masks have a legal action."""

    def leaf(path, part):
        shape = first.shape + part.shape
        if part.dtype == bool:  # a mask
            legal = environment.legal_values(spec.action)
            return np.where(legal.cumsum(-1) == 1, True, legal & (rng.random(shape) < 0.5))
        if np.issubdtype(part.dtype, np.integer):
            return rng.integers(part.minimum, int(part.maximum) + 1, shape).astype(part.dtype)
        return rng.normal(size=shape).astype(part.dtype)

    observation = jax.tree_util.tree_map_with_path(leaf, spec.observation)
    reward = np.where(first, 0.0, rng.normal(size=first.shape)).astype(np.float32)
    step_type = np.where(first, types.FIRST, types.MID).astype(np.int8)
    return types.TimeStep(observation, reward, np.ones_like(reward), step_type)


def _loaded(exported):
    return jax.jit(jax.export.deserialize(exported.serialize()).call)


def _kept(template, observation):
    """Returns the parts of an observation that an exported policy reads."""
    if not isinstance(template, dict):
        return observation
    return {key: _kept(part, observation[key]) for key, part in template.items()}


def _assert_equals_agent(program, batch_sizes=(1, 3, 8)):
    agent = program.agent
    kept, initial, act = program.export("cpu", None)
    initial, act = _loaded(initial), _loaded(act)

    @jax.jit
    def agent_act(params, actor_state, timestep, key):
        with program.precision.tracing():
            return agent.act(params, actor_state, timestep, key, evaluation=True)[:2]

    for size in batch_sizes:
        rng = np.random.default_rng(size)
        seed = np.arange(size, dtype=np.uint32) + 7
        key, state = jax.vmap(jax.random.key)(seed), initial(seed)
        actor_state = agent.init_actor(jnp.arange(size), size, True)
        actions = []
        for time in range(T):
            first = (rng.random(size) < 0.3) | (time == 0)
            timestep = _timestep(program.spec, first, rng)
            key, act_key = jax.vmap(jax.random.split, out_axes=1)(key)
            action, actor_state = agent_act(program.params, actor_state, timestep, act_key)
            observation = _kept(kept.observation, timestep.observation)
            reward = () if kept.reward is None else (timestep.reward,)
            exported, state = act(state, observation, first, *reward)
            assert exported.dtype == action.dtype
            np.testing.assert_array_equal(exported, action)
            expected = export._leaves({"actor": actor_state, "key": jax.random.key_data(key)})
            assert state.keys() == kept.state.keys() <= expected.keys()
            for name, leaf in state.items():
                np.testing.assert_array_equal(leaf, expected[name], name)
            actions.append(action)
    assert np.std(actions) > 0.0
    return kept, actions


def _images():
    spec = environment.EnvironmentSpec(
        "images", specs.BoundedArray((44, 44, 1), np.uint8, 0, 255), specs.DiscreteArray(18)
    )
    network = functools.partial(
        networks.q_network, encoder=encoders.NatureCNN(hidden=8), frame_stack=4
    )
    return dqn.DQN(spec, network=network, evaluation_epsilon=0.3), spec


def _continuous(agent, **options):
    spec = environment.EnvironmentSpec("continuous", specs.Array((3,), np.float32), _ACTION)
    return agent(spec, normalize_observations=True, **options), spec


_CASES = {
    "images": _images,
    "sac": lambda: _continuous(sac.SAC),
    "sac_sampled": lambda: _continuous(sac.SAC, greedy_evaluation=False),
    "gaussian": lambda: _continuous(ppo.PPO),
    "gaussian_greedy": lambda: _continuous(ppo.PPO, greedy_evaluation=True),
}
_FAST = ("ppo", "ppo_lstm", "ppo_gru_frames", "r2d2")


def _parameters():
    for name, make in (_CASES | contract.AGENTS).items():
        is_slow = name not in (*_CASES, *_FAST)
        yield pytest.param(make, id=name, marks=[pytest.mark.slow] * is_slow)


@pytest.mark.parametrize("make", [*_parameters()])
def test_an_exported_policy_equals_its_agent(make):
    agent, candidate = make()
    _assert_equals_agent(_program(agent, getattr(candidate, "spec", candidate)))
