"""Tests of supervised threads: real ones, with limits of tenths of a second."""

import contextlib
import itertools
import threading
import time
import traceback

import pytest

from podracers import errors
from podracers.supervision import pipeline

LIMIT = 0.3  # seconds
PATIENCE = 30.0  # seconds that this machine may take for what takes none


@contextlib.contextmanager
def _supervised(timeout=PATIENCE):
    """Yields a supervisor, and closes it."""
    supervisor = pipeline.Supervisor(timeout)
    try:
        yield supervisor
    finally:
        supervisor.close()


def _wait_for(condition):
    limit = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.001)


def _stay(supervisor):
    """What a worker does that has nothing left to do: it waits to be cancelled."""
    supervisor.wait_until(lambda: False)


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    _wait_for(lambda: pipeline.abandoned() == [])


# The queue.


def test_a_queue_keeps_order_and_never_holds_more_than_its_capacity():
    with _supervised() as supervisor:
        queue = pipeline.Queue(supervisor, 3)
        put = []

        def work(_):
            for item in itertools.count():
                queue.put(item)
                put.append(item)

        supervisor.start("worker", work)
        for got in range(200):
            if got % 50 == 0:
                _wait_for(lambda got=got: len(put) == got + 3)
                time.sleep(0.02)  # for a fourth
            assert len(put) <= got + 4  # the item that `get` has not taken yet may count
            assert queue.get() == got


# Versions.


def test_versions_give_the_exact_one_or_the_newest_and_forget():
    with _supervised() as supervisor:
        versions, asked = pipeline.Versions(supervisor), pipeline.Queue(supervisor, 1)
        for version in range(5):
            versions.publish(version, str(version), oldest=version - 2)

        def work(_):
            for least, exact in ((2, True), (3, True), (2, False), (4, False), (5, True)):
                asked.put(versions.get(least, exact))
            _stay(supervisor)

        supervisor.start("worker", work)
        assert [asked.get() for _ in range(4)] == [(2, "2"), (3, "3"), (4, "4"), (4, "4")]
        assert sorted(versions._values) == [2, 3, 4]
        versions.publish(5, "5", oldest=5)  # what the worker waits for
        assert asked.get() == (5, "5")
        assert sorted(versions._values) == [5]


# Failures.


def _broken_environment():
    raise ZeroDivisionError("the simulator divided by zero")


def test_the_first_cause_reaches_the_consumer_with_its_traceback():
    with _supervised() as supervisor:
        queue = pipeline.Queue(supervisor, 1)

        def first(_):
            _broken_environment()

        def second(_):
            _wait_for(lambda: supervisor._failure)
            raise AssertionError("which follows from the other")

        supervisor.start("actor 3", second)
        supervisor.start("actor 7", first)
        _wait_for(lambda: pipeline.abandoned() == [])  # both have failed
        with pytest.raises(pipeline.WorkerError, match="actor 7 failed: ZeroDivisionError") as one:
            queue.get()
        assert isinstance(one.value.__cause__, ZeroDivisionError)
        report = "".join(traceback.format_exception(one.value))
        assert "in _broken_environment" in report
        assert report.index("in _broken_environment") < report.index("WorkerError")
        with pytest.raises(pipeline.WorkerError, match="actor 7"):  # and again
            pipeline.Versions(supervisor).publish(0, None, oldest=0)


def test_a_worker_that_dies_while_its_queue_is_full_is_told_before_the_queue_is_emptied():
    with _supervised() as supervisor:
        queue = pipeline.Queue(supervisor, 2)

        def work(_):
            queue.put(0)
            queue.put(1)
            _broken_environment()

        supervisor.start("worker", work)
        _wait_for(lambda: supervisor._failure)
        with pytest.raises(pipeline.WorkerError, match="divided by zero"):
            queue.get()


def test_a_worker_that_ends_by_itself_has_failed():
    with _supervised() as supervisor:
        supervisor.start("worker", lambda _: None)
        with pytest.raises(pipeline.WorkerError, match="nobody had asked"):
            pipeline.Queue(supervisor, 1).get()


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), GeneratorExit()])
def test_nothing_that_a_worker_raises_is_lost(error):
    def work(_):
        raise error

    with _supervised() as supervisor:
        supervisor.start("worker", work)
        with pytest.raises(pipeline.WorkerError) as raised:
            pipeline.Queue(supervisor, 1).get()
        assert raised.value.__cause__ is error


def test_a_mistake_of_the_user_stays_one():
    def work(_):
        raise errors.UserError("no such environment")

    with _supervised() as supervisor:
        supervisor.start("worker", work)
        with pytest.raises(errors.UserError, match=r"^no such environment$"):
            pipeline.Queue(supervisor, 1).get()


def test_a_failure_that_nobody_was_told_of_is_logged(caplog):
    def work(worker):
        try:
            _stay(supervisor)
        finally:
            _broken_environment()

    with _supervised() as supervisor:
        supervisor.start("worker", work)
        _wait_for(lambda: supervisor._waiting)
    assert "worker failed while it was closed" in caplog.text
    assert "in _broken_environment" in caplog.text


# Hangs.


def _hang_here(event):
    event.wait(PATIENCE)


def test_a_worker_that_hangs_is_found_within_the_limit_and_its_stack_is_told():
    over = threading.Event()

    def work(worker):
        with worker.doing("environment step"):
            _hang_here(over)

    with _supervised(LIMIT) as supervisor:
        supervisor.start("actor 0", work)
        began = time.monotonic()
        with pytest.raises(pipeline.WorkerError) as raised:
            pipeline.Queue(supervisor, 1).get()
        seconds = time.monotonic() - began
        over.set()
    assert LIMIT < seconds < LIMIT + PATIENCE / 2
    message = str(raised.value)
    assert "actor 0 hangs" in message
    assert "'environment step', and the limit is 0.3 s" in message
    assert "in _hang_here" in message


def test_a_hang_outside_of_any_activity_is_found_too():
    over = threading.Event()
    with _supervised(LIMIT) as supervisor:
        supervisor.start("actor 0", lambda _: _hang_here(over))
        with pytest.raises(pipeline.WorkerError, match=r"actor 0 hangs: .*'host work'"):
            pipeline.Queue(supervisor, 1).get()
        over.set()


def test_a_deadlock_is_found():
    with _supervised(LIMIT) as supervisor:
        versions, queue = pipeline.Versions(supervisor), pipeline.Queue(supervisor, 1)

        def work(worker):
            with worker.doing("wait for parameters"):
                versions.get(9, exact=True)

        supervisor.start("actor 0", work)
        expected = r"deadlock: .*0\.3 s.*actor 0 at 'wait for parameters'"
        with pytest.raises(pipeline.WorkerError, match=expected):
            queue.get()


def test_waiting_for_nobody_is_found():
    with _supervised(LIMIT) as supervisor, pytest.raises(pipeline.WorkerError, match="no workers"):
        pipeline.Queue(supervisor, 1).get()


def test_compiling_alone_takes_as_long_as_it_takes():
    with _supervised(LIMIT) as supervisor:
        queue = pipeline.Queue(supervisor, 1)

        def work(worker):
            with worker.doing(pipeline.COMPILING):
                time.sleep(3 * LIMIT)
            queue.put("done")
            _stay(supervisor)

        supervisor.start("worker", work)
        assert queue.get() == "done"


def test_starting_has_the_limit_of_everything_else():
    over = threading.Event()
    with _supervised(LIMIT) as supervisor:

        def work(worker):
            with worker.doing(pipeline.STARTING):
                _hang_here(over)

        supervisor.start("worker", work)
        with pytest.raises(pipeline.WorkerError, match=r"'starting', and the limit is 0\.3 s"):
            pipeline.Queue(supervisor, 1).get()
        over.set()


def test_a_worker_may_wait_for_as_long_as_another_one_works():
    with _supervised(2 * LIMIT) as supervisor:
        queues = [pipeline.Queue(supervisor, 1) for _ in range(2)]

        def fast(worker):
            for item in range(3):
                with worker.doing("wait for the queue"):
                    queues[0].put(item)
            _stay(supervisor)

        def slow(worker):
            for _ in range(12):
                with worker.doing("environment step"):
                    time.sleep(LIMIT / 3)
            queues[1].put("slow")
            _stay(supervisor)

        supervisor.start("fast", fast)
        supervisor.start("slow", slow)
        assert queues[1].get() == "slow"
        assert [queues[0].get() for _ in range(3)] == [0, 1, 2]


def test_the_limit_counts_only_while_the_consumer_waits():
    with _supervised(LIMIT) as supervisor:
        queue = pipeline.Queue(supervisor, 1)

        def work(worker):
            with worker.doing("environment step"):
                time.sleep(3 * LIMIT)
            queue.put("done")
            _stay(supervisor)

        supervisor.start("worker", work)
        time.sleep(2.9 * LIMIT)  # the consumer learns
        assert queue.get() == "done"


def test_a_process_that_was_stopped_for_a_while_does_not_take_that_for_a_hang(monkeypatch):
    stopped = 0.0
    monotonic = time.monotonic
    monkeypatch.setattr(pipeline.time, "monotonic", lambda: monotonic() + stopped)
    with _supervised(2.0) as supervisor:
        queue = pipeline.Queue(supervisor, 1)

        def work(worker):
            nonlocal stopped
            with worker.doing("environment step"):
                time.sleep(0.2)
                stopped = 100.0
                time.sleep(1.0)
            queue.put("done")
            _stay(supervisor)

        supervisor.start("worker", work)
        assert queue.get() == "done"


# The end.


def test_closing_wakes_whoever_waits_and_joins(monkeypatch):
    monkeypatch.setattr(pipeline, "_SLICE_SECONDS", 10 * PATIENCE)  # nobody looks by himself
    supervisor = pipeline.Supervisor(PATIENCE)
    queue, versions = pipeline.Queue(supervisor, 1), pipeline.Versions(supervisor)

    def put(_):
        for item in itertools.count():
            queue.put(item)

    supervisor.start("putting", put)
    supervisor.start("getting", lambda _: versions.get(3, exact=True))
    supervisor.start("waiting", lambda _: _stay(supervisor))
    _wait_for(lambda: len(supervisor._waiting) == 3)
    began = time.monotonic()
    supervisor.close()
    assert pipeline.abandoned() == []
    assert time.monotonic() - began < PATIENCE / 2
    supervisor.close()  # again does nothing


def test_a_worker_that_is_busy_leaves_before_its_next_activity():
    done = []

    def work(worker):
        for step in itertools.count():
            with worker.doing("environment step"):
                done.append(step)
                time.sleep(0.001)

    with _supervised() as supervisor:
        supervisor.start("worker", work)
        _wait_for(lambda: len(done) > 3)
    assert pipeline.abandoned() == []


def test_a_worker_that_does_not_come_back_is_abandoned_and_named():
    over = threading.Event()
    supervisor = pipeline.Supervisor(LIMIT)
    supervisor.start("stuck", lambda _: _hang_here(over))
    began = time.monotonic()
    supervisor.close()
    assert LIMIT <= time.monotonic() - began < PATIENCE / 2
    assert pipeline.abandoned() == ["stuck"]
    over.set()


def test_who_interrupts_does_not_wait_for_a_worker_that_is_stuck(monkeypatch):
    monkeypatch.setattr(pipeline, "_JOIN_SECONDS", PATIENCE)
    over = threading.Event()
    supervisor = pipeline.Supervisor(PATIENCE)
    supervisor.start("stuck", lambda _: _hang_here(over))
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        try:
            raise KeyboardInterrupt
        finally:
            supervisor.close()
    assert time.monotonic() - began < PATIENCE / 2
    assert pipeline.abandoned() == ["stuck"]
    over.set()


def test_a_worker_that_does_not_come_back_is_released_from_outside():
    over = threading.Event()
    supervisor = pipeline.Supervisor(LIMIT)
    supervisor.start("stuck", lambda _: _hang_here(over), release=over.set)
    supervisor.close()
    assert pipeline.abandoned() == []


def test_a_release_that_hangs_holds_nobody(monkeypatch):
    monkeypatch.setattr(pipeline, "_RELEASE_SECONDS", 0.2)
    over = threading.Event()
    supervisor = pipeline.Supervisor(LIMIT)
    supervisor.start("stuck", lambda _: _hang_here(over), release=lambda: _hang_here(over))
    supervisor.close()
    assert pipeline.abandoned() == ["release stuck", "stuck"]
    over.set()


def test_a_consumer_that_dies_releases_its_workers():
    alive = []

    def consume():
        supervisor = pipeline.Supervisor(PATIENCE)
        queue = pipeline.Queue(supervisor, 1)

        def work(_):
            alive.append(threading.current_thread())
            for item in itertools.count():
                queue.put(item)

        supervisor.start("orphan", work)
        queue.get()  # and no `close`

    consumer = threading.Thread(target=consume)
    consumer.start()
    consumer.join()
    alive[0].join(PATIENCE)
    assert not alive[0].is_alive()


# A single call.


def test_a_call_returns_what_came_or_raises_what_was_raised():
    caller = threading.current_thread()

    def work(worker):
        assert threading.current_thread() is not caller
        with worker.doing("anything"):
            return 7

    assert pipeline.call("worker", work, PATIENCE) == 7
    with pytest.raises(ZeroDivisionError, match="divided by zero") as raised:
        pipeline.call("worker", lambda _: _broken_environment(), PATIENCE)
    assert "in _broken_environment" in "".join(traceback.format_exception(raised.value))


def test_a_call_that_hangs_or_is_not_wanted_any_more_is_given_up():
    over = threading.Event()
    with pytest.raises(pipeline.WorkerError, match="worker hangs"):
        pipeline.call("worker", lambda _: _hang_here(over), LIMIT)
    over.set()
    _wait_for(lambda: not pipeline.abandoned())

    def work(worker):
        while True:
            with worker.doing("anything"):
                time.sleep(0.01)

    began = time.monotonic()
    with pytest.raises(pipeline.Cancelled):
        pipeline.call("worker", work, PATIENCE, stop=lambda: time.monotonic() > began + 0.2)
    assert pipeline.abandoned() == []


# Time.


def test_nobody_who_waits_is_busy():
    with _supervised() as supervisor:
        versions, queue = pipeline.Versions(supervisor), pipeline.Queue(supervisor, 1)
        looks = []

        def never():
            looks.append(None)
            return False

        for name in ("one", "two"):
            supervisor.start(name, lambda _: supervisor.wait_until(never))

        def get(_):
            queue.put(versions.get(1, exact=True))
            _stay(supervisor)

        supervisor.start("three", get)
        _wait_for(lambda: len(supervisor._waiting) == 3)
        looks.clear()
        used = time.process_time()
        time.sleep(0.7)
        assert time.process_time() - used < 0.2
        assert len(looks) <= 8
        # And being slow to look is not being slow to hear.
        began = time.monotonic()
        versions.publish(1, "value", oldest=1)
        assert queue.get() == (1, "value")
        assert time.monotonic() - began < PATIENCE / 2


def test_the_activities_of_a_thread_add_up_to_its_time():
    timer = pipeline.Timer()
    began = time.perf_counter()
    with timer("one"):
        time.sleep(0.05)
    time.sleep(0.02)
    with pytest.raises(ValueError, match="out"), timer("two"):
        time.sleep(0.03)
        raise ValueError("out")
    spent = timer.take()
    whole = time.perf_counter() - began
    assert spent.keys() == {"one", "two", ""}
    assert spent["one"] >= 0.05 and spent["two"] >= 0.03 and spent[""] >= 0.02
    assert sum(spent.values()) == pytest.approx(whole, rel=0.05, abs=0.01)
    assert sum(timer.take().values()) < whole  # forgotten


def test_the_time_of_an_activity_that_goes_on_counts_already():
    timer = pipeline.Timer()
    with timer("one"):
        time.sleep(0.03)
        assert timer.take()["one"] >= 0.03
        time.sleep(0.02)
    assert timer.take()["one"] >= 0.02


def test_the_activities_of_a_worker_are_timed():
    with _supervised() as supervisor:
        queue = pipeline.Queue(supervisor, 1)

        def work(worker):
            with worker.doing("environment step"):
                time.sleep(0.05)
            with worker.doing("wait for the queue"):
                queue.put("done")
            _stay(supervisor)

        worker = supervisor.start("worker", work)
        queue.get()
        spent = worker.timer.take()
        assert spent["environment step"] >= 0.05
        assert "wait for the queue" in spent
