"""Options out of their bounds are refused by name, in one line."""

import functools
import math

import pytest

from agents import alphazero, dqn, impala, muzero, ppo, pqn, r2d2, sac
from environments import catch, wrappers
from podracers import errors

_GAME = catch.Catch()
_AGENTS = {
    "PPO": functools.partial(ppo.PPO, _GAME.spec),
    "IMPALA": functools.partial(impala.IMPALA, _GAME.spec),
    "DQN": functools.partial(dqn.DQN, _GAME.spec),
    "PQN": functools.partial(pqn.PQN, _GAME.spec),
    "R2D2": functools.partial(r2d2.R2D2, _GAME.spec),
    "SAC": functools.partial(sac.SAC, _GAME.spec),
    "MuZero": functools.partial(muzero.MuZero, _GAME.spec),
    "AlphaZero": functools.partial(alphazero.AlphaZero, wrappers.Searchable(_GAME).spec),
}


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("PPO", "epochs", 0),
        ("PPO", "num_minibatches", 1.5),
        ("PPO", "gamma", 1.1),
        ("PPO", "gamma", None),
        ("PPO", "gamma", "0.9"),
        ("PPO", "gae_lambda", -0.1),
        ("PPO", "adam_epsilon", 0.0),
        ("PPO", "value_clip_epsilon", 0.0),
        ("PPO", "entropy_cost", math.nan),
        ("PPO", "learning_rate", None),
        ("PPO", "learning_rate", True),
        ("IMPALA", "num_minibatches", 0),
        ("IMPALA", "max_grad_norm", 0.0),
        ("IMPALA", "max_grad_norm", math.inf),
        ("IMPALA", "vtrace_lambda", 1.1),
        ("IMPALA", "rmsprop_decay", -0.1),
        ("IMPALA", "clip_rho", 0.0),
        ("DQN", "replay_ratio", math.inf),
        ("DQN", "replay_ratio", None),
        ("DQN", "target_rate", math.nan),
        ("PQN", "epochs", 0),
        ("PQN", "epsilon", 1.5),
        ("PQN", "q_lambda", None),
        ("R2D2", "epsilon_exponent", None),
        ("SAC", "reward_scale", None),
        ("MuZero", "final_temperature", None),
        *((name, "reward_clip", value) for name in _AGENTS for value in (0.0, -1.0, math.inf)),
    ],
)
def test_impossible_options_are_errors(name, option, value):
    with pytest.raises(errors.UserError, match=f"{name}.{option}: expected") as caught:
        _AGENTS[name](**{option: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", _AGENTS)
def test_none_leaves_out_what_is_optional(name):
    _AGENTS[name](anneal_steps=None, max_grad_norm=None, reward_clip=None)
