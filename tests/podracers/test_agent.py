"""Tests of the greedy form of an agent."""

import dataclasses

import pytest

from podracers import agent


@dataclasses.dataclass(frozen=True, eq=False)
class Sampling:
    """Has the option of a stochastic policy."""

    gamma: float = 0.9
    greedy_evaluation: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Foreign:
    """Has none."""

    gamma: float = 0.9


def test_the_greedy_form_differs_in_its_option_alone():
    greedy = agent.greedy(Sampling(gamma=0.5))
    assert isinstance(greedy, Sampling)
    assert dataclasses.asdict(greedy) == {"gamma": 0.5, "greedy_evaluation": True}


@pytest.mark.parametrize("given", [Sampling(greedy_evaluation=True), Foreign(), object()])
def test_who_is_greedy_already_or_cannot_choose_has_no_greedy_form(given):
    assert agent.greedy(given) is None
