"""The contract of JAX environments; an environment joins with one line in `ENVIRONMENTS`."""

import jax
import numpy as np
import pytest

from environments import cartpole, catch, gridworld, pendulum, probes, randomized, wrappers
from environments.meta import delayed_chains, lifetimes, tabular_grids
from podracers import contract
from podracers.sebulba import jax_host
from tests import streams
from tests.environments import host_contract

ENVIRONMENTS = {
    "catch": catch.Catch,
    "gridworld": gridworld.GridWorld,
    "cartpole": cartpole.CartPole,
    "pendulum": lambda: pendulum.Pendulum(max_episode_steps=40),
    "tabular_grid": lambda: lifetimes.FixedTask(tabular_grids.TabularGrids(("small",))),
    "delayed_chain": lambda: lifetimes.FixedTask(delayed_chains.DelayedChains(("distractor",))),
    "lifetimes": lambda: lifetimes.Lifetimes(
        delayed_chains.DelayedChains(("short",)), num_envs=2, period=10, max_periods=4
    ),
    "multi_discrete_masked": lambda: probes.MultiDiscreteReward(masked=True),
    "flat_action": lambda: wrappers.FlattenAction(probes.MultiDiscreteReward(masked=True)),
    "sticky_actions": lambda: wrappers.StickyActions(cartpole.CartPole),
    "time_limit": lambda: wrappers.TimeLimit(cartpole.CartPole, max_episode_steps=10),
    "select_observation": lambda: wrappers.SelectObservation(probes.MaskedAction, ("features",)),
    "searchable": lambda: wrappers.Searchable(catch.Catch),
    "randomized": lambda: randomized.Randomized(
        cartpole.CartPole, {"gravity": (0.8, 1.2), "pole_mass": (0.5, 2.0)}, observe=True
    ),
    "truncation": probes.Truncation,
    "memory": probes.Memory,
}


FAST = ("catch", "lifetimes", "multi_discrete_masked", "searchable")


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x not in FAST)) for x in ENVIRONMENTS]
)
def test_the_contract_holds(name):
    candidate = ENVIRONMENTS[name]()
    contract.check_environment(candidate, num_steps=150)
    if hasattr(candidate, "render"):
        image = candidate.render(jax.jit(candidate.reset)(jax.random.key(0))[0])
        assert image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3
        assert min(image.shape[:2]) >= 200 and image.std() > 0.0


def test_the_contract_holds_on_the_host():
    """`tests/podracers/test_parity.py` compares the streams with those of a device."""
    environment = streams.RandomEpisodes(actions="multi_discrete", masked=True)
    host_contract.check_contract(jax_host.JaxHostEnvironment(environment), 60)
