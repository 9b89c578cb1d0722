"""User mistakes in the options of agents: errors of one line that name the option."""

import functools
import math

import pytest

from agents import (
    alphazero,
    categorical,
    dqn,
    impala,
    muzero,
    networks,
    ppo,
    pqn,
    r2d2,
    sac,
    tree_search,
    vmpo,
)
from agents.networks import cores, heads
from agents.networks import muzero as muzero_networks
from environments import catch, wrappers
from podracers import errors
from tests import streams

_SPEC = catch.Catch().spec
_MAKE = {
    "PPO": functools.partial(ppo.PPO, _SPEC),
    "IMPALA": functools.partial(impala.IMPALA, _SPEC),
    "VMPO": functools.partial(vmpo.VMPO, _SPEC),
    "DQN": functools.partial(dqn.DQN, _SPEC),
    "PQN": functools.partial(pqn.PQN, _SPEC),
    "R2D2": functools.partial(r2d2.R2D2, _SPEC, burn_in=4, sequence_length=16),
    "SAC": functools.partial(sac.SAC, streams.RandomEpisodes().spec),
    "MuZero": functools.partial(muzero.MuZero, _SPEC),
    "AlphaZero": functools.partial(alphazero.AlphaZero, wrappers.Searchable(catch.Catch()).spec),
    "Search": tree_search.Search,
    "CategoricalReturn": heads.CategoricalReturn,
    "support": categorical.Support,
}
_AGENTS = list(_MAKE)[:9]
_CONTINUOUS, _MULTI_DISCRETE = (
    streams.RandomEpisodes(actions=actions).spec for actions in ("continuous", "multi_discrete")
)
_RECURRENT = functools.partial(networks.q_network, core=cores.LSTM(8))


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
    ("R2D2", "burn_in", 15),
    ("R2D2", "burn_in", -1),
    ("SAC", "target_entropy", 1.0),
    ("SAC", "random_shift", 4),  # without an image
    ("MuZero", "final_temperature", -1.0),
    ("Search", "max_depth", 0),
    *((name, "reward_clip", 0.0) for name in _AGENTS),
    *((name, "reward_scale", 0) for name in _AGENTS),
    *((name, "learning_rate", 1e4) for name in _AGENTS),
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
        (
            "MuZero",
            {"network": functools.partial(muzero_networks.model, core=cores.LSTM(8))},
            "recurrent",
        ),
        ("support", {"bound": 0.0}, "positive bound"),
        ("CategoricalReturn", {"num_atoms": 1}, "2 atoms"),
        ("CategoricalReturn", {"minimum": 2.0, "maximum": 2.0}, "minimum < maximum"),
    ],
)
def test_an_impossible_option_is_named_with_a_way_out(name, options, message):
    make = _MAKE[name].func if "spec" in options else _MAKE[name]
    with pytest.raises(errors.UserError, match=message) as caught:
        make(**options)
    assert "\n" not in str(caught.value)
