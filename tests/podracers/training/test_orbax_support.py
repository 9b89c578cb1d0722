"""Tests of what is kept quiet about orbax, and of what is not."""

import logging

from podracers.training import orbax_support


def test_only_writes_that_fail_after_the_first_are_kept_quiet(caplog):
    orbax_support.quieten()
    logger = logging.getLogger("asyncio")
    logger.error("Task exception was never retrieved\nfuture: <Task finished coro=<write()>>")
    logger.error("Executing a task took too long")
    assert [record.getMessage() for record in caplog.records] == ["Executing a task took too long"]
