"""Tests of the terminal display: it fits 80 columns, and never floods a file."""

import io
import math
import re

import pytest

from podracers.training import terminal

VALUES = {
    "episode/return": -1234.5678,
    "evaluation/return": -1234.5678,
    "loss/total": -0.000123456,
    "steps_per_second": 312345.6,
    "other": 1.0,
}


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_file_gets_plain_lines_and_no_flood():
    file = io.StringIO()
    logger = terminal.TerminalLogger(1_000_000, file)
    for step in range(100, 1_000_001, 100):
        logger.write(step, VALUES)
    logger.close()
    lines = file.getvalue().splitlines()
    assert 95 <= len(lines) <= 102
    assert lines[-1] == (
        "100%  1.00M/1.00M steps  312k steps/s  return -1235  eval -1235  loss -0.0001235"
        "  0:00:00 left"
    )
    assert "\x1b" not in file.getvalue()


def test_the_last_values_are_shown_on_closing():
    file = io.StringIO()
    logger = terminal.TerminalLogger(10_000, file)
    logger.write(1, {"loss/total": 1.0})
    logger.write(2, {"loss/total": 2.0})
    logger.close()
    lines = file.getvalue().splitlines()
    assert [re.search(r"loss (\S+)", line)[1] for line in lines] == ["1", "2"]


def test_nan_leaves_the_last_value_on_the_screen():
    file = io.StringIO()
    logger = terminal.TerminalLogger(10, file)
    logger.write(1, {"episode/return": math.nan, "loss/total": 1.0})
    logger.write(2, {"episode/return": 3.0})
    logger.write(3, {"episode/return": math.nan})
    first, second, third = file.getvalue().splitlines()
    assert "return" not in first
    assert "return 3 " in second
    assert "return 3 " in third and "loss 1 " in third
    logger.close()


def test_a_terminal_gets_two_lines_of_80_columns(monkeypatch):
    for name, value in {"COLUMNS": "80", "TERM": "xterm", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    file = _Terminal()
    logger = terminal.TerminalLogger(2_600_000, file)
    assert "compiling" in file.getvalue()
    for step in range(100_000, 2_600_001, 100_000):
        logger.write(step, VALUES)
    logger.close()
    logger.close()  # as a fan-out may, after a failure
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()).replace("\r", "\n")
    lines = [line for line in plain.split("\n") if line.strip()]
    assert max(map(len, lines)) <= 80
    assert lines[-2].endswith("100%  0:00:00 left")
    assert lines[-1].strip().startswith("2.60M/2.60M steps  312k steps/s  return -1235")
    assert lines[-1].strip().endswith("loss -0.0001235")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00k"),
        (9994, "9.99k"),
        (99_950, "100k"),
        (312_345, "312k"),
        (999_499, "999k"),
        (999_600, "1.00M"),
        (2_600_000, "2.60M"),
        (12_345_678, "12.3M"),
        (5e9, "5.00G"),
    ],
)
def test_numbers_are_short(number, text):
    assert terminal._short(number) == text
