"""One matrix of agents and probe environments: each agent learns the known values, in seconds.

The slow tests have a probe or more of each agent; `make test-learning` has the rest, `COMMON`.

Axis legend: `N` observations.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from agents import dqn, impala, muzero, networks, ppo, pqn, r2d2, sac, vmpo
from agents.networks import cores, encoders, heads
from agents.networks import muzero as muzero_networks
from agents.networks import sac as sac_networks
from agents.search import tree_search
from environments import probes
from podracers import agent as agent_lib
from podracers import anakin, evaluation, types

GAMMA = 0.9
NUM_ENVS, ROLLOUT_LENGTH = 32, 8
COMMON = (
    probes.ConstantReward,
    probes.ObservationReward,
    probes.ActionReward,
    probes.ObservationActionReward,
    probes.DelayedReward,
    probes.Truncation,
    probes.Memory,
)
RECURRENT = (probes.Memory, probes.Bandit)
CORES = {  # others have an LSTM
    "impala": cores.Stack(cores.MinGRU(16)),
    "vmpo": cores.Stack(cores.Attention(16, num_heads=2, window=8), num_layers=1, hidden_size=32),
    "r2d2": cores.Stack(cores.Attention(16, num_heads=2, window=8)),
    "sac": cores.GRU(16),
}
OTHERS = (probes.MaskedAction, probes.MultiDiscreteReward, probes.ContinuousReward, probes.Bandit)
ASYMMETRIC = (probes.PrivilegedReward,)
LATER = (probes.DelayedReward,)


def _replay(steps, **options):
    shared = {"gamma": GAMMA, "learning_rate": 3e-3, "replay_ratio": 4.0, "batch_size": 256}
    return shared | {"replay_capacity": steps // 4, "min_replay": 1024} | options


def _q_network(hidden, **options):
    options = {"encoder": encoders.MLP((hidden,))} | options
    return functools.partial(networks.q_network, **options)


def _keys(spec):
    """Returns the options of networks whose policy does not read all of the observation."""
    if not isinstance(spec.observation, dict) or "privileged_state" not in spec.observation:
        return {}
    return {"policy_keys": ("state",), "critic_keys": ("privileged_state",)}


def _actor_critic(algorithm, spec, hidden, core, steps, **options):
    network = functools.partial(
        networks.actor_critic, encoder=encoders.MLP((hidden,)), core=core, **_keys(spec)
    )
    options |= {"learning_rate": 0.02, "anneal_steps": steps, "max_grad_norm": 0.5}
    return algorithm(spec, network=network, gamma=GAMMA, **options)


def _dqn(spec, hidden, core, steps, **options):
    options |= {"target_period": 20, "epsilon": 0.2, "epsilon_steps": steps // 2}
    return dqn.DQN(spec, network=_q_network(hidden), **_replay(steps, **options))


def _pqn(spec, hidden, core, steps):
    encoder = encoders.MLP((hidden,), "relu", layer_norm=True)
    options = {"learning_rate": 1e-2, "anneal_steps": steps, "epsilon_steps": steps // 2}
    network = _q_network(hidden, encoder=encoder, core=core)
    return pqn.PQN(spec, network=network, gamma=GAMMA, epsilon=0.2, **options)


def _r2d2(spec, hidden, core, steps):
    network = _q_network(hidden, core=cores.LSTM(32) if core is None else core, dueling=True)
    options = {"sequence_length": 12, "burn_in": 4, "n_step": 3, "target_period": 20}
    options |= {"epsilon_base": 0.6, "epsilon_exponent": 3.0, "batch_size": 64}
    options |= {"replay_capacity": steps // 2, "min_replay": 2048}
    return r2d2.R2D2(spec, network=network, **_replay(steps, **options))


def _sac(spec, hidden, core, steps):
    is_discrete = isinstance(spec.action, specs.DiscreteArray)
    options = {"target_entropy": 0.05 if is_discrete else -4.0, "initial_temperature": 0.1}
    options |= {"anneal_steps": steps, "batch_size": 128, "target_rate": 0.05}
    network = functools.partial(
        sac_networks.sac_network,
        hidden_sizes=(32, 32),
        activation="tanh",
        core=core,
        **_keys(spec),
    )
    if core is not None:
        options |= {"sequence_length": 12, "burn_in": 4, "batch_size": 32}
    return sac.SAC(spec, network=network, **_replay(steps, **options))


def _muzero(spec, hidden, core, steps):
    encoder = encoders.MLP((32,), "relu")
    sizes = {"encoder": encoder, "latent_size": 32, "hidden_sizes": (32,)}
    options = {"support": 4.0, "support_atoms": 33, "unroll_steps": 3, "n_steps": 3}
    options |= {"final_temperature": 0.5, "temperature_steps": steps}
    options |= {"learning_rate": 4e-3, "anneal_steps": steps}
    return muzero.MuZero(
        spec,
        network=functools.partial(muzero_networks.model, **sizes),
        search=functools.partial(tree_search.Search, num_simulations=8, max_depth=4),
        **_replay(steps, **options),
    )


class Agent(NamedTuple):
    make: Callable[..., agent_lib.Agent]  # of a spec, encoder units, a core and agent steps
    updates: int  # rollouts of each run
    others: tuple[type, ...] = ()  # probes that it learns by themselves


_impala = functools.partial(_actor_critic, impala.IMPALA, entropy_cost=0.001, optimizer="adam")
_PASSES = {"epochs": 4, "num_minibatches": 4, "target_period": 16, "gae_lambda": 0.95}
_DUALS = {"initial_temperature": 0.1, "initial_multiplier": 1.0, "epsilon_temperature": 0.1}
_BOUNDS = {"epsilon_kl": 0.1, "epsilon_mean": 0.1, "epsilon_std": 0.1}
_vmpo = functools.partial(_actor_critic, vmpo.VMPO, **_PASSES, **_DUALS, **_BOUNDS)
_rainbow = functools.partial(
    _dqn,
    distribution=heads.CategoricalReturn(-2.0, 2.0, 41),
    noisy=True,
    priority_exponent=0.5,
    importance_exponent=0.4,
    importance_steps=10_000,
)
AGENTS = {
    "ppo": Agent(
        functools.partial(_actor_critic, ppo.PPO, entropy_cost=0.001), 80, OTHERS + ASYMMETRIC
    ),
    "impala": Agent(_impala, 800, LATER),
    "vmpo": Agent(_vmpo, 80, OTHERS[1:]),
    "dqn": Agent(_dqn, 200, LATER),
    "rainbow": Agent(_rainbow, 200, (probes.MaskedAction,)),
    "pqn": Agent(_pqn, 120, LATER),
    "r2d2": Agent(_r2d2, 120, (probes.Memory,)),
    "sac": Agent(_sac, 200, (probes.ContinuousReward, *ASYMMETRIC)),
    "muzero": Agent(_muzero, 220, LATER),
}


def _learn(name: str, candidate: Any, updates: int):
    """Returns an agent with greedy evaluation, its actor parameters and all that it learnt."""
    core = CORES.get(name, cores.LSTM(16)) if type(candidate) in RECURRENT else None
    steps = updates * NUM_ENVS * ROLLOUT_LENGTH
    agent = AGENTS[name].make(candidate.spec, 16, core, steps)
    runner = anakin.Anakin(agent, candidate, NUM_ENVS, ROLLOUT_LENGTH, num_devices=1)
    state, _ = runner.step(runner.init(0), updates)
    learnt = jax.device_get((runner.actor_params(state), state.learner.params))
    return agent_lib.greedy(agent) or agent, *learnt


def _values(agent, params, learnt, observation):
    """Returns the agent's values `[N]` of observations `[N, ...]` at the start of an episode."""
    observation = jax.tree.map(jnp.asarray, observation)
    count = len(jax.tree.leaves(observation)[0])
    first = jnp.full((count,), types.FIRST, jnp.int8)
    timestep = types.TimeStep(observation, jnp.zeros(count), jnp.ones(count), first)
    core = agent.init_actor(jnp.arange(count), count)
    keys = jax.random.split(jax.random.key(0), count)
    act = jax.jit(functools.partial(agent.act, evaluation=True))
    action, _, extras = act(params, core, timestep, keys)
    if not isinstance(agent, sac.SAC):
        return extras.value
    # SAC acts without its critics.
    timestep = agent._step_inputs(core, timestep)
    memory = core.core if agent.net.is_recurrent else core
    features, _ = agent.net.observe(learnt.critic, memory, timestep)
    values = agent.net.values(learnt.critic, features, agent.action_head.to_critics(action))
    return jnp.min(agent.action_head.taken(values, action), axis=0)


# A value of 10 is beyond the support; and a time step from the middle of an episode, shown to a
# recurrent network as the start of one, is unlike all others.
UNSUITED = {("rainbow", probes.Truncation), ("r2d2", probes.DelayedReward)}


@pytest.mark.parametrize(
    ("name", "probe"),
    [
        pytest.param(name, probe, id=f"{name}-{probe.__name__}", marks=mark)
        for name, row in AGENTS.items()
        for mark, probe_classes in ((pytest.mark.slow, row.others), (pytest.mark.learning, COMMON))
        for probe in probe_classes
        if mark.name == "slow" or probe not in row.others
        if probe is not probes.Memory or name in ("ppo", *CORES)
        if (name, probe) not in UNSUITED
    ],
)
def test_the_values_and_the_return_of_a_probe_are_learnt(name, probe):
    candidate = probe()
    updates = 400 if name == "r2d2" else AGENTS[name].updates
    agent, params, learnt = _learn(name, candidate, updates)
    values = _values(agent, params, learnt, candidate.observations())
    np.testing.assert_allclose(values, candidate.value(GAMMA), rtol=0.05, atol=0.05)
    evaluator = evaluation.Evaluator(agent, candidate, num_episodes=128)
    episodes = evaluator.run(params, jax.random.key(1))
    # Situations are drawn at random, so the best return of a sample varies.
    error = abs(episodes.mean_return() - candidate.optimal_return)
    assert error < 0.05 + 4.0 * episodes.standard_error()
