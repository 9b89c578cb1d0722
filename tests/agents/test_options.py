"""Options out of their bounds are refused by name."""

import pytest

from podracers import errors
from tests.agents import experience


@pytest.mark.parametrize(
    ("algorithm", "option", "value"),
    [
        ("ppo", "epochs", 0),
        ("ppo", "num_minibatches", 1.5),
        ("ppo", "gamma", 1.1),
        ("ppo", "gae_lambda", -0.1),
        ("impala", "num_minibatches", 0),
        ("impala", "max_grad_norm", 0.0),
        ("impala", "vtrace_lambda", 1.1),
        ("impala", "rmsprop_decay", -0.1),
        ("impala", "clip_rho", 0.0),
    ],
)
def test_impossible_options_are_errors(algorithm, option, value):
    name = f"{experience.ALGORITHMS[algorithm].func.__name__}.{option}"
    with pytest.raises(errors.UserError, match=f"{name}: expected"):
        experience.ALGORITHMS[algorithm](**{option: value})
