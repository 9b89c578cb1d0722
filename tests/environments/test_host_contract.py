"""The contract test of host environments notices each kind of flaw."""

import dataclasses

import jax
import numpy as np
import pytest

from environments import gymnasium
from podracers import types
from tests.environments import host_contract

SOUND = gymnasium.Gymnasium("CartPole-v1", {"max_episode_steps": 12})


def _double(timestep):
    return timestep._replace(observation=timestep.observation.astype(np.float64))


def _reward(timestep):
    return timestep._replace(reward=timestep.reward + np.float32(1.0))


def _discount(timestep):
    ended = timestep.step_type == types.FIRST
    return timestep._replace(discount=np.where(ended, np.float32(0.0), timestep.discount))


def _never_last(timestep):
    kept = np.where(timestep.last(), np.int8(types.MID), timestep.step_type)
    return timestep._replace(step_type=kept)


def _half(timestep):
    return timestep._replace(discount=np.where(timestep.last(), np.float32(0.5), np.float32(1.0)))


def _not_a_number(timestep):
    return timestep._replace(observation=timestep.observation * np.float32("nan"))


def _tail(timestep):
    return jax.tree.map(lambda leaf: leaf[1:], timestep)


CHANGES = [_double, _reward, _discount, _never_last, _half, _not_a_number, _tail]
SEEDS = ["one for all", "by place", "by clock", "no key"]


@dataclasses.dataclass(frozen=True, eq=False)
class Flawed:
    """CartPole with a flaw: in its time steps, in its buffers or in its seeds."""

    change: object = staticmethod(lambda timestep: timestep)
    reuses: bool = False
    seeds: str = ""
    count: list = dataclasses.field(default_factory=list)

    @property
    def spec(self):
        return SOUND.spec

    def make(self, key, env_id, num_threads):
        self.count.append(None)
        if self.seeds == "one for all":
            env_id = np.zeros_like(env_id)
        elif self.seeds == "by place":
            env_id = np.arange(len(env_id), dtype=np.int32)
        elif self.seeds == "by clock":
            env_id = env_id + 100 * len(self.count)
        elif self.seeds == "no key":
            key = jax.random.key(0)
        return _Host(SOUND.make(key, env_id, num_threads), self)


class _Host:
    def __init__(self, inner, factory):
        self._inner, self._factory = inner, factory
        self.num_envs = inner.num_envs
        self.send, self.close = inner.send, inner.close
        self._buffer = None

    def reset(self):
        return self._pass_on(self._inner.reset())

    def recv(self):
        return self._pass_on(self._inner.recv())

    def _pass_on(self, timestep):
        timestep = self._factory.change(timestep)
        if not self._factory.reuses:
            return timestep
        if self._buffer is None:
            self._buffer = timestep.observation
        self._buffer[:] = timestep.observation
        return timestep._replace(observation=self._buffer)


def test_what_is_sound_passes():
    host_contract.check_contract(Flawed(), 60)


@pytest.mark.parametrize("change", CHANGES)
def test_a_flaw_in_the_time_steps_is_noticed(change):
    with pytest.raises(AssertionError):
        host_contract.check_contract(Flawed(change), 60)


def test_a_buffer_that_is_used_again_is_noticed():
    with pytest.raises(AssertionError):
        host_contract.check_contract(Flawed(reuses=True), 60)


@pytest.mark.parametrize("seeds", SEEDS)
def test_a_flaw_in_the_seeds_is_noticed(seeds):
    with pytest.raises(AssertionError):
        host_contract.check_contract(Flawed(seeds=seeds), 60)
