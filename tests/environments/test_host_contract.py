"""`host_contract` finds each kind of flaw; sound environments are in their own tests."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from environments import gymnasium
from podracers import types
from tests.environments import host_contract

SOUND = gymnasium.Gymnasium("CartPole-v1", {"max_episode_steps": 12})
BUFFER = np.zeros((host_contract.NUM_STREAMS, 4), np.float32)


def _discount(timestep):
    return timestep._replace(discount=np.where(timestep.last(), np.float32(0.5), np.float32(1.0)))


def _never_last(timestep):
    kept = np.where(timestep.last(), np.int8(types.MID), timestep.step_type)
    return timestep._replace(step_type=kept)


def _reuse(timestep):
    BUFFER[:] = timestep.observation
    return timestep._replace(observation=BUFFER)


FLAWS = {
    "dtype": lambda x: x._replace(observation=x.observation.astype(np.float64)),
    "reward at FIRST": lambda x: x._replace(reward=x.reward + np.float32(1.0)),
    "discount at LAST": _discount,
    "never LAST": _never_last,
    "NaN": lambda x: x._replace(observation=x.observation * np.float32("nan")),
    "batch size": lambda x: jax.tree.map(lambda leaf: leaf[1:], x),
    "reused buffer": _reuse,
}
SEEDS = {
    "one for all": lambda key, env_id, count: (key, np.zeros_like(env_id)),
    "by place": lambda key, env_id, count: (key, np.arange(len(env_id), dtype=np.int32)),
    "by clock": lambda key, env_id, count: (key, env_id + 100 * count),
    "no key": lambda key, env_id, count: (jax.random.key(0), env_id),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Flawed:
    """CartPole with a flaw in its time steps or its seeds."""

    flaw: str
    made: list = dataclasses.field(default_factory=list)

    @property
    def spec(self):
        return SOUND.spec

    def make(self, key, env_id, num_threads):
        self.made.append(None)
        if self.flaw in SEEDS:
            key, env_id = SEEDS[self.flaw](key, env_id, len(self.made))
        return _Host(SOUND.make(key, env_id, num_threads), FLAWS.get(self.flaw, lambda x: x))


class _Host:
    def __init__(self, inner: Any, change: Any):
        self.num_envs, self.send, self.close = inner.num_envs, inner.send, inner.close
        self.reset = lambda: change(inner.reset())
        self.recv = lambda: change(inner.recv())


@pytest.mark.parametrize("flaw", [*FLAWS, *SEEDS])
def test_a_flaw_is_found(flaw):
    with pytest.raises(AssertionError):
        host_contract.check_contract(Flawed(flaw), 60)
