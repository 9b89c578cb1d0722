"""Tests of failures under Sebulba: the run ends in time, with the first cause and no threads."""

import re
import time
import traceback

import jax
import numpy as np
import pytest

from podracers import environment, errors, parallel, sebulba
from podracers.supervision import pipeline
from tests import contract, faults, processes, streams


def _make(**options):
    """Returns a runner of two actors of two batches each, and its factory of environments."""
    agent, environment = contract.AGENTS["impala"]()
    factory = faults.Faulty(environment)
    runner = sebulba.Sebulba(
        contract.Recorder(agent),
        factory,
        contract.NUM_ENVS,
        contract.ROLLOUT_LENGTH,
        actor_devices=(0, 1),
        learner_devices=(2, 3),
        batches_per_actor=2,
        **options,
    )
    return runner, factory


@pytest.fixture(scope="module", name="shared")
def _shared():
    """One runner for all tests: it compiles once, and works again after each failure."""
    runner, factory = _make()
    with runner as entered:
        entered.step(runner.init(0), 1)
    assert pipeline.abandoned() == []
    return runner, factory


@pytest.fixture(name="subject")
def _subject(shared):
    """The shared runner; its actors have ended and closed their environments after each test."""
    runner, factory = shared
    factory.batches.clear()
    yield runner, factory
    runner.close()
    assert pipeline.abandoned() == []
    assert all(host.closed for host in factory.batches)
    factory.set()


def test_one_stream_is_not_split_on_an_accelerator():
    agent, environment = contract.AGENTS["impala"]()
    with parallel.compiling_for("tpu"):
        runners = [sebulba.Sebulba(agent, environment, count, 4) for count in (1, 2)]
        assert [runner.num_batches for runner in runners] == [1, 2]
        assert len(runners[0].placement.actors) == 1


def _fail(runner, state, expected=faults.SimulatorError):
    with pytest.raises(expected) as raised:
        for _ in range(100):
            state, _ = runner.step(state, 1)
    return raised.value


def _take(runner, updates, seed=0):
    """Returns the state after some updates, on the host."""
    state = contract.run(runner, updates, seed).states[-1]
    runner.close()
    return state


@pytest.mark.parametrize(
    ("where", "step", "num_made"), [(faults.MAKE, 0, 3), (faults.RESET, 0, 4), (faults.RECV, 9, 4)]
)
def test_an_environment_that_raises_ends_the_run(subject, where, step, num_made):
    runner, factory = subject
    factory.set(faults.RAISE, where=where, step=step, stream=7)  # in the last batch
    error = _fail(runner, runner.init(0))
    report = "".join(traceback.format_exception(error))
    assert report.index(f"in {where}\n") < report.index(f"the simulator broke in {where}")
    assert report.endswith("in the thread 'actor 1'\n")
    assert pipeline.abandoned() == []
    assert len(factory.batches) <= num_made


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_learner_that_fails_ends_the_actors(subject, monkeypatch, caplog, error):
    runner, factory = subject
    monkeypatch.setattr(pipeline, "close_failures", [])
    state, _ = runner.step(runner.init(0), 1)

    def learn(*_):
        raise error

    monkeypatch.setitem(vars(runner._learner), "learn", learn)
    factory.set(faults.RAISE, where=faults.CLOSE)
    _fail(runner, state, error)
    assert pipeline.abandoned() == []
    assert len(pipeline.close_failures) == 4
    assert caplog.text.count("closing an environment failed") == 1


def _reward(change):
    return lambda timestep: timestep._replace(reward=change(timestep.reward))


@pytest.mark.parametrize("where", [faults.RESET, faults.RECV])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (tuple, "tuple, expected types.TimeStep"),
        (
            lambda timestep: timestep._replace(observation=[1]),
            "leaf 'observation/features': .*, got none",
        ),
        (
            lambda timestep: jax.tree.map(lambda x: x[:-1], timestep),
            r"leaf 'discount': expected float32\[2\], got float32\[1\]",
        ),
        (_reward(lambda reward: reward[:, None]), r"leaf 'reward': .*, got float32\[2, 1\]"),
        (_reward(np.float64), r"leaf 'reward': .*, got float64\[2\]"),
        (_reward(lambda reward: None), "leaf 'reward': .*, got none"),
    ],
)
def test_a_time_step_unlike_the_spec_is_one_line(subject, monkeypatch, where, change, message):
    runner, factory = subject
    returned = getattr(faults.FaultyBatch, where)
    monkeypatch.setattr(faults.FaultyBatch, where, lambda self: change(returned(self)))
    error = _fail(runner, runner.init(0), errors.UserError)
    path = environment.name_of(factory)
    assert re.fullmatch(rf"environment {re.escape(path)}: {where}.* {message}.*", str(error))


def test_a_nan_is_reported_with_its_update(subject):
    runner, factory = subject
    state, report = runner.step(runner.init(0), 2)
    assert not any(np.isnan(mean.total) for mean in report.means.values())
    factory.set(faults.NAN, step=5 * contract.ROLLOUT_LENGTH)  # the last step of update 4
    _, report = runner.step(state, 4)
    assert min(int(np.min(update)) for update in report.first_nonfinite.values()) == 4


def test_a_runner_works_again_after_a_failure_and_with_another_state(subject):
    runner, factory = subject
    expected = [_take(runner, 2, seed) for seed in (0, 1)]
    factory.set(faults.RAISE, step=9, stream=5)
    _fail(runner, runner.init(0))
    factory.set()
    streams.assert_same(_take(runner, 2, 0), expected[0])
    factory.batches.clear()
    runner.step(runner.init(0), 1)
    other, _ = runner.step(runner.init(1), 1)  # restarts the simulators
    assert [host.closed for host in factory.batches] == [1] * 4 + [0] * 4
    other, _ = runner.step(other, 1)
    streams.assert_same(streams.to_numpy(other), expected[1])


def test_a_larger_lag_is_bounded_and_recorded():
    runner, _ = _make(lag=3)
    lag, state = runner.lag, runner.init(0)
    lags = []
    for update in range(12):
        if update == 6:  # a slow learner: the queues limit how far actors run ahead
            queues = runner._session.queues
            with runner._session.supervisor.wait_until(
                lambda queues=queues: all(len(queue.items) == lag for queue in queues)
            ):
                pass
            time.sleep(0.1)
            assert [len(queue.items) for queue in queues] == [lag, lag]
        state, _ = runner.step(state, 1)
        rollout = contract.rollout(state)
        versions = rollout.extras.version.reshape(-1, 2, contract.NUM_ENVS // 2)
        assert np.all(versions == versions[:1, :, :1])  # one in all of an actor's rollout
        np.testing.assert_array_equal(rollout.age, update - versions[0].ravel())
        lags.extend(update - versions[0, :, 0])
    assert sorted(runner._session.versions._values) == [9, 10, 11, 12]  # the rest is deleted
    values = runner.diagnostics().values
    del runner, queues  # which nobody has closed
    processes.wait_for(lambda: pipeline.abandoned() == [])
    assert min(lags) >= 0 and max(lags) == lag
    assert values["lag/mean"] == pytest.approx(np.mean(lags))
    assert values["lag/max"] == lag
    for number in set(lags):
        assert values[f"lag/{number}"] == pytest.approx(np.mean(np.equal(lags, number)))
