"""Tests of supervised threads: real ones, with limits of tenths of a second."""

import contextlib
import itertools
import sys
import threading
import time
import traceback

import jax
import pytest

from podracers.commands import command_line
from podracers.supervision import pipeline
from tests import processes

LIMIT = 0.2  # seconds

# Threads in JAX while the interpreter ends.
PROGRAM = """
import sys, threading, time
import jax, numpy as np
from podracers.supervision import pipeline

pipeline._JOIN_TIMEOUT = 0.1
step = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda _, y: y @ x, x))
x, running = np.eye(100, dtype=np.float32), threading.Event()

def act(worker):
    while True:
        with worker.doing("inference"):
            np.asarray(step(x))
        running.set()

def compile(worker):
    with worker.doing(pipeline.COMPILING):
        for _ in range(20 * 100):
            np.asarray(step(x))
            running.set()

def start():
    supervisor = pipeline.Supervisor(60.0)
    for actor in range(2):
        supervisor.start(f"actor {actor}", act)
    running.wait()

"""
ENDINGS = {  # exit codes and last lines
    "start(); 1 / 0": (1, "ZeroDivisionError: division by zero"),
    "pipeline.call('evaluation', compile, 60.0, running.is_set)": (1, "Cancelled"),
}


def _supervised(timeout=processes.PATIENCE):
    return contextlib.closing(pipeline.Supervisor(timeout))


def _stay(supervisor):
    """Waits to be cancelled."""
    with supervisor.wait_until(lambda: False):
        pass


def _divide():
    raise ZeroDivisionError("the simulator divided by zero")


@pytest.fixture(name="over", autouse=True)
def _over():
    """An event for threads that hang; it is set at the end, when no thread may be left."""
    event = threading.Event()
    yield event
    event.set()
    processes.wait_for(lambda: pipeline.abandoned() == [])


def test_a_queue_keeps_order_and_never_holds_more_than_its_capacity():
    with _supervised() as supervisor:
        queue = pipeline.Queue(supervisor, 3)

        def work(_):
            for item in itertools.count():
                queue.put(item)

        supervisor.start("worker", work)
        for expected in range(200):
            if expected % 100 == 0:
                processes.wait_for(lambda: len(queue.items) == 3)
                time.sleep(0.02)  # for a fourth
            assert len(queue.items) <= 3
            assert queue.get() == expected


def test_versions_give_the_exact_one_or_the_newest_and_keep_the_last():
    with _supervised() as supervisor:
        versions, results = pipeline.Versions(supervisor, 3), pipeline.Queue(supervisor, 1)
        for version in range(5):
            versions.publish(version, str(version))

        def work(_):
            for least, exact in ((2, True), (3, True), (2, False), (4, False), (5, True)):
                results.put(versions.get(least, exact))
            _stay(supervisor)

        supervisor.start("worker", work)
        assert [results.get() for _ in range(4)] == [(2, "2"), (3, "3"), (4, "4"), (4, "4")]
        assert sorted(versions._values) == [2, 3, 4]
        versions.publish(5, "5")  # the worker waits for it
        assert results.get() == (5, "5")
        assert sorted(versions._values) == [3, 4, 5]


def test_the_first_cause_reaches_the_consumer_with_its_traceback():
    """Also before items that are still in the queue, and again at every later call."""
    with _supervised() as supervisor:
        queue = pipeline.Queue(supervisor, 1)

        def first(_):
            queue.put(0)
            _divide()

        def second(_):
            processes.wait_for(lambda: supervisor._failure)
            raise AssertionError("which follows from the other")

        supervisor.start("actor 3", second)
        supervisor.start("actor 7", first)
        processes.wait_for(lambda: pipeline.abandoned() == [])  # both have failed
        with pytest.raises(ZeroDivisionError) as one:
            queue.get()
        report = "".join(traceback.format_exception(one.value))
        assert "in _divide" in report and report.endswith("\nin the thread 'actor 7'\n")
        last = command_line.ending(one.value).report.splitlines()[-1]
        assert last.endswith("in _divide: ZeroDivisionError: the simulator divided by zero")
        with pytest.raises(ZeroDivisionError):
            pipeline.Versions(supervisor, 1).publish(0, None)


def test_a_worker_that_exits_is_a_failure():
    with _supervised() as supervisor:
        supervisor.start("worker", lambda _: sys.exit(0))
        with pytest.raises(RuntimeError, match=r"SystemExit\(0\)"):
            pipeline.Queue(supervisor, 1).get()


@pytest.mark.parametrize("is_within_generator", [False, True])
def test_a_stop_iteration_is_named_with_its_line(is_within_generator):
    def step():
        yield next(iter(()))

    work = step().send if is_within_generator else lambda _: next(iter(()))
    with _supervised() as supervisor:
        supervisor.start("actor 0", lambda _: work(None))
        with pytest.raises(RuntimeError, match="generator raised StopIteration") as raised:
            pipeline.Queue(supervisor, 1).get()
    last = command_line.ending(raised.value).cause
    name = "step" if is_within_generator else "<lambda>"
    assert last.startswith(f"{__file__}:") and last.endswith(f"in {name}: StopIteration")


def test_a_failure_while_closing_is_logged(caplog):
    def work(worker):
        try:
            _stay(supervisor)
        finally:
            _divide()

    with _supervised() as supervisor:
        supervisor.start("worker", work)
        processes.wait_for(lambda: supervisor._waiting)
    assert "worker failed while it was closed" in caplog.text
    assert "in _divide" in caplog.text


@pytest.mark.parametrize("activity", ["environment step", "", "deadlock"])
def test_a_worker_that_hangs_is_detected_within_the_limit_with_its_stack(over, activity):
    def work(worker):
        with worker.doing(activity) if activity else contextlib.nullcontext():
            if activity == "deadlock":
                pipeline.Versions(supervisor, 1).get(9, exact=True)
            over.wait(processes.PATIENCE)

    with _supervised(LIMIT) as supervisor:
        too_late = threading.Timer(processes.PATIENCE, supervisor.fail, ["test", TimeoutError()])
        too_late.start()
        supervisor.start("actor 0", work)
        began = time.monotonic()
        with pytest.raises(pipeline.WorkerError, match="actor 0 hangs") as raised:
            pipeline.Queue(supervisor, 1).get()
        assert time.monotonic() - began > LIMIT
        over.set()
    too_late.cancel()
    last = command_line.ending(raised.value).report.splitlines()[-1]
    assert last.endswith(
        f"of '{activity or 'host work'}', and the limit is 0.2 s (Sebulba.timeout)"
    )
    place = f"{pipeline.__file__}:" if activity == "deadlock" else f"{__file__}:"
    assert last.startswith(place)
    expected = "get(9, exact=True)" if activity == "deadlock" else "over.wait(processes.PATIENCE)"
    assert expected in "".join(traceback.format_exception(raised.value))


def test_compiling_and_waiting_for_one_that_works_are_no_hangs():
    limit = 1.5  # seconds, many times those of a step
    with _supervised(limit) as supervisor:
        queues = [pipeline.Queue(supervisor, 1) for _ in range(2)]

        def fast(worker):
            for item in range(3):
                with worker.doing("wait for the queue"):
                    queues[0].put(item)
            _stay(supervisor)

        def slow(worker):
            with worker.doing(pipeline.COMPILING):
                time.sleep(1.2 * limit)
            for _ in range(24):
                with worker.doing("environment step"):
                    time.sleep(limit / 20)
            queues[1].put("slow")
            _stay(supervisor)

        supervisor.start("fast", fast)
        supervisor.start("slow", slow)
        assert queues[1].get() == "slow"
        assert [queues[0].get() for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("suspends", [False, True])
def test_the_limit_counts_only_while_the_consumer_waits_and_the_process_runs(monkeypatch, suspends):
    suspended, monotonic = 0.0, time.monotonic
    monkeypatch.setattr(pipeline.time, "monotonic", lambda: monotonic() + suspended)
    with _supervised(2.0) as supervisor:
        queue = pipeline.Queue(supervisor, 1)

        def work(worker):
            nonlocal suspended
            with worker.doing("environment step"):
                time.sleep(0.2)
                suspended = 100.0 * suspends
                time.sleep(1.0 if suspends else 3.0)
            queue.put("done")
            _stay(supervisor)

        supervisor.start("worker", work)
        if not suspends:
            time.sleep(2.5)  # the consumer learns
        assert queue.get() == "done"


def test_closing_ends_threads_that_wait_or_work_and_abandons_one_that_does_not_return(
    monkeypatch, over
):
    monkeypatch.setattr(pipeline, "_POLL_PERIOD", 10 * processes.PATIENCE)
    monkeypatch.setattr(pipeline, "_JOIN_TIMEOUT", 2.0)
    supervisor = pipeline.Supervisor(processes.PATIENCE)
    queue = pipeline.Queue(supervisor, 1)

    def put(_):
        for item in itertools.count():
            queue.put(item)

    def step(worker):  # leaves before its next activity
        while True:
            with worker.doing("environment step"):
                time.sleep(0.001)

    supervisor.start("stepping", step)
    supervisor.start("putting", put)
    supervisor.start("waiting", lambda _: _stay(supervisor))
    supervisor.start("stuck", lambda _: over.wait(processes.PATIENCE))
    processes.wait_for(lambda: len(supervisor._waiting) == 2)
    began = time.monotonic()
    supervisor.close()
    assert 2.0 <= time.monotonic() - began < processes.PATIENCE / 2
    assert pipeline.abandoned() == ["stuck"]


def test_a_call_returns_the_result_or_raises_and_one_that_hangs_or_is_stopped_is_abandoned(over):
    for limit in (processes.PATIENCE, None):
        assert pipeline.call("worker", lambda worker: worker.name, limit) == "worker"
    with pytest.raises(ZeroDivisionError):
        pipeline.call("worker", lambda _: _divide(), processes.PATIENCE)
    with pytest.raises(pipeline.WorkerError, match="worker hangs"):
        pipeline.call("worker", lambda _: over.wait(processes.PATIENCE), LIMIT)
    with pytest.raises(pipeline.Cancelled):
        pipeline.call("other", lambda _: over.wait(processes.PATIENCE), 2.0, stop=lambda: True)
    assert pipeline.abandoned() == ["other", "worker"]


@pytest.mark.parametrize(
    "ending",
    [pytest.param(x, marks=[pytest.mark.slow] * ("1 / 0" not in x)) for x in ENDINGS],
)
def test_the_end_of_the_interpreter_ends_workers_in_jax(ending):
    code, last = ENDINGS[ending]
    result = processes.finish(processes.spawn([sys.executable, "-c", PROGRAM + ending]), code)
    assert (result.stderr.splitlines() or [""])[-1].endswith(last)


def test_a_worker_has_the_contexts_of_jax_of_the_thread_that_starts_it():
    with jax.default_matmul_precision("float32"), jax.debug_nans(True), jax.disable_jit():
        settings = pipeline.call("call", lambda worker: jax.config.values, LIMIT)
        assert settings == jax.config.values
    assert pipeline.call("call", lambda worker: jax.config.values, LIMIT) != settings


def test_the_activities_of_a_thread_add_up_to_its_time(monkeypatch):
    now = 0.0
    monkeypatch.setattr(pipeline.time, "monotonic", lambda: now)
    timer = pipeline.Timer()
    with timer("one"):
        now += 3.0
        assert timer.take() == {"": 0.0, "one": 3.0}  # includes the current activity
        now += 2.0
    now += 1.0
    with pytest.raises(ZeroDivisionError), timer("two"):
        now += 4.0
        _divide()
    assert timer.take() == {"one": 2.0, "": 1.0, "two": 4.0}
    assert sum(timer.take().values()) == 0.0  # nothing is counted twice
