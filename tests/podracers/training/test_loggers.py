"""Tests of the logs: what is written can be read, and a resumed log has no second past."""

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


def _curve(directory, name):
    accumulator = event_accumulator.EventAccumulator(str(directory))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(name)]


def test_jsonl_is_readable_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    logger = loggers.JsonlLogger(path)
    logger.write(10, {"loss": 0.5, "return": math.nan})
    assert _read(path) == [{"step": 10, "loss": 0.5, "return": None}]
    logger.write(20, {"loss": math.inf})
    logger.close()
    assert _read(path)[1:] == [{"step": 20, "loss": None}]


@pytest.mark.parametrize("torn", ["", '{"step": 40, "lo', "\x00\x00\x00", '{"step"\n[1]\n'])
def test_jsonl_resumes_after_the_checkpoint(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    logger = loggers.JsonlLogger(path)
    for step in (10, 20, 30):
        logger.write(step, {"loss": step / 10})
    logger.close()
    with path.open("a") as file:
        file.write(torn)
    logger = loggers.JsonlLogger(path, resume_step=20)
    logger.write(30, {"loss": -1.0})
    logger.close()
    assert [(row["step"], row["loss"]) for row in _read(path)] == [(10, 1), (20, 2), (30, -1)]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"[" * 100000, "nested too deeply"),
        (b'{"loss": 1.0}', "it has no 'step'"),
        (b'{"step": "20"}', "'step' is \"20\""),
        (b'{"step": 20, "loss": [1]}', "'loss' is an array of 1"),
        (b'{"step": 20, "loss": 1e999}', "'loss' is Infinity"),
        (b"\x00\xff", ""),
        (b"", "Expecting value"),
    ],
    ids=["deep", "stepless", "text", "array", "infinite", "bytes", "empty"],
)
def test_damaged_lines_are_left_out_and_said(tmp_path, caplog, line, reason):
    path = tmp_path / "metrics.jsonl"
    good = [b'{"step": 10}', b'{"step": 30, "loss": null}']
    path.write_bytes(b"\n".join([good[0], line, good[1], b'{"step": 40, "lo']))
    assert loggers.read_rows(path) == [{"step": 10}, {"step": 30, "loss": None}]
    (record,) = caplog.records
    assert record.message.startswith(f"{path}: left out what is damaged: line 2 (")
    assert reason in record.message
    logger = loggers.JsonlLogger(path, resume_step=30)
    logger.close()
    assert path.read_bytes().splitlines() == good
    assert len(caplog.records) == 2
    path.write_bytes((line + b"\n") * 7)
    assert loggers.read_rows(path) == []
    assert "lines 1, 2, 3, 4, 5 and 2 more (" in caplog.records[-1].message


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


def test_jsonl_starts_anew_or_from_nothing(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for resume_step in (20, None):
        logger = loggers.JsonlLogger(path, resume_step)
        logger.write(10, {})
        logger.close()
        assert _read(path) == [{"step": 10}]


def test_tensorboard_reads_what_was_written_and_purges(tmp_path):
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


def test_tensorboard_shows_texts_as_they_are_and_hyperparameters(tmp_path):
    text = "# no heading\nA = *b* <c>\n"
    logger = loggers.TensorBoardLogger(tmp_path / "one")
    logger.write_texts(0, {"config": text})
    logger.write_hyperparameters({"PPO.gamma": 0.9, "PPO.epochs": 4, "x": True, "agent": "PPO"})
    logger.write(10, {"evaluation/return": 2.0})
    logger.close()
    assert _texts(tmp_path / "one", "config") == [(0, "    # no heading\n    A = *b* <c>\n")]
    trial, values = _hyperparameters(tmp_path / "one")
    assert trial == f"one in {tmp_path}"
    assert values == {"PPO.gamma": 0.9, "PPO.epochs": 4.0, "x": True, "agent": "PPO"}
    assert _curve(tmp_path / "one", "evaluation/return") == [(10, 2.0)]


def test_texts_outlive_a_resumption_from_where_they_were_written(tmp_path):
    loggers_ = [loggers.TensorBoardLogger(tmp_path, step) for step in (None, 0, 20)]
    loggers_[0].write_texts(0, {"config": "a"})
    loggers_[1].write(10, {"loss": 1.0})
    assert _texts(tmp_path, "config") == [(0, "    a\n")]


def _hyperparameters(directory):
    """Returns the trial and the values that TensorBoard's dashboard reads."""
    accumulator = event_accumulator.EventAccumulator(str(directory))
    accumulator.Reload()
    content = accumulator.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    found = metadata.parse_session_start_info_plugin_data(content)
    values = {name: getattr(v, v.WhichOneof("kind")) for name, v in found.hparams.items()}
    return found.group_name, values


def _texts(directory, name):
    accumulator = event_accumulator.EventAccumulator(str(directory))
    accumulator.Reload()
    return [
        (event.step, tensor_util.make_ndarray(event.tensor_proto).item().decode())
        for event in accumulator.Tensors(name)
    ]


class _Spy:
    def __init__(self, error: Exception | None = None):
        self.error, self.written, self.closed = error, [], False

    def write(self, step, values):
        self.written.append((step, dict(values)))

    def close(self):
        self.closed = True
        if self.error:
            raise self.error


def test_loggers_close_every_one_and_raise_the_first_failure():
    spies = [_Spy(), _Spy(OSError("first")), _Spy(OSError("second")), _Spy()]
    fan_out = loggers.Loggers(spies)
    fan_out.write(1, {"a": 2.0})
    assert all(spy.written == [(1, {"a": 2.0})] for spy in spies)
    with pytest.raises(OSError, match="first"):
        fan_out.close()
    assert all(spy.closed for spy in spies)


def test_a_failure_of_the_run_is_not_hidden_by_one_of_closing():
    spies = [_Spy(OSError("closing")), _Spy()]
    with pytest.raises(KeyError, match="run"), loggers.Loggers(spies):
        raise KeyError("run")
    assert all(spy.closed for spy in spies)
    with pytest.raises(OSError, match="closing"), loggers.Loggers(spies):
        pass


@pytest.mark.parametrize("kind", ["jsonl", "tensorboard"])
def test_a_full_disk_is_one_line(full_disk, kind):
    make = {
        "jsonl": lambda: loggers.JsonlLogger(full_disk / "metrics.jsonl"),
        "tensorboard": lambda: loggers.TensorBoardLogger(full_disk),
    }[kind]
    with pytest.raises(errors.RunFailure, match=r"could not write .*: No space left") as caught:
        logger = make()
        for step in range(2000):
            logger.write(step, {"some/long/name": 1.0})
    assert "\n" not in str(caught.value)


@pytest.fixture(name="full_disk")
def _full_disk(tmp_path):
    """A file system with four pages left."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


# The terminal display fits 80 columns, and never floods a file.
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


def test_the_last_values_are_shown_on_closing():
    file = io.StringIO()
    logger = loggers.TerminalLogger(10_000, file)
    logger.write(1, {"loss/total": 1.0})
    logger.write(2, {"loss/total": 2.0})
    logger.close()
    lines = file.getvalue().splitlines()
    assert [re.search(r"loss (\S+)", line)[1] for line in lines] == ["1", "2"]


def test_nan_leaves_the_last_value_on_the_screen():
    file = io.StringIO()
    logger = loggers.TerminalLogger(10, file)
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
    logger = loggers.TerminalLogger(2_600_000, file)
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
    assert loggers._short(number) == text
