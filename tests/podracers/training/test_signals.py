"""Tests of asking a run to stop."""

import os
import signal
import threading

import pytest

from podracers.training import signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_notes_a_signal_and_says_so(number, capsys):
    with signals.StopRequest() as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop
        assert stop.signal == number
    assert number.name in capsys.readouterr().err


def test_a_second_interrupt_interrupts():
    with signals.StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop


def test_puts_handlers_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with signals.StopRequest():
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before


def test_notes_nothing_outside_the_main_thread():
    seen = []

    def enter():
        with signals.StopRequest() as stop:
            seen.append(bool(stop))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [False]
