"""Tests of failures under Sebulba: the run ends in time, with the first cause and no threads."""

import _thread
import functools
import signal
import threading
import time
import traceback

import numpy as np
import pytest

from podracers import errors, sebulba
from podracers.supervision import pipeline
from podracers.training import experiment
from tests import contract, faults, streams

LIMIT = 2.0  # seconds
PATIENCE = 60.0  # seconds, enough for a short operation on a loaded machine


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
    runner, factory = _make(timeout=PATIENCE)
    runner.step(runner.init(0), 1)
    runner.close()
    object.__setattr__(runner, "timeout", LIMIT)  # all programs are compiled now
    return runner, factory


@pytest.fixture(name="made")
def _made(shared):
    runner, factory = shared
    factory.made.clear()
    yield runner, factory
    runner.close()
    factory.plan.set()


@pytest.fixture(name="lagging")
def _lagging():
    """A runner whose actors may run ahead."""
    runner, factory = _make(timeout=PATIENCE, lag=3)
    yield runner, factory
    runner.close()


@pytest.fixture(autouse=True)
def _no_thread_is_left(shared, monkeypatch):
    monkeypatch.setattr(pipeline, "_RELEASE_SECONDS", 0.5)
    before = set(threading.enumerate())
    yield
    _wait_for(lambda: set(threading.enumerate()) <= before)


def _wait_for(condition):
    limit = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


def _actors():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("actor")]


def _fail(runner, state):
    """Takes updates until one fails, and returns the error."""
    began = time.monotonic()
    with pytest.raises(pipeline.WorkerError) as raised:
        for _ in range(100):
            state, _ = runner.step(state, 1)
    assert time.monotonic() - began < PATIENCE
    return raised.value


def _assert_closed(factory, batches=4):
    assert len(factory.made) == batches  # two for each actor
    assert all(host.closed for host in factory.made)


def _take(runner, updates, seed=0):
    """Returns the state after some updates, on the host."""
    state = runner.init(seed)
    for _ in range(updates):
        state, _ = runner.step(state, 1)
    runner.close()
    return streams.to_numpy(state)


# Environments.


@pytest.mark.parametrize(("where", "step"), [(faults.RESET, 0), (faults.SEND, 9), (faults.RECV, 9)])
def test_an_environment_that_raises_ends_the_run(made, where, step):
    runner, factory = made
    factory.plan.set(faults.RAISE, where=where, step=step, stream=5)
    error = _fail(runner, runner.init(0))
    assert isinstance(error.__cause__, faults.SimulatorError)
    assert f"actor 1 failed: SimulatorError: the simulator broke in {where}" in str(error)
    report = "".join(traceback.format_exception(error))
    assert report.index(f"in {where}\n") < report.index("WorkerError")
    assert _actors() == []
    # The other actor may not have made its second batch by the time of a reset.
    _assert_closed(factory, len(factory.made) if where == faults.RESET else 4)


def test_an_environment_that_cannot_be_made_ends_the_run(made):
    runner, factory = made
    factory.plan.set(faults.RAISE, where=faults.MAKE, stream=7)  # the last batch
    error = _fail(runner, runner.init(0))
    assert isinstance(error.__cause__, faults.SimulatorError)
    assert _actors() == []
    assert len(factory.made) < 4
    _assert_closed(factory, len(factory.made))


def test_a_user_error_of_the_simulator_is_raised_unchanged(made):
    runner, factory = made
    factory.plan.set(faults.MISTAKE, where=faults.MAKE)
    with pytest.raises(errors.UserError, match=r"^the simulator has no such option$"):
        runner.step(runner.init(0), 1)
    assert _actors() == []


def test_failures_to_close_environments_are_recorded(made, monkeypatch):
    monkeypatch.setattr(pipeline, "_close_failures", [])
    runner, factory = made
    runner.step(runner.init(0), 1)
    factory.plan.set(faults.RAISE, where=faults.CLOSE)
    runner.close()
    assert len(pipeline.close_failures()) == 4
    _assert_closed(factory)


def test_an_environment_that_hangs_is_found_and_named(made):
    runner, factory = made
    state, _ = runner.step(runner.init(0), 1)
    factory.plan.set(faults.HANG, where=faults.RECV, step=9, stream=5)
    began = time.monotonic()
    error = _fail(runner, state)
    assert time.monotonic() - began > LIMIT
    assert "actor 1 hangs: " in str(error)
    assert "'environment step'" in str(error)
    assert "plan.over.wait()" in str(error)  # its stack
    assert pipeline.abandoned() == ["actor 1"]
    _assert_closed(factory)  # from another thread
    factory.plan.over.set()
    _wait_for(lambda: not pipeline.abandoned())
    factory.plan.over.clear()


def test_an_environment_that_hangs_in_close_does_not_block(made):
    runner, factory = made
    runner.step(runner.init(0), 1)
    factory.plan.set(faults.HANG, where=faults.CLOSE, stream=5)
    began = time.monotonic()
    runner.close()
    assert LIMIT < time.monotonic() - began < PATIENCE
    assert "actor 1" in pipeline.abandoned()
    factory.plan.over.set()
    _wait_for(lambda: not pipeline.abandoned())
    factory.plan.over.clear()
    _assert_closed(factory)


@pytest.mark.slow
def test_a_slow_actor_is_no_failure(made):
    runner, factory = made
    state, _ = runner.step(runner.init(0), 1)
    factory.plan.set(faults.SLOW, stream=0, seconds=0.3 * LIMIT)
    began = time.monotonic()
    for _ in range(2):  # the first rollout was collected before
        state, _ = runner.step(state, 1)
    assert time.monotonic() - began > 1.5 * LIMIT


# The queue, and the learner.


def test_a_failure_is_raised_before_a_full_queue_is_emptied(lagging):
    runner, factory = lagging
    # The learner takes one rollout, the next three fill the queue, and the fifth fails.
    factory.plan.set(faults.RAISE, stream=0, step=4 * contract.ROLLOUT_LENGTH + 3)
    state, _ = runner.step(runner.init(0), 1)
    queue, *_ = runner._sessions[0].queues
    _wait_for(lambda: runner._sessions[0].supervisor._failure)  # the learner is slow
    assert len(queue._items) == runner.lag
    with pytest.raises(pipeline.WorkerError) as raised:
        runner.step(state, 1)
    assert isinstance(raised.value.__cause__, faults.SimulatorError)
    assert _actors() == []
    _assert_closed(factory)
    assert len(queue._items) == runner.lag


def test_a_learner_that_fails_ends_the_actors(made, monkeypatch):
    runner, factory = made
    state, _ = runner.step(runner.init(0), 1)

    def learn(*_):
        raise MemoryError("the device is full")

    monkeypatch.setitem(vars(runner._learner), "learn", learn)
    with pytest.raises(MemoryError):
        runner.step(state, 1)
    assert _actors() == []
    _assert_closed(factory)


def test_an_interrupt_ends_the_actors(made, request):
    # A shell that starts a job in the background lets it ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    runner, factory = made
    state, _ = runner.step(runner.init(0), 1)
    factory.plan.set(faults.SLOW, seconds=0.1)
    threading.Timer(0.5, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        for _ in range(1000):
            state, _ = runner.step(state, 1)
    assert _actors() == []
    _assert_closed(factory)


def test_a_nan_is_reported_with_its_update(made):
    runner, factory = made
    state, report = runner.step(runner.init(0), 2)
    assert not any(np.isnan(mean.total) for mean in report.means.values())
    factory.plan.set(faults.NAN, step=5 * contract.ROLLOUT_LENGTH)  # the last step of update 4
    _, report = runner.step(state, 4)
    assert min(int(np.min(update)) for update in report.first_nonfinite.values()) == 4


# After a failure.


def test_a_runner_works_again_after_a_failure(made):
    runner, factory = made
    expected = _take(runner, 3)
    factory.plan.set(faults.RAISE, step=9, stream=5)
    _fail(runner, runner.init(0))
    factory.plan.set()
    streams.assert_same(_take(runner, 3), expected)


def test_another_state_restarts_the_simulators(made):
    runner, factory = made
    expected = _take(runner, 2, seed=1)
    factory.made.clear()
    runner.step(runner.init(0), 1)
    other, _ = runner.step(runner.init(1), 1)
    assert len(factory.made) == 8
    assert all(host.closed for host in factory.made[:4])
    assert len(_actors()) == 2
    other, _ = runner.step(other, 1)
    streams.assert_same(streams.to_numpy(other), expected)


def test_a_larger_lag_is_bounded_and_recorded(lagging):
    runner, _ = lagging
    lag, state = runner.lag, runner.init(0)
    lags = []
    for update in range(12):
        if update == 6:  # a slow learner: the queues limit how far actors run ahead
            queues = runner._sessions[0].queues
            _wait_for(lambda queues=queues: all(len(queue._items) == lag for queue in queues))
            time.sleep(0.1)
            assert [len(queue._items) for queue in queues] == [lag, lag]
        state, _ = runner.step(state, 1)
        versions = contract.rollout(state).extras.version.reshape(-1, 2, contract.NUM_ENVS // 2)
        assert np.all(versions == versions[:1, :, :1])  # one in all of an actor's rollout
        lags.extend(update - versions[0, :, 0])
    values = runner.diagnostics().values
    assert min(lags) >= 0 and max(lags) == lag
    assert values["lag/mean"] == pytest.approx(np.mean(lags))
    for each in set(lags):
        assert values[f"lag/{each}"] == pytest.approx(np.mean(np.equal(lags, each)))


def test_evaluations_and_videos_have_the_timeout_of_the_runner():
    agent, environment = contract.AGENTS["impala"]()
    settings = experiment.Experiment(
        agent=lambda spec: agent,
        environment=lambda: faults.Faulty(environment),
        runner=functools.partial(
            sebulba.Sebulba, num_envs=4, rollout_length=contract.ROLLOUT_LENGTH, timeout=7.0
        ),
        seed=0,
        total_steps=100,
    )
    assert settings.build().evaluator.timeout == 7.0
