"""The contract, for every environment in the list."""

import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from podracers.training import check
from tests.environments import contract

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", params=contract.ENVIRONMENTS, name="subject")
def _subject(request):
    """An environment and its random episodes, recorded once for all tests."""
    candidate = contract.ENVIRONMENTS[request.param]()
    return candidate, contract.record(candidate)


def test_the_contract_holds(subject):
    candidate, episodes = subject
    contract.check_specs(candidate.spec, episodes)
    contract.check_stream(candidate.spec, episodes.timestep)
    if (candidate.spec.max_episode_steps or contract.NUM_STEPS) < contract.NUM_STEPS:
        assert np.all(np.any(episodes.timestep.last(), axis=0))
    contract.check_masks(candidate.spec, episodes)
    contract.check_render(candidate, episodes)


@pytest.mark.parametrize("name", ["catch", "flat_action"])
def test_check_environment_passes(name):
    check.check_environment(contract.ENVIRONMENTS[name](), num_steps=60)


def test_specs_touch_no_device():
    program = (
        "from tests.environments import contract\n"
        "for make in contract.ENVIRONMENTS.values(): make().spec.zero_observation()\n"
        "import jax._src.xla_bridge as bridge\n"
        "assert not bridge._backends, bridge._backends\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_the_contract_can_fail():
    """A recording with one flaw does not pass."""
    candidate = contract.ENVIRONMENTS["catch"]()
    episodes = contract.record(candidate)
    timestep = episodes.timestep
    contract.check_stream(candidate.spec, timestep)
    flawed_discount = np.where(timestep.last(), 0.5, timestep.discount)
    with pytest.raises(AssertionError):
        contract.check_stream(candidate.spec, timestep._replace(discount=flawed_discount))
    with pytest.raises(AssertionError):
        contract.check_stream(candidate.spec, timestep._replace(reward=timestep.reward + 1))
    rolled = jax.tree.map(lambda leaf: leaf * 2, timestep.observation)
    with pytest.raises(AssertionError):
        flawed = episodes._replace(timestep=timestep._replace(observation=rolled))
        contract.check_specs(candidate.spec, flawed)
