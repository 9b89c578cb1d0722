"""Tests of the greedy form of an agent, and of states without replay."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from agents import replay
from podracers import agent, types


@dataclasses.dataclass(frozen=True, eq=False)
class Sampling:
    """An agent with the option of a stochastic policy."""

    gamma: float = 0.9
    greedy_evaluation: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Foreign:
    """An agent without that option."""

    gamma: float = 0.9


def test_the_greedy_form_differs_in_its_option_alone():
    greedy = agent.greedy(Sampling(gamma=0.5))
    assert isinstance(greedy, Sampling)
    assert dataclasses.asdict(greedy) == {"gamma": 0.5, "greedy_evaluation": True}


@pytest.mark.parametrize("given", [Sampling(greedy_evaluation=True), Foreign(), object()])
def test_agents_without_a_greedy_form(given):
    assert agent.greedy(given) is None


def test_replay_is_removed_and_restored():
    def state(value: float) -> types.AgentState:
        memory = replay.Memory(*jnp.full((4, 3), value))
        return types.AgentState({"w": jnp.full(2, value)}, {"replay": memory, "steps": value})

    bare = agent.without_replay(state(1.0))
    assert bare.memory == {"replay": (), "steps": 1.0}
    whole = agent.with_replay(bare, state(2.0))
    assert whole.memory["replay"] is not None and whole.memory["steps"] == 1.0
    np.testing.assert_array_equal(whole.memory["replay"].head, [2.0] * 3)
    np.testing.assert_array_equal(whole.learner["w"], [1.0] * 2)
    np.testing.assert_array_equal(
        agent.with_replay(state(3.0), state(2.0)).memory["replay"].head, [3.0] * 3
    )
