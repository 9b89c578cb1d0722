"""Tests of the greedy form of an agent, and of states without replay."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from agents import replay
from podracers import agent, types


@dataclasses.dataclass(frozen=True, eq=False)
class Sampling:
    """An agent with the option of a stochastic policy."""

    gamma: float = 0.9
    greedy_evaluation: bool = False


def test_the_greedy_form_differs_in_one_option():
    greedy = agent.greedy(Sampling(gamma=0.5))
    assert dataclasses.asdict(greedy) == {"gamma": 0.5, "greedy_evaluation": True}
    assert agent.greedy(greedy) is agent.greedy(object()) is None


def test_replay_is_removed_and_restored():
    def state(value: float) -> types.AgentState:
        memory = replay.Memory(*jnp.full((4, 3), value))
        return types.AgentState({"w": jnp.full(2, value)}, {"replay": memory, "steps": value})

    bare = agent.without_replay(state(1.0))
    assert bare.memory == {"replay": (), "steps": 1.0}
    whole = agent.with_replay(bare, state(2.0))
    assert whole.memory["steps"] == 1.0
    np.testing.assert_array_equal(whole.memory["replay"].head, [2.0] * 3)
    np.testing.assert_array_equal(whole.learner["w"], [1.0] * 2)
    kept = agent.with_replay(state(3.0), state(2.0))
    np.testing.assert_array_equal(kept.memory["replay"].head, [3.0] * 3)
