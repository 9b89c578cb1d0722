"""Tests of the logs: they are readable at once, and a resumed log continues from its checkpoint."""

import io
import json
import math
import re
import subprocess

import pytest
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.plugins.hparams import metadata
from tensorboard.util import tensor_util

from podracers import errors
from podracers.training import loggers


def _read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def _events(directory):
    accumulator = event_accumulator.EventAccumulator(str(directory))
    accumulator.Reload()
    return accumulator


def _curve(directory, name):
    return [(event.step, event.value) for event in _events(directory).Scalars(name)]


@pytest.mark.parametrize("torn", ["", '{"step": 40, "lo', "\x00\x00\x00", '{"step"\n[1]\n'])
def test_jsonl_is_readable_at_once_and_resumes_after_the_checkpoint(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    logger = loggers.JsonlLogger(path, resume_step=20)  # there is nothing to resume from
    logger.write(10, {"loss": 1.0, "return": math.nan, "ratio": math.inf})
    assert _read(path) == [{"step": 10, "loss": 1.0, "return": None, "ratio": None}]
    for step in (20, 30):
        logger.write(step, {"loss": step / 10})
    logger.close()
    with path.open("a") as file:
        file.write(torn)
    logger = loggers.JsonlLogger(path, resume_step=20)
    logger.write(30, {"loss": -1.0})
    logger.close()
    assert [(row["step"], row["loss"]) for row in _read(path)] == [(10, 1), (20, 2), (30, -1)]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]
    loggers.JsonlLogger(path).close()  # starts anew
    assert _read(path) == []


@pytest.mark.parametrize(
    "line",
    [
        b'{"loss": 1.0}',
        b'{"step": "20"}',
        b'{"step": 20, "loss": [1]}',
        b'{"step": 20, "loss": 1e999}',
        b"\x00\xff",
        b"",
    ],
    ids=["no step", "text", "array", "infinite", "bytes", "empty"],
)
def test_damaged_lines_are_left_out_with_a_warning(tmp_path, caplog, line):
    path = tmp_path / "metrics.jsonl"
    good = [b'{"step": 10}', b'{"step": 30, "loss": null}']
    path.write_bytes(b"\n".join([good[0], line, line, good[1], b'{"step": 40, "lo']))
    assert loggers.read_rows(path) == [{"step": 10}, {"step": 30, "loss": None}]
    (record,) = caplog.records
    assert f"{path}: left out 2 damaged lines, the first of them line 2 (" in record.message
    loggers.JsonlLogger(path, resume_step=30).close()
    assert path.read_bytes().splitlines() == good


@pytest.mark.parametrize("kind", [loggers.JsonlLogger, loggers.TensorBoardLogger])
def test_a_file_that_vanishes_is_noticed(tmp_path, kind):
    folder = tmp_path / "run"
    folder.mkdir()
    logger = kind(folder / "metrics.jsonl" if kind is loggers.JsonlLogger else folder)
    logger.write(1, {"loss": 1.0})
    folder.rename(tmp_path / "moved")
    with pytest.raises(errors.RunFailure, match=f"^'{folder}/.*' was moved to '{tmp_path}/moved/"):
        logger.write(2, {"loss": 1.0})
    logger.close()


def test_tensorboard_shows_curves_and_hides_those_after_the_checkpoint(tmp_path):
    logger = loggers.TensorBoardLogger(tmp_path)
    for step in (10, 20, 30, 40):
        logger.write(step, {"loss": step / 4, "return": math.nan if step < 40 else 1.0})
    assert _curve(tmp_path, "loss") == [(10, 2.5), (20, 5.0), (30, 7.5), (40, 10.0)]  # flushed
    assert _curve(tmp_path, "return") == [(40, 1.0)]
    logger.close()
    logger = loggers.TensorBoardLogger(tmp_path, resume_step=20)
    logger.write(30, {"loss": -1.0})
    logger.close()
    assert _curve(tmp_path, "loss") == [(10, 2.5), (20, 5.0), (30, -1.0)]


def test_tensorboard_shows_the_configuration(tmp_path):
    values = {"PPO.gamma": 0.9, "PPO.epochs": 4.0, "x": True, "agent": "PPO"}
    logger = loggers.TensorBoardLogger(tmp_path)
    logger.write_configuration(0, {"config": "# no heading\nA = *b* <c>\n"}, values)
    logger.close()
    loggers.TensorBoardLogger(tmp_path, resume_step=0).close()  # which keeps them
    events = _events(tmp_path)
    (page,) = events.Tensors("config")
    text = tensor_util.make_ndarray(page.tensor_proto).item().decode()
    assert (page.step, text) == (0, "    # no heading\n    A = *b* <c>\n")
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    found = metadata.parse_session_start_info_plugin_data(content)
    assert found.group_name == f"{tmp_path.name} in {tmp_path.parent}"
    assert {n: getattr(v, v.WhichOneof("kind")) for n, v in found.hparams.items()} == values


class _Spy:
    def __init__(self, error: Exception | None = None):
        self.error, self.closed = error, False

    def close(self):
        self.closed = True
        if self.error:
            raise self.error


def test_every_logger_is_closed_and_the_first_failure_raised():
    spies = [_Spy(), _Spy(OSError("first")), _Spy(OSError("second")), _Spy()]
    with pytest.raises(OSError, match="first"), loggers.Loggers(spies):
        pass
    assert all(spy.closed for spy in spies)
    with pytest.raises(KeyError, match="run"), loggers.Loggers(spies):
        raise KeyError("run")


@pytest.mark.parametrize("kind", ["jsonl", "tensorboard"])
def test_a_full_disk_is_one_line(full_disk, kind):
    def write():
        tensorboard = kind == "tensorboard"
        logger = (
            loggers.TensorBoardLogger(full_disk)
            if tensorboard
            else loggers.JsonlLogger(full_disk / "metrics.jsonl")
        )
        for step in range(2000):
            logger.write(step, {"some/long/name": 1.0})

    with pytest.raises(errors.RunFailure, match=r"^could not write .*: No space left") as caught:
        write()
    assert "\n" not in str(caught.value)


@pytest.fixture(name="full_disk")
def _full_disk(tmp_path):
    """A file system of four pages."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


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


def test_a_file_gets_a_plain_line_for_each_percent():
    file = io.StringIO()
    logger = loggers.TerminalLogger(1_000_000, file)
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


def test_the_terminal_keeps_the_last_values_that_are_not_nan():
    file = io.StringIO()
    logger = loggers.TerminalLogger(1000, file)
    logger.write(1, {"episode/return": math.nan, "loss/total": 1.0})
    logger.write(2, {"episode/return": 3.0})  # too soon for a line of its own
    logger.write(3, {"episode/return": math.nan})
    logger.close()
    first, last = file.getvalue().splitlines()
    assert "return" not in first
    assert "return 3 " in last and "loss 1 " in last


def test_a_terminal_gets_two_lines_of_80_columns(monkeypatch):
    for name, value in {"COLUMNS": "80", "TERM": "xterm", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    file = _Terminal()
    logger = loggers.TerminalLogger(2_600_000, file)
    assert "compiling" in file.getvalue()
    for step in range(100_000, 2_600_001, 100_000):
        logger.write(step, VALUES)
    logger.close()
    logger.close()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()).replace("\r", "\n")
    lines = [line.rstrip() for line in plain.split("\n") if line.strip()]
    assert max(map(len, lines)) <= 80
    assert lines[-2].endswith("100% 0:00:00")
    assert lines[-1].startswith("2.60M/2.60M steps  312k steps/s  return -1235")
    assert lines[-1].endswith("loss -0.0001235")


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1000, "1.00k"), (9994, "9.99k"), (999_600, "1.00M"), (5e9, "5.00G")],
)
def test_numbers_are_short(number, text):
    assert loggers._short(number) == text
