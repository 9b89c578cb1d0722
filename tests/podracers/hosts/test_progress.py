"""Who keeps the others waiting, by what the processes say of themselves."""

from concurrent import futures

from podracers.hosts import progress

TIMEOUT = 60.0


def _report(stage, idle, longest=1.0, doing="updates", where=""):
    return progress.Report(stage, doing, idle, longest, where)


def _judge(*reports):
    return progress.judge(dict(enumerate(reports)), TIMEOUT)


def test_one_that_stays_behind_is_named_with_its_place():
    late = _report(7, 61.0, doing="logging", where="disk.py:3 in write")
    cause = _judge(_report(8, 61.0), late)
    assert cause == (
        "process 1 makes no progress: logging for 61 s (disk.py:3 in write), and the others wait"
    )
    assert _judge(late, _report(8, 61.0)).startswith("process 0 makes no progress: logging")


def test_within_the_limit_nobody_is_stuck():
    assert _judge(_report(8, 59.0), _report(7, 500.0)) is None  # nobody has waited for so long
    assert _judge(_report(8, 500.0), _report(7, 59.0)) is None  # it goes on
    assert _judge(_report(7, 61.0), _report(7, 61.0)) is None


def test_what_took_longer_before_may_again():
    assert _judge(_report(8, 500.0), _report(7, 199.0, longest=20.0)) is None
    assert _judge(_report(8, 500.0), _report(7, 201.0, longest=20.0))


def test_what_is_not_known_yet_has_no_limit():
    """Such as compiling, which one process may find on its disk, and the others not."""
    assert _judge(_report(8, 9e9), _report(7, 9e9, longest=None)) is None
    assert _judge(_report(7, 9e9), _report(7, 9e9, longest=None)) is None


def test_where_all_are_in_the_same_program_the_limit_is_longer():
    assert _judge(_report(7, 1799.0), _report(7, 1801.0)) is None
    assert "no process makes progress: updates for 1801 s" in _judge(
        _report(7, 1801.0), _report(7, 1801.0)
    )
    assert _judge(_report(7, 2999.0, longest=100.0), _report(7, 2999.0)) is None


def test_a_stage_has_a_limit_once_it_was_left_twice_and_the_first_time_does_not_count():
    mine = progress.Progress()
    for seconds, known in ((2.0, None), (1.0, None), (0.5, 1.0), (1.5, 1.0), (0.5, 1.5)):
        mine.reach("updates")
        assert mine.report().longest == known
        mine.tick(seconds)
        mine.touch()
        assert mine.report().idle == 0.0
        mine.reach("logging")
    assert mine.report()[:2] == (10, "logging")


def test_what_nobody_has_named_has_no_limit():
    """It may be the compiling of a start, which one process finds on its disk, and others not."""
    mine = progress.Progress()
    for _ in range(5):
        mine.reach("updates")
        mine.reach(progress.ANYTHING)
    assert mine.report()[1:4] == (progress.ANYTHING, 0.0, None)


def test_time_in_which_nobody_looked_does_not_count():
    mine = progress.Progress()
    mine.tick(1.5)
    mine.tick(3600.0)  # the process was suspended
    assert mine.report().idle == 3.5


def test_a_report_says_where_the_main_thread_is():
    mine = progress.Progress()
    with futures.ThreadPoolExecutor() as other:
        report = other.submit(mine.report).result()
    assert "test_progress.py:" in report.where
    assert report.where.endswith("in test_a_report_says_where_the_main_thread_is")
