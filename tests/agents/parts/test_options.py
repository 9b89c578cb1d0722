"""User mistakes in the options of agents: errors of one line that name the option."""

import functools
import math

import numpy as np
import pytest
from dm_env import specs

from agents import alphazero, dqn, impala, muzero, networks, ppo, pqn, r2d2, sac, vmpo
from agents.networks import cores, encoders, heads
from agents.networks import muzero as muzero_networks
from agents.parts import categorical
from agents.search import tree_search
from environments import catch, wrappers
from podracers import errors
from tests import streams
from tests.agents.meta.lpg import lifetimes

_SPEC = catch.Catch().spec
_SPECS = {"SAC": streams.RandomEpisodes().spec, "AlphaZero": wrappers.Searchable(catch.Catch).spec}
_AGENTS = (
    *(ppo.PPO, impala.IMPALA, vmpo.VMPO, dqn.DQN, pqn.PQN, r2d2.R2D2),
    *(sac.SAC, muzero.MuZero, alphazero.AlphaZero),
)
_PARTS = (tree_search.Search, heads.CategoricalReturn, categorical.Support)
_MAKE = {each.__name__: each for each in (*_AGENTS, *_PARTS)}
_MAKE |= {
    "LPG": lifetimes.agent,
    "LRU": functools.partial(cores.LRU, 4),
    "Stack": cores.Stack,
    "Attention": cores.Attention,
    "from_spec": heads.from_spec,
    # Nothing may mix cells.
    "q_network": functools.partial(networks.q_network, _SPEC, 4, num_cells=4),
    "actor_critic": functools.partial(
        networks.actor_critic, _SPEC, heads.from_spec(_SPEC.action), num_cells=4
    ),
}
_bounded = functools.partial(specs.BoundedArray, (2,))
_BOX = _bounded(np.float32, -1.0, 1.0)
_CONTINUOUS, _MULTI_DISCRETE = (
    streams.RandomEpisodes(actions=actions).spec for actions in ("continuous", "multi_discrete")
)
_RECURRENT = functools.partial(networks.q_network, core=cores.LSTM(8))
_MODEL = functools.partial(muzero_networks.model, core=cores.LSTM(8))


_NAMES = [agent.__name__ for agent in _AGENTS]
_IMPOSSIBLE = [
    ("PPO", "epochs", 0),
    ("PPO", "gamma", 1.1),
    ("PPO", "gamma", "0.9"),
    ("PPO", "entropy_cost", math.nan),
    ("PPO", "learning_rate", None),
    ("PPO", "clip_epsilon_final", 0.1),  # without anneal_steps
    ("IMPALA", "max_grad_norm", math.inf),
    ("VMPO", "epsilon_kl", 0.0),
    ("VMPO", "target_period", 0),
    ("DQN", "target_period", 10**30),
    ("DQN", "max_grad_norm", 10**400),
    ("R2D2", "burn_in", 39),
    ("R2D2", "burn_in", -1),
    ("SAC", "target_entropy", 1.0),
    ("SAC", "random_shift", 4),  # without an image
    ("SAC", "sequence_length", 2),  # without a core
    ("SAC", "burn_in", 1),  # as long as the sequence
    ("SAC", "burn_in", -1),
    ("MuZero", "final_temperature", -1.0),
    ("Search", "max_depth", 0),
    *((name, "reward_clip", 0.0) for name in _NAMES),
    *((name, "reward_scale", 0) for name in _NAMES),
    *((name, "learning_rate", 1e4) for name in _NAMES),
    ("PPO", "value_cost", -5.0),
    ("PPO", "entropy_cost", -1e300),
    ("PPO", "epochs", 2**31 - 1),
    ("IMPALA", "value_cost", -5.0),
    ("IMPALA", "optimizer_epsilon", 1e300),
    ("DQN", "replay_ratio", 1e30),
    ("SAC", "target_entropy", -1e39),
    ("SAC", "random_steps", -1),
    ("SAC", "weight_decay", 1e30),
    ("MuZero", "support", math.inf),
    ("MuZero", "support_atoms", 2),
]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        *((name, {option: value}, rf"{name}\.{option}: ") for name, option, value in _IMPOSSIBLE),
        ("IMPALA", {"optimizer": "rmspop"}, "did you mean 'rmsprop'"),
        ("Search", {"kind": "gumbal"}, "did you mean 'gumbel'"),
        *((name, {"spec": _CONTINUOUS}, "SAC") for name in ("DQN", "PQN", "R2D2", "MuZero")),
        ("DQN", {"spec": _MULTI_DISCRETE}, "PPO"),
        ("SAC", {"spec": _MULTI_DISCRETE}, "PPO or IMPALA"),
        ("SAC", {"spec": _CONTINUOUS, "target_entropy": 0.7}, "less than 0.693"),
        ("AlphaZero", {"spec": _SPEC}, "Searchable"),
        ("DQN", {"network": _RECURRENT}, "use R2D2"),
        ("R2D2", {"network": networks.q_network}, "has no core"),
        ("MuZero", {"network": _MODEL}, "recurrent"),
        ("LPG", {"updates": 0}, r"LPG\.updates"),
        ("LPG", {"agent_learning_rates": ()}, r"LPG\.agent_learning_rates"),
        ("LPG", {"agent_learning_rates": (0.0,)}, r"LPG\.agent_learning_rates: .* above 0"),
        ("LPG", {"chunk_length": 5}, r"bind Lifetimes\.period"),
        ("LPG", {"spec": _SPEC}, "got Catch"),
        ("LRU", {"min_radius": -0.1}, "LRU.min_radius: expected at least 0 and less than 0.999"),
        ("LRU", {"min_radius": 0.999}, "less than 0.999, got 0.999"),
        ("Stack", {"num_layers": 0}, "Stack.num_layers: expected a positive int"),
        ("Stack", {"hidden_size": 0}, "Stack.hidden_size: expected a positive int"),
        ("Attention", {"window": 0}, "Attention.window: expected a positive int"),
        ("Attention", {"num_heads": 3}, "num_heads: expected a divisor of size = 256, got 3"),
        ("Stack", {"core": encoders.MLP()}, "expected a core such as MinGRU, got .*MLP"),
        ("from_spec", {"action_spec": _BOX, "kind": "gausian"}, "did you mean 'gaussian'"),
        ("from_spec", {"action_spec": _SPEC.action, "kind": "gaussian"}, "known: categorical"),
        (
            "from_spec",
            {"action_spec": specs.Array((2,), np.float32)},
            "supported are a DiscreteArray",
        ),
        ("from_spec", {"action_spec": _bounded(np.float32, -np.inf, 1.0)}, "-inf to 1 .* finite"),
        ("from_spec", {"action_spec": _bounded(np.float32, -3e38, 3e38)}, "difference exceeds"),
        ("from_spec", {"action_spec": _bounded(np.float32, 2.0, 2.0)}, "leave it out"),
        ("from_spec", {"action_spec": _bounded(np.int32, 1, 3)}, "count from 0"),
        ("q_network", {"head_hidden_sizes": (8,)}, "no head_hidden_sizes"),
        ("q_network", {"core": cores.LSTM(8)}, "no core"),
        ("actor_critic", {"core": cores.GRU(8)}, "no core"),
        ("Support", {"bound": 0.0}, "positive bound"),
        ("CategoricalReturn", {"num_atoms": 1}, "2 atoms"),
        ("CategoricalReturn", {"minimum": 2.0, "maximum": 2.0}, "minimum < maximum"),
    ],
)
def test_an_impossible_option_is_named_with_a_way_out(name, options, message):
    given = {"spec": _SPECS.get(name, _SPEC)} if name in _NAMES else {}
    with pytest.raises(errors.UserError, match=message) as caught:
        _MAKE[name](**given | options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("agent", [x for x in _AGENTS if "target_period" in x.__dataclass_fields__])
def test_target_parameters_are_older_by_default(agent):
    assert agent.target_period > 1 or agent.target_rate < 1.0


def _broken_network(mistake, spec, head):
    return mistake(spec, head)


@pytest.mark.parametrize(
    ("mistake", "cause"),
    [
        (lambda spec, head: spec + head, "unsupported"),
        (lambda spec, head: head.num_units, "no attribute 'num_units'"),
        (lambda spec, head: int("nine"), "nine"),
    ],
)
def test_a_mistake_in_a_network_names_its_line(mistake, cause):
    line = mistake.__code__.co_firstlineno
    message = rf"^PPO\.network = .*\(at .*test_options\.py:{line} in <lambda>\): .*{cause}"
    network = functools.partial(_broken_network, mistake)
    with pytest.raises(errors.UserError, match=message):
        _ = ppo.PPO(catch.Catch().spec, network=network).net
