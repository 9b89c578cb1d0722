"""Tests of members of a population that differ in options of their agent."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from agents.parts import options
from podracers import anakin, evaluation, population
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
    numbers = {option: values[1] for option, values in OWN[name].items()}
    alone = _runner(dataclasses.replace(agent, **numbers), environment)
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


def test_the_lowest_quarter_copies_the_highest_and_explores():
    """As slow loops do with the same draws."""
    ranges = {"rate": (0.01, 1.0), "cost": (0.0, 0.5)}
    exploit, kinds = jax.jit(population.exploit), set()
    explore = jax.jit(functools.partial(population.explore, ranges=ranges))
    for seed in range(20):
        key = jax.random.key(seed)
        returns = np.random.default_rng(seed).integers(0, 4, 9).astype(np.float32)
        lowest, source = exploit(returns, key)
        order = sorted(range(9), key=lambda member: (returns[member], member))
        chosen = jax.random.choice(key, np.array(order[-2:]), (2,))
        assert lowest.tolist() == order[:2]
        for member, copied, draw in zip(lowest, source, chosen):
            assert copied == (draw if returns[draw] > returns[member] else member)
        before = {"rate": np.float32([0.01, 0.1, 0.9]), "cost": np.float32([0.0, 0.2, 0.45])}
        after = explore(before, key=key)
        for index, name in enumerate(sorted(before)):
            up, draws, drawn = _draws(jax.random.fold_in(key, index), 3)
            low, high = ranges[name]
            for member in range(3):
                expected = min(max(before[name][member] * (1.25 if up[member] else 0.8), low), high)
                if drawn[member]:
                    share = float(draws[member])
                    expected = low + (high - low) * share
                    if low > 0:
                        expected = np.exp(np.log(low) + share * (np.log(high) - np.log(low)))
                np.testing.assert_allclose(after[name][member], expected, rtol=1e-5)
                kinds.add((name, bool(drawn[member]), bool(up[member])))
    assert len(kinds) == 8


def _draws(key, size):
    factor_key, kind_key, draw_key = jax.random.split(key, 3)
    up = jax.random.bernoulli(factor_key, shape=(size,))
    drawn = jax.random.bernoulli(kind_key, 0.25, (size,))
    return up, jax.random.uniform(draw_key, (size,)), drawn


@pytest.fixture(scope="module", name="evolving")
def _evolving():
    """A runner of four members, which are compared after every third update."""
    rates = {"learning_rate": (0.001, 0.002, 0.005, 0.01)}
    ranges = {"R2D2.learning_rate": (0.0001, 0.1)}
    options = {"population": 4, "population_values": rates, "pbt_period": 3, "pbt_ranges": ranges}
    return _runner(*contract.AGENTS["r2d2"](), **options)


@pytest.mark.exact
def test_a_population_evolves_alike_after_any_resume(evolving):
    """A copy continues learner, replay and streams of the other, with new keys."""
    runner = evolving
    before = streams.to_numpy(runner.step(runner.init(SEED), 2)[0])
    state, third = runner.step(runner.step(runner.init(SEED), 2)[0], 1)
    source = np.asarray(third.means["pbt/source"].result(), int)
    (copy,) = np.flatnonzero(source != np.arange(4))
    after = streams.to_numpy(state)
    parts = after.learner, after.memory, after.streams._replace(environment=())
    pairs = [x[np.array([copy, source[copy]])] for x in jax.tree.leaves(parts)]
    streams.assert_same(*zip(*pairs))
    own_keys = [x.streams.environment.key for x in (before, after)]
    streams.assert_same(*own_keys)
    rates = [x.evolution.options["learning_rate"] for x in (before, after)]
    assert rates[1][copy] not in rates[0]
    others = np.delete(np.arange(4), copy)
    np.testing.assert_array_equal(rates[1][others], rates[0][others])
    assert not np.any(after.evolution.returns.count)
    # A resumed run puts arrays of the host on devices.
    shardings = jax.tree.map(lambda x: x.sharding, state)
    whole = runner.step(runner.init(SEED), 7)[0]
    resumed = runner.step(jax.device_put(jax.device_get(state), shardings), 4)[0]
    streams.assert_same(streams.to_numpy(resumed), streams.to_numpy(whole))


@pytest.mark.slow
def test_a_population_evolves_alike_on_any_devices(evolving):
    alone = dataclasses.replace(evolving, num_devices=1)
    whole, single = (
        streams.to_numpy(runner.step(runner.init(SEED), 7)[0]) for runner in (evolving, alone)
    )
    streams.assert_close(single.evolution, whole.evolution, rtol=1e-4)
    streams.assert_close(single.learner, whole.learner, rtol=1e-2, atol=1e-3)
