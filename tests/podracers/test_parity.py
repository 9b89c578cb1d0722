"""Anakin on four devices and Sebulba on one give equal results, with equal keys and no lag."""

import dataclasses
import functools

import numpy as np
import pytest

from agents import alphazero, muzero, ppo
from agents.networks import muzero as muzero_networks
from environments import pgx, probes, wrappers
from podracers import metrics, runner, sebulba
from tests import contract, streams

UPDATES = 9  # `ppo_scaled` clips at 0 in the tenth, where rounding decides which gradients pass


def _results(subject: runner.Runner, updates: int = UPDATES):
    """Returns the rollouts, the final learner and the latest means of a run."""
    history = contract.run(subject, updates)
    means = {name: mean.result() for name, mean in history.reports[-1].means.items()}
    subject.close()
    return history.rollouts, history.states[-1].learner.inner, means


def _sebulba(agent, environment, **options) -> sebulba.Sebulba:
    options = {"actor_devices": (0,), "learner_devices": (0,), "lag": 0} | options
    sizes = contract.NUM_ENVS, contract.ROLLOUT_LENGTH
    return sebulba.Sebulba(contract.Recorder(agent), environment, *sizes, **options)


def _anakin(agent, environment) -> runner.Runner:
    """Returns the same runner as `tests/test_agents.py`, so that its program is in the cache."""
    return contract.RUNNERS["anakin"].make(contract.Recorder(agent), environment, 4)


def _assert_same(actual, expected, tolerance: float = 1e-4) -> None:
    """Different programs may round differently, and updates amplify the differences."""
    streams.assert_same(actual[0][0].timestep.step_type, expected[0][0].timestep.step_type)
    streams.assert_close(actual[:2], expected[:2], rtol=tolerance, atol=tolerance)
    streams.assert_close(actual[2], expected[2], rtol=10 * tolerance, atol=tolerance)


# The other agents of `tests/contract.py` have the same kinds of states.
SLOW = ("rainbow", "r2d2_attention", "sac_gru", "muzero", "muzero_sampled")
SPLIT = {"actor_devices": (0, 1), "learner_devices": (2, 3), "batches_per_actor": 2}


@pytest.mark.exact  # on one backend
@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("ppo", SPLIT, id="ppo-2 to 2"),
        pytest.param(
            *("ppo_gru_frames", {"actor_devices": (0, 0), "learner_devices": (1,)}),
            id="ppo_gru_frames-2 to 1",
            marks=pytest.mark.slow,
        ),
        *(pytest.param(name, {}, id=name, marks=pytest.mark.slow) for name in SLOW),
    ],
)
def test_without_lag_both_runners_learn_the_same(name, options):
    """On any split of Sebulba's devices."""
    agent, environment = contract.AGENTS[name]()
    # A search divides its values by their range, which magnifies rounding errors: probabilities
    # have differed by 7e-4, depending on the processor and on JAX's version.
    tolerance = 2e-3 if isinstance(agent, muzero.MuZero) else 1e-4
    expected = _results(_anakin(agent, environment))
    _assert_same(_results(_sebulba(agent, environment, **options)), expected, tolerance)


# Every agent; all have a mask. In the second game a player may move twice, and of two agents one
# may go out early.
GAMES = {
    "two_agents": probes.TwoAgents,
    "tic_tac_toe": functools.partial(pgx.Pgx, "tic_tac_toe", opening_moves=3),
    "twice": functools.partial(streams.RandomEpisodes, masked=True, players=2),
}
PLAYERS = ("ppo", "impala", "vmpo", "pqn", "rainbow", "r2d2", "sac_discrete_lstm", "muzero")


FAST = (("pqn", "two_agents"), ("pqn", "tic_tac_toe"))


@pytest.mark.exact
@pytest.mark.parametrize(
    ("name", "game"),
    [
        pytest.param(name, game, marks=[pytest.mark.slow] * ((name, game) not in FAST))
        for name in (*PLAYERS, "alphazero")
        for game in GAMES
        if (name, game) != ("alphazero", "two_agents")  # `Searchable` is for one agent
    ],
)
def test_agents_play_themselves_alike_under_both_runners(name, game):
    """Anakin on four devices, Sebulba on one or two; a resumed run continues bit for bit."""
    if game == "tic_tac_toe":
        pytest.importorskip("pgx")
    candidate = GAMES[game]()
    count = candidate.spec.num_agents
    if name == "alphazero":
        candidate = wrappers.Searchable(candidate)
        network = contract.tiny_network(make=muzero_networks.policy_value)
        agent = alphazero.AlphaZero(candidate.spec, network=network, **contract.SEARCH)
    else:
        agent = dataclasses.replace(contract.AGENTS[name]()[0], spec=candidate.spec)
        if hasattr(agent, "replay_capacity"):
            agent = dataclasses.replace(agent, replay_capacity=count * agent.replay_capacity)
    subject = _anakin(agent, candidate)
    history = contract.run(subject, 5)
    timestep = history.rollouts[0].timestep
    assert np.any((timestep.discount == (0.0 if count > 1 else -1.0)) & ~timestep.last())
    if count > 1:
        # Neighbours are agents of one environment, in order, whose episodes begin together.
        assert timestep.reward.shape == (contract.ROLLOUT_LENGTH + 1, contract.NUM_ENVS * count)
        number = timestep.observation["features"][..., 1].reshape(-1, contract.NUM_ENVS, count)
        np.testing.assert_array_equal(number, np.broadcast_to(np.arange(count), number.shape))
        np.testing.assert_array_equal(timestep.first()[:, ::2], timestep.first()[:, 1::2])
        # An agent goes out by its own action.
        active, runs = timestep.active(), ~timestep.last()[:-1]
        left = history.rollouts[0].action == 2
        np.testing.assert_array_equal(runs & active[:-1] & ~active[1:], runs & left)
    assert all(np.all(report.first_fault == metrics.NEVER) for report in history.reports)
    resumed = contract.restore(subject, history.states[3])
    resumed = streams.to_numpy(subject.step(resumed, 2)[0])
    streams.assert_same(resumed, history.states[5])
    tolerance = 2e-3 if name in ("muzero", "alphazero") else 1e-4
    options = SPLIT if count > 1 and name in ("ppo", "pqn") else {}
    actual = _results(_sebulba(agent, candidate, **options), 5)
    _assert_same(actual, _results(subject, 5), tolerance)


def _reports(history) -> list[dict[str, tuple[float, float]]]:
    """Returns total and count of the metrics of episodes in each update."""
    return [
        {name: (*mean,) for name, mean in report.means.items() if name.startswith("episode/")}
        for report in history.reports
    ]


@pytest.mark.slow
@pytest.mark.exact
def test_both_runners_report_the_numbers_of_each_episode_that_ended():
    """On several devices, and from the middle of an episode; the agent never receives them."""
    probe = probes.Reporting(length=4)  # with the reset, five steps: rollouts have six
    network = contract.tiny_network()
    agent = ppo.PPO(probe.spec, network=network, learning_rate=0.01, epochs=1, num_minibatches=2)
    subject = _anakin(agent, probe)
    history = contract.run(subject, 4)
    expected = []
    for rollout in history.rollouts:
        assert rollout.timestep.metrics == {}
        last = rollout.timestep.last()[1:]
        success = rollout.timestep.reward[1:][last]
        cue = rollout.timestep.observation[1:, :, 0][last] > 0.0
        totals = {"return": success, "success": success, "cue": cue, "length": 4.0 * last}
        expected.append({f"episode/{name}": (x.sum(), last.sum()) for name, x in totals.items()})
    assert _reports(history) == expected
    assert all(0.0 < total < count for total, count in (x["episode/cue"] for x in expected))
    _, report = subject.step(contract.restore(subject, history.states[2]), 1)
    assert _reports(history._replace(reports=[streams.to_numpy(report)])) == expected[2:3]
    other = _sebulba(agent, probe, **SPLIT)
    assert _reports(contract.run(other, 4)) == expected
    other.close()
