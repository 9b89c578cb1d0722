"""Tests of members of a population that differ in options of their agent."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from agents.parts import options
from podracers import anakin, errors, evaluation, population
from tests import contract, streams


@dataclasses.dataclass(frozen=True, eq=False)
class Toy:
    """An agent with options and without methods."""

    rate: float = options.positive(0.1)
    bound: float | None = None
    text: "float | None" = None
    count: int = 3

    def __post_init__(self):
        options.check(self)
        _ = self.double

    @functools.cached_property
    def double(self):
        return 2 * self.rate


def test_values_are_repeated_in_turn():
    values = population.by_option(Toy(), 4, {"toys.Toy.rate": [1, 2], "bound": (1, 2, 3, 4)})
    assert values == {"rate": (1.0, 2.0, 1.0, 2.0), "bound": (1.0, 2.0, 3.0, 4.0)}
    assert population.by_option(Toy(), 4, values) == values
    assert population.by_option(Toy(), 2, {"text": (1, 2)}) == {"text": (1.0, 2.0)}
    variant = type("Variant", (Toy,), {})()
    for name in ("Toy.rate", "mine.Variant.rate", "toys.Toy.rate"):
        assert population.by_option(variant, 2, {name: (1, 2)}) == {"rate": (1.0, 2.0)}
    agent = population.member(Toy(), values, 3)
    assert (agent.rate, agent.bound, agent.count, agent.double) == (2.0, 4.0, 3, 4.0)


# Options of optimizers, acting, preprocessing and losses; the default of one is None.
OWN = {
    "ppo": {
        "learning_rate": (0.001, 0.02),
        "entropy_cost": (0.0, 0.1),
        "gamma": (0.9, 0.99),
        "clip_epsilon": (0.1, 0.3),
        "max_grad_norm": (0.05, 1.0),
        "reward_clip": (0.1, 2.0),
    },
    "dqn": {
        "learning_rate": (0.001, 0.02),
        "gamma": (0.5, 0.99),
        "epsilon": (0.9, 0.1),
        "evaluation_epsilon": (1.0, 0.0),
        "importance_exponent": (0.1, 0.9),
        "target_rate": (0.1, 1.0),
    },
}
SEED = 3


def _runner(agent, environment, **options):
    return anakin.Anakin(
        agent, environment, contract.NUM_ENVS, contract.ROLLOUT_LENGTH, num_devices=4, **options
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_a_member_is_the_run_of_its_seed_and_its_values(name):
    agent, environment = contract.AGENTS[name]()
    together = _runner(agent, environment, population=2, population_values=OWN[name])
    state, report = together.step(together.init(SEED), 4)
    params = together.actor_params(state)
    key = evaluation.run_key(SEED)
    evaluator = evaluation.Evaluator(
        agent, environment, 8, 2, together.population_values, max_steps=20
    )
    evaluated = evaluator.run(params, key)
    results = streams.to_numpy((state.learner, params, report.means))
    own = {option: values[1] for option, values in OWN[name].items()}
    alone = _runner(dataclasses.replace(agent, **own), environment)
    state, report = alone.step(alone.init(SEED + 1), 4)
    params = alone.actor_params(state)
    member = jax.tree.map(lambda x: x[1], results)
    streams.assert_close(member, (state.learner, params, report.means), rtol=1e-3, atol=1e-4)
    alone_evaluator = dataclasses.replace(
        evaluator, agent=alone.agent, population=1, population_values={}
    )
    played = alone_evaluator.run(params, key)
    np.testing.assert_allclose(evaluated.returns[1], played.returns, rtol=1e-3, atol=1e-4)
    assert np.any(evaluated.returns[0] != evaluated.returns[1])


@pytest.mark.parametrize(
    ("name", "option", "values"),
    [("ppo", "anneal_steps", (100.0, 1000.0)), ("dqn", "priority_exponent", (0.4, 0.6))],
)
def test_options_that_determine_the_program_cannot_differ(name, option, values):
    agent, environment = contract.AGENTS[name]()
    own = {"gamma": (0.9, 0.99), option: values}
    runner = _runner(agent, environment, population=2, population_values=own)
    with pytest.raises(errors.UserError, match=f"cannot differ .* gamma, {option} "):
        runner.trace(0)
