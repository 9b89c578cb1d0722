"""Tests of the logs: flushed at each line, and continued from the checkpoint on resumption."""

import io
import json
import math
import re

import pytest
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.plugins.hparams import metadata
from tensorboard.util import tensor_util

from podracers import errors
from podracers.training import displays, loggers


def _read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def _events(directory):
    accumulator = event_accumulator.EventAccumulator(str(directory))
    accumulator.Reload()
    return accumulator


def _curve(directory, name):
    return [(event.step, event.value) for event in _events(directory).Scalars(name)]


@pytest.mark.parametrize("torn", ["", '{"step": 40, "lo', '{"step"\n'])
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


@pytest.mark.parametrize("line", [b'{"loss": 1.0}', b'{"step": "x"}', b"[1]", b"\x00\xff", b""])
def test_a_damaged_line_is_left_out_at_the_end_and_else_a_failure(tmp_path, caplog, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 10}\n' + line + b"\n")
    assert loggers.read_rows(path) == [{"step": 10}]
    (record,) = caplog.records
    assert f"{path}: " in record.message and "line 2" in record.message
    path.write_bytes(b'{"step": 10}\n' + line + b'\n{"step": 30}\n')
    with pytest.raises(errors.RunFailure, match=f"^{path}, line 2: .*$"):
        loggers.read_rows(path)
    with pytest.raises(errors.RunFailure, match=f"^{path}, line 2: .*$"):
        loggers.JsonlLogger(path, resume_step=30)
    assert path.read_bytes().endswith(b'{"step": 30}\n')  # as it was


def test_tensorboard_shows_curves_and_hides_those_after_the_checkpoint(tmp_path):
    logger = displays.TensorBoardLogger(tmp_path)
    for step in (10, 20, 30, 40):
        logger.write(step, {"loss": step / 4, "return": math.nan if step < 40 else 1.0})
    assert _curve(tmp_path, "loss") == [(10, 2.5), (20, 5.0), (30, 7.5), (40, 10.0)]  # flushed
    assert _curve(tmp_path, "return") == [(40, 1.0)]
    logger.close()
    logger = displays.TensorBoardLogger(tmp_path, resume_step=20)
    logger.write(30, {"loss": -1.0})
    logger.close()
    assert _curve(tmp_path, "loss") == [(10, 2.5), (20, 5.0), (30, -1.0)]


def test_tensorboard_shows_the_configuration(tmp_path):
    values = {"PPO.gamma": 0.9, "PPO.epochs": 4.0, "x": True, "agent": "PPO"}
    logger = displays.TensorBoardLogger(tmp_path)
    logger.write_configuration(0, {"config": "# no heading\nA = *b* <c>\n"}, values)
    logger.close()
    values["PPO.epochs"] = 8.0
    logger = displays.TensorBoardLogger(tmp_path, resume_step=0)
    logger.write_configuration(0, {}, values)  # replaces the row, and keeps the page
    events = _events(tmp_path)
    (page,) = events.Tensors("config")
    text = tensor_util.make_ndarray(page.tensor_proto).item().decode()
    assert (page.step, text) == (0, "    # no heading\n    A = *b* <c>\n")
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    session = metadata.parse_session_start_info_plugin_data(content)
    assert session.group_name == f"{tmp_path.name} in {tmp_path.parent}"
    assert {n: getattr(v, v.WhichOneof("kind")) for n, v in session.hparams.items()} == values


@pytest.mark.parametrize("kind", [loggers.JsonlLogger, displays.TensorBoardLogger])
def test_a_full_disk_is_one_line(mount, kind):
    full_disk = mount("16k")
    logger = kind(full_disk / "metrics.jsonl" if kind is loggers.JsonlLogger else full_disk)
    with pytest.raises(errors.RunFailure, match=r"^could not write .*: No space left.*$"):
        for step in range(2000):
            logger.write(step, {"some/long/name": 1.0})


VALUES = {
    "episode/return": -1234.5678,
    "evaluation/return": -1234.5678,
    "loss/total": -0.000123456,
    "steps_per_second": 312345.6,
    "other": 1.0,
}
SHOWN = "312,346 steps/s  return -1235  eval -1235  loss -0.0001235"


def test_a_file_gets_a_line_each_ten_seconds_with_the_last_values_that_are_not_nan(monkeypatch):
    now, file = [0.0], io.StringIO()
    monkeypatch.setattr(displays.time, "monotonic", lambda: now[0])
    logger = displays.TerminalLogger(1000, file)
    for step in range(20, 1001, 20):
        now[0] += 1.0
        logger.write(step, VALUES if step == 20 else {"loss/total": math.nan})
    logger.close()
    lines = file.getvalue().splitlines()
    assert [line[:4] for line in lines] == [" 20%", " 40%", " 60%", " 80%", "100%"]
    assert lines[-1] == f"100%  0:00:00 left  1,000 steps  {SHOWN}"


def test_a_terminal_gets_a_line_of_80_columns(monkeypatch):
    for name, value in {"COLUMNS": "80", "TERM": "xterm", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    file = io.StringIO()
    file.isatty = lambda: True
    logger = displays.TerminalLogger(2_600_000, file)
    assert "compiling" in file.getvalue()
    for step in range(100_000, 2_600_001, 100_000):
        logger.write(step, VALUES)
    logger.close()
    logger.close()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()).replace("\r", "\n")
    lines = [line.rstrip() for line in plain.split("\n") if line.strip()]
    assert max(map(len, lines)) <= 80
    assert lines[-1].startswith(f"100% 0:00:00 {SHOWN} ")
