"""Anakin on four devices and Sebulba on one give equal results, with equal keys and no lag."""

import pytest

from agents import muzero, ppo
from environments import probes, xminigrid
from podracers import runner, sebulba
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
SLOW = ("ppo_gru_frames", "rainbow", "r2d2_attention", "sac_gru", "muzero", "impala_agents")
SLOW += ("vmpo_agents", "pqn_agents", "r2d2_agents", "sac_agents", "muzero_agents")
SPLIT = {"actor_devices": (0, 1), "learner_devices": (2, 3), "batches_per_actor": 2}


@pytest.mark.exact  # on one backend
@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("ppo", SPLIT, id="ppo-2 to 2", marks=pytest.mark.slow),
        pytest.param("ppo_agents", SPLIT, id="ppo_agents-2 to 2"),
        pytest.param("dqn_agents", {}, id="dqn_agents"),
        pytest.param("dqn", {}, id="dqn", marks=pytest.mark.slow),
        pytest.param(
            *("ppo_lstm", {"actor_devices": (0, 0), "learner_devices": (1,)}),
            id="ppo_lstm-2 to 1",
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


@pytest.mark.slow
@pytest.mark.exact
def test_a_suite_in_jax_is_the_same_under_both_runners():
    pytest.importorskip("xminigrid")
    environment = xminigrid.XMiniGrid("MiniGrid-Empty-5x5", {"max_steps": 5})
    agent = ppo.PPO(environment.spec, network=contract.tiny_network(), num_minibatches=2)
    _assert_same(
        _results(_sebulba(agent, environment), 2), _results(_anakin(agent, environment), 2)
    )
