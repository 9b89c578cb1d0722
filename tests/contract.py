"""Agents and runners for tests of the contract between them, in one table each.

Axis legend: `T` time, `B` streams, `D` devices, `U` updates.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agents import dqn, impala, muzero, networks, ppo, pqn, r2d2, sac, vmpo
from agents.networks import cores, encoders, heads
from agents.networks import muzero as muzero_networks
from agents.networks import sac as sac_networks
from agents.search import proposals, tree_search
from podracers import agent as agent_lib
from podracers import anakin, environment, metrics, runner, sebulba, types
from tests import streams

NUM_ENVS = 8
ROLLOUT_LENGTH = 6
NUM_UPDATES = 5


_MLP = encoders.MLP((8,))


def tiny_network(core=None, make=networks.actor_critic, encoder=_MLP, **options):
    """Returns the maker of a network of eight units, which compiles fast."""
    return functools.partial(make, encoder=encoder, core=core, **options)


def case(agent, network, actions="discrete", masked=True, wrapper=lambda x: x, **options):
    """Returns an agent and its environment."""
    candidate = wrapper(streams.RandomEpisodes(actions=actions, masked=masked))
    return agent(candidate.spec, network=network, **options), candidate


ASYMMETRIC = {"policy_keys": ("state",), "critic_keys": ("privileged_state",)}
_tiny_q_network = functools.partial(tiny_network, make=networks.q_network)
_tiny_sac_network = functools.partial(sac_networks.sac_network, hidden_sizes=(8,))
_PPO = functools.partial(case, ppo.PPO, learning_rate=0.01, epochs=2, num_minibatches=2)
_IMPALA = functools.partial(case, impala.IMPALA, learning_rate=0.01)
_VMPO = functools.partial(
    case, vmpo.VMPO, learning_rate=0.01, epochs=2, num_minibatches=2, target_period=3
)
# The ring of 200 steps wraps around within the five updates.
REPLAY = {"batch_size": 16, "replay_capacity": 200}
_PRIORITIES = {"priority_exponent": 0.6, "importance_exponent": 0.4}
_DQN = functools.partial(
    case,
    dqn.DQN,
    learning_rate=0.01,
    normalize_observations=True,
    min_replay=16,
    replay_ratio=1.1,
    target_period=3,
    epsilon_steps=400,
    **REPLAY,
    **_PRIORITIES,
)
_PQN = functools.partial(
    case,
    pqn.PQN,
    learning_rate=0.01,
    num_minibatches=2,
    epsilon_steps=400,
    normalize_observations=True,
)
_SAC = functools.partial(
    case,
    sac.SAC,
    learning_rate=0.01,
    min_replay=16,
    replay_ratio=1.1,
    target_rate=0.1,
    random_steps=NUM_ENVS * ROLLOUT_LENGTH,  # the first rollout
    **REPLAY,
)
_SAC_RECURRENT = functools.partial(
    _SAC, sequence_length=10, burn_in=4, batch_size=8, min_replay=96, replay_ratio=1.0
)
# Small learning rates, because the search magnifies rounding errors of parameters.
SEARCH = {
    "search": functools.partial(tree_search.Search, num_simulations=4, max_depth=3),
    "support": 5.0,
    "support_atoms": 11,
    "n_steps": 2,
    "temperature_steps": 400,
    "learning_rate": 0.0005,
    "adam_epsilon": 1e-2,
    "min_replay": 96,
    "replay_ratio": 0.8,
    **REPLAY,
}
_NORM_MLP = encoders.MLP((8,), layer_norm=True)
_R2D2 = functools.partial(
    case,
    r2d2.R2D2,
    learning_rate=0.01,
    sequence_length=10,
    burn_in=4,
    batch_size=8,
    replay_capacity=200,
    min_replay=96,
    replay_ratio=1.0,
    target_period=2,
    normalize_observations=True,
)

# Together the agents of one algorithm cover every kind of action and of memory.
AGENTS: dict[str, Callable[[], tuple[agent_lib.Agent, environment.Environment]]] = {
    "ppo": lambda: _PPO(tiny_network()),
    "ppo_lstm": lambda: _PPO(tiny_network(cores.LSTM(8)), "multi_discrete"),
    "ppo_gru_frames": lambda: _PPO(
        tiny_network(cores.GRU(8), frame_stack=3, separate_critic=False),
        "continuous",
        masked=False,
        normalize_observations=True,
    ),
    "ppo_scaled": lambda: _PPO(
        tiny_network(cores.GRU(8)),
        normalize_observations=True,
        normalize_rewards=True,
        popart_rate=0.1,
        anneal_steps=400,
        clip_epsilon_final=0.0,
        entropy_cost_final=0.0,
    ),
    "ppo_asymmetric": lambda: _PPO(
        tiny_network(cores.GRU(8), frame_stack=2, **ASYMMETRIC),
        "continuous",
        masked=False,
        wrapper=streams.Privileged,
        normalize_observations=True,
    ),
    "impala": lambda: _IMPALA(tiny_network()),
    "impala_lstm": lambda: _IMPALA(
        tiny_network(cores.LSTM(8)),
        "continuous",
        masked=False,
        num_minibatches=2,
        popart_rate=0.1,
    ),
    "vmpo": lambda: _VMPO(tiny_network(cores.LSTM(8)), "multi_discrete"),
    "vmpo_continuous": lambda: _VMPO(
        tiny_network(frame_stack=3),
        "continuous",
        masked=False,
        normalize_observations=True,
        popart_rate=0.1,
    ),
    "dqn": lambda: _DQN(_tiny_q_network(frame_stack=3)),
    "rainbow": lambda: _DQN(
        _tiny_q_network(frame_stack=3, dueling=True, head_hidden_sizes=(8,)),
        distribution=heads.CategoricalReturn(-5.0, 5.0, 11),
        noisy=True,
        n_step=3,
        importance_steps=400,
    ),
    "pqn": lambda: _PQN(_tiny_q_network(encoder=_NORM_MLP, frame_stack=3)),
    "pqn_gru": lambda: _PQN(_tiny_q_network(cores.GRU(8, layer_norm=True), encoder=_NORM_MLP)),
    # A core and stacked frames; sequences are longer than rollouts.
    "r2d2": lambda: _R2D2(_tiny_q_network(core=cores.LSTM(8), frame_stack=2, dueling=True)),
    "r2d2_attention": lambda: _R2D2(
        _tiny_q_network(core=cores.Stack(cores.Attention(8, num_heads=2, window=6)))
    ),
    "sac": lambda: _SAC(_tiny_sac_network, "continuous", masked=False, normalize_observations=True),
    "sac_asymmetric": lambda: _SAC(
        functools.partial(_tiny_sac_network, frame_stack=2, **ASYMMETRIC),
        "continuous",
        masked=False,
        wrapper=streams.Privileged,
        normalize_observations=True,
    ),
    "sac_discrete": lambda: _SAC(
        functools.partial(_tiny_sac_network, frame_stack=3), priority_exponent=0.6
    ),
    "sac_gru": lambda: _SAC_RECURRENT(
        functools.partial(_tiny_sac_network, core=cores.GRU(8), frame_stack=2),
        "continuous",
        masked=False,
        normalize_observations=True,
        priority_exponent=0.6,
    ),
    "sac_discrete_lstm": lambda: _SAC_RECURRENT(
        functools.partial(_tiny_sac_network, core=cores.LSTM(8))
    ),
    "muzero": lambda: case(
        muzero.MuZero,
        tiny_network(make=muzero_networks.model, latent_size=8, hidden_sizes=(8,), frame_stack=3),
        unroll_steps=2,
        **SEARCH,
        **_PRIORITIES,
    ),
    "muzero_sampled": lambda: case(
        muzero.MuZero,
        tiny_network(make=muzero_networks.model, latent_size=8, hidden_sizes=(8,)),
        "continuous",
        masked=False,
        proposal=functools.partial(proposals.Proposal, num_actions=4, uniform_fraction=0.2),
        unroll_steps=2,
        reanalyze=0.5,
        **SEARCH,
    ),
}


def _anakin(agent, candidate, num_devices: int) -> runner.Runner:
    return anakin.Anakin(
        agent, candidate, NUM_ENVS, ROLLOUT_LENGTH, reset_batch=2, num_devices=num_devices
    )


def _sebulba(agent, candidate, num_devices: int) -> runner.Runner:
    return sebulba.Sebulba(
        agent,
        candidate,
        NUM_ENVS,
        ROLLOUT_LENGTH,
        actor_devices=(0, 1)[:num_devices],
        learner_devices=tuple(range(num_devices)),
        batches_per_actor=2,
        lag=1,
    )


class RunnerCase(NamedTuple):
    """A runner and its properties."""

    make: Callable[[agent_lib.Agent, environment.Environment, int], runner.Runner]
    lag: int  # number of updates that the acting parameters are behind
    saves_streams: bool  # whether a state holds the environments too, so that they continue


RUNNERS: dict[str, RunnerCase] = {
    "anakin": RunnerCase(_anakin, lag=0, saves_streams=True),
    "sebulba": RunnerCase(_sebulba, lag=1, saves_streams=False),
}


class _Versioned(NamedTuple):
    inner: Any
    version: jax.Array  # int32, the number of updates


class _Remembered(NamedTuple):
    inner: Any
    rollout: types.Rollout  # [B, T, ...]: devices' memories lie side by side along the first axis


@dataclasses.dataclass(frozen=True, eq=False)
class Recorder:
    """An agent that acts and learns as `agent` does, and keeps the latest rollout in its memory.

    Attributes:
      agent: the agent under test.
      traces: the name of the method for each trace by JAX.
    """

    agent: agent_lib.Agent
    traces: list[str] = dataclasses.field(default_factory=list)

    def init_learner(self, key):
        self.traces.append("init_learner")
        return _Versioned(self.agent.init_learner(key), jnp.zeros((), jnp.int32))

    def init_memory(self, rollout):
        inner = rollout._replace(extras=rollout.extras.inner)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), rollout)
        return _Remembered(self.agent.init_memory(inner), _turned(zeros))

    def init_actor(self, env_id, num_envs, evaluation=False):
        return self.agent.init_actor(env_id, num_envs, evaluation)

    def actor_params(self, learner):
        return _Versioned(self.agent.actor_params(learner.inner), learner.version)

    def act(self, params, actor_state, timestep, key, evaluation=False):
        self.traces.append("act")
        action, actor_state, extras = self.agent.act(
            params.inner, actor_state, timestep, key, evaluation
        )
        version = jnp.broadcast_to(params.version, timestep.step_type.shape)
        return action, actor_state, _Versioned(extras, version)

    def update(self, state, rollout, key):
        self.traces.append("update")
        learner, memory = state
        inner = rollout._replace(extras=rollout.extras.inner)
        (new_learner, new_memory), means = self.agent.update(
            types.AgentState(learner.inner, memory.inner), inner, key
        )
        learner = _Versioned(new_learner, learner.version + 1)
        return types.AgentState(learner, _Remembered(new_memory, _turned(rollout))), means


class History(NamedTuple):
    """Results of `run`."""

    states: list[Any]  # [U + 1] the runner's states, as NumPy
    rollouts: list[types.Rollout]  # [U] of all streams
    reports: list[metrics.Report]  # [U]
    final: Any  # the runner's last state, on the devices


def rollout(state: Any) -> types.Rollout:
    """Returns the latest rollout `[T, B, ...]` of all streams."""
    return _turned(streams.to_numpy(state.memory.rollout))


def _turned(rollout: types.Rollout) -> types.Rollout:
    """Swaps time and streams."""
    rows = rollout._replace(actor_state=(), age=())
    turned = jax.tree.map(lambda x: x.swapaxes(0, 1), rows)
    return turned._replace(actor_state=rollout.actor_state, age=rollout.age)


def run(subject: runner.Runner, num_updates: int = NUM_UPDATES, seed: int = 0) -> History:
    """Takes updates, one at a time."""
    state = subject.init(seed)
    states, rollouts, reports = [streams.to_numpy(state)], [], []
    for _ in range(num_updates):
        state, report = subject.step(state, 1)
        states.append(streams.to_numpy(state))
        rollouts.append(rollout(state))
        reports.append(streams.to_numpy(report))
    return History(states, rollouts, reports, state)


def restore(subject: runner.Runner, saved: Any) -> Any:
    """Returns a state on the devices from one on the host, laid out as the runner lays it out."""

    def put(template, x):
        if jnp.issubdtype(template.dtype, jax.dtypes.prng_key):
            x = jax.random.wrap_key_data(x)
        return jax.device_put(x, template.sharding)

    return jax.tree.map(put, subject.init(1), saved)
