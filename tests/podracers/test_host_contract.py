"""`host_contract` finds each fault of a host environment, and reports it in one line."""

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from dm_env import specs

from environments import probes
from podracers import environment, host_contract, types
from podracers.sebulba import jax_host


class Host:
    """Streams of random numbers, each with a generator of its own; episodes of five steps."""

    def __init__(self, factory, seeds):
        self._factory, self.num_envs = factory, len(seeds)
        self._generators = [np.random.default_rng(int(seed)) for seed in seeds]
        self._time = np.zeros(self.num_envs, np.int32)

    def reset(self):
        return self._factory.spoil(self, self._timestep())

    def send(self, action):
        assert action.shape == (self.num_envs,) and np.all(action < 2)
        self._time = np.where(self._time == 5, 0, self._time + 1)

    def recv(self):
        return self._factory.spoil(self, self._timestep())

    def close(self):
        """Nothing has to be closed."""

    def _timestep(self):
        step_type = np.select([self._time == 0, self._time == 5], [types.FIRST, types.LAST], 1)
        return types.TimeStep(
            np.array([generator.random(2, np.float32) for generator in self._generators]),
            np.where(self._time == 0, 0.0, 1.0).astype(np.float32),
            np.ones(self.num_envs, np.float32),
            step_type.astype(np.int8),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Factory:
    """Makes `host`s; `spoil` replaces their time steps."""

    spoil: Any = lambda host, timestep: timestep
    host: type = Host

    spec = environment.EnvironmentSpec(
        "Factory", specs.BoundedArray((2,), np.float32, 0.0, 1.0), specs.DiscreteArray(2), 5
    )

    def make(self, key, env_id, num_threads):
        return self.host(self, environment.stream_seeds(key, env_id))


def _spoilt(**fields):
    return Factory(lambda _, t: t._replace(**{name: f(t) for name, f in fields.items()}))


def _noise(draw):
    """Returns a factory whose observations contain a number of `draw(host)`."""
    return Factory(lambda host, t: t._replace(observation=t.observation * np.float32(draw(host))))


class Reused(Host):
    """Writes into the array that it has returned."""

    def recv(self):
        timestep = super().recv()
        if not hasattr(self, "buffer"):
            self.buffer = timestep.observation
        self.buffer[:] = timestep.observation
        return timestep._replace(observation=self.buffer)


class Seeded(Host):
    """Seeds NumPy's global generator, so that streams depend on the others of the process."""

    def __init__(self, factory, seeds):
        super().__init__(factory, seeds)
        np.random.seed(seeds[0])


class Restarted(Host):
    """Resets in the step that ends an episode."""

    def send(self, action):
        super().send(action)
        self._time[self._time == 5] = 0


class Drawn(Factory):
    """Draws a time step in grey."""

    def render(self, timestep):
        assert timestep.reward.shape == ()
        return np.zeros((4, 4), np.uint8)


class Filmed(Factory):
    """Its hosts draw as `Drawn` does."""

    def filmed(self):
        return Factory(host=type("Film", (Host,), {"render": lambda _: [np.zeros((4, 4))]}))


@dataclasses.dataclass
class Thawed:
    """Could change while it is used."""

    spec = Factory.spec
    make = Factory.make


FAULTS = {
    "the environment has no spec": type("Gone", (), {"make": Factory.make})(),
    "the factory is not a frozen dataclass": Thawed(),
    "make returned an object without close": Factory(
        host=type("Open", (), {"__init__": Host.__init__})
    ),
    "num_envs is 7 for 4 streams": Factory(
        host=type("Seven", (Host,), {"num_envs": property(lambda _: 7, lambda *_: None)})
    ),
    "reset returned tuple, expected types.TimeStep": Factory(lambda _, t: (t.observation, {})),
    "reset: leaf 'reward': expected float32[4], got float64[4]": _spoilt(
        reward=lambda t: t.reward.astype(np.float64)
    ),
    "reset: leaf 'discount': expected float32[4], got float[]": _spoilt(discount=lambda t: 1.0),
    "an array changed after it was returned": Factory(host=Reused),
    "step returned a step_type other than MID or LAST": Factory(host=Restarted),
    "a LAST time step has a discount other than 0 (terminated) or 1": _spoilt(
        discount=lambda t: np.where(t.last(), 0.5, 1.0).astype(np.float32)
    ),
    "observation is NaN or infinite": _spoilt(observation=lambda t: t.observation * np.inf),
    "observation leaves the bounds of its spec": _spoilt(observation=lambda t: t.observation + 1),
    "render: expected uint8[height, width, 3], got uint8[4, 4]": Drawn(),
    "render: expected uint8[height, width, 3], got float64[4, 4]": Filmed(),
    "it draws from NumPy's global generator, not from": _noise(lambda _: np.random.random()),
    "one seed gives different episodes: it draws from NumPy's global generator": Factory(
        lambda _, t: t._replace(observation=t.observation * np.float32(np.random.random())), Seeded
    ),
    "it draws from Python's module `random`, not from": _noise(lambda _: random.random()),
    "one seed gives different episodes: it draws from a generator without a seed": _noise(
        lambda _: np.random.default_rng().random()
    ),
    "a stream depends on its neighbours": _noise(lambda host: 1.0 / host.num_envs),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_in_one_line(fault):
    faults = host_contract.environment_faults(FAULTS[fault], num_steps=20)
    assert any(fault in line for line in faults), faults
    assert "\n" not in "".join(faults)


def test_a_good_environment_has_no_fault_and_streams_that_differ():
    assert host_contract.environment_faults(Factory(), num_steps=20) == []
    two_agents = jax_host.JaxHostEnvironment(probes.TwoAgents())
    assert host_contract.environment_faults(two_agents, num_steps=20) == []
    recordings = host_contract.equal_actions(Factory(), num_steps=20)
    assert host_contract.num_different(recordings) == 8
    seedless = _noise(lambda _: 0.0)
    assert host_contract.num_different(host_contract.equal_actions(seedless, num_steps=20)) == 1


def test_another_instance_has_to_be_equal():
    makers = [_noise(lambda _, scale=scale: scale) for scale in (0.5, 0.75)]
    faults = host_contract.environment_faults(makers[0], 20, again=makers[1])
    assert len(faults) == 1 and faults[0].startswith("one seed gives different episodes")
