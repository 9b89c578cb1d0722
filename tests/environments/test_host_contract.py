"""The contract test of host environments fails for each kind of flaw."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from environments import gymnasium
from podracers import types
from tests.environments import host_contract

SOUND = gymnasium.Gymnasium("CartPole-v1", {"max_episode_steps": 12})


def _discount(timestep):
    return timestep._replace(discount=np.where(timestep.last(), np.float32(0.5), np.float32(1.0)))


def _never_last(timestep):
    kept = np.where(timestep.last(), np.int8(types.MID), timestep.step_type)
    return timestep._replace(step_type=kept)


FLAWS = {
    "dtype": lambda x: x._replace(observation=x.observation.astype(np.float64)),
    "reward at FIRST": lambda x: x._replace(reward=x.reward + np.float32(1.0)),
    "discount at LAST": _discount,
    "never LAST": _never_last,
    "NaN": lambda x: x._replace(observation=x.observation * np.float32("nan")),
    "batch size": lambda x: jax.tree.map(lambda leaf: leaf[1:], x),
}
SEEDS = {
    "one for all": lambda key, env_id, count: (key, np.zeros_like(env_id)),
    "by place": lambda key, env_id, count: (key, np.arange(len(env_id), dtype=np.int32)),
    "by clock": lambda key, env_id, count: (key, env_id + 100 * count),
    "no key": lambda key, env_id, count: (jax.random.key(0), env_id),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Flawed:
    """CartPole with a flaw in its time steps, its buffers or its seeds."""

    change: Any = lambda timestep: timestep
    reuses: bool = False
    seeds: Any = lambda key, env_id, count: (key, env_id)
    made: list = dataclasses.field(default_factory=list)

    @property
    def spec(self):
        return SOUND.spec

    def make(self, key, env_id, num_threads):
        self.made.append(None)
        seeds = vars(self)["seeds"](key, env_id, len(self.made))
        return _Host(SOUND.make(*seeds, num_threads), self)


class _Host:
    def __init__(self, inner, factory):
        self._inner, self._factory, self._buffer = inner, factory, None
        self.num_envs, self.send, self.close = inner.num_envs, inner.send, inner.close

    def reset(self):
        return self._pass_on(self._inner.reset())

    def recv(self):
        return self._pass_on(self._inner.recv())

    def _pass_on(self, timestep):
        timestep = vars(self._factory)["change"](timestep)
        if not self._factory.reuses:
            return timestep
        if self._buffer is None:
            self._buffer = timestep.observation
        self._buffer[:] = timestep.observation
        return timestep._replace(observation=self._buffer)


def test_a_sound_environment_passes():
    host_contract.check_contract(Flawed(), 60)


@pytest.mark.parametrize(
    "flaw",
    [{"change": flaw} for flaw in FLAWS.values()]
    + [{"seeds": flaw} for flaw in SEEDS.values()]
    + [{"reuses": True}],
    ids=[*FLAWS, *SEEDS, "reused buffer"],
)
def test_a_flaw_is_found(flaw):
    with pytest.raises(AssertionError):
        host_contract.check_contract(Flawed(**flaw), 60)
