"""Tests of runs that are sent to Weights & Biases; nothing leaves the machine."""

import math
import sys
import types

import pytest

from podracers import errors
from podracers.training import experiment, run, run_directory, weights_and_biases
from tests import processes

TRACKER = "Experiment.tracker = @WeightsAndBiases()"


def test_refuses_an_unknown_mode():
    with pytest.raises(errors.UserError, match=r"^WeightsAndBiases\.mode: .*'offline'"):
        weights_and_biases.WeightsAndBiases(mode="ofline")


@pytest.mark.parametrize("tracker", ["'wandb'", "@WeightsAndBiases"])
def test_a_tracker_that_is_not_called_is_refused(tmp_path, tracker):
    with pytest.raises(errors.UserError, match=r"^Experiment\.tracker: expected @WeightsAndBiases"):
        experiment.load([str(processes.config_file(tmp_path))], [f"Experiment.tracker = {tracker}"])


def _fake(init_error=None, log_error=None):
    """Returns a stand-in for the package `wandb`, which records the calls of its runs."""
    module = types.ModuleType("wandb")
    kinds = {name: type(name, (Exception,), {}) for name in ("UsageError", "AuthenticationError")}
    module.errors = types.SimpleNamespace(**kinds)
    module.Settings = lambda **options: options
    module.calls = []

    def record(name, error=None):
        def call(*arguments, **options):
            module.calls.append((name, arguments, options))
            if error:
                raise error

        return call

    def init(**options):
        if init_error:
            raise kinds.get(init_error, ConnectionError)("no answer\nafter a minute")
        module.calls.append(("init", (), options))
        return types.SimpleNamespace(
            url="https://wandb.example/run",
            log=record("log", log_error),
            finish=record("finish"),
            config=types.SimpleNamespace(update=record("config")),
            summary=types.SimpleNamespace(update=record("summary")),
        )

    module.init = init
    return module


@pytest.mark.parametrize(
    ("module", "kind", "message"),
    [
        (None, errors.UserError, r"pip install 'podracers\[wandb\]'$"),  # importing it fails
        (types.ModuleType("wandb"), errors.UserError, r"pip install 'podracers\[wandb\]'$"),
        (_fake("UsageError"), errors.UserError, r"^Weights & Biases: no answer \(or .*\)$"),
        (_fake("ConnectionError"), errors.RunFailure, r"^Weights & Biases: no answer \(or .*\)$"),
    ],
)
def test_a_failure_at_the_start_is_one_line(tmp_path, monkeypatch, module, kind, message):
    monkeypatch.setitem(sys.modules, "wandb", module)
    directory = run_directory.RunDirectory(tmp_path)
    with pytest.raises(kind, match=message):
        weights_and_biases.WeightsAndBiases().open(directory, False, print)


def test_a_failure_later_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    fake = _fake(log_error=ConnectionError("the service is gone"))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    directory = run_directory.RunDirectory(tmp_path)
    logger = weights_and_biases.WeightsAndBiases().open(directory, False, print)
    logger.write(64, {"loss/total": 1.0})
    logger.write(128, {"loss/total": 1.0})
    logger.close()
    assert [name for name, *_ in fake.calls] == ["init", "log"]
    assert "the service is gone" in caplog.text


def test_a_resumed_run_continues_the_run_of_weights_and_biases(tmp_path, monkeypatch):
    for name in ("WANDB_NAME", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "wandb", fake := _fake())
    directory = run_directory.RunDirectory(tmp_path / "run")
    file = str(processes.config_file(tmp_path))
    bindings = [TRACKER, "WeightsAndBiases.project = 'p'", "Experiment.evaluation_period = 0"]
    first = experiment.load([file], [*bindings, "TOTAL_STEPS = 128"])
    summary = run.train(first, directory.path)
    later = experiment.load([str(directory.config)], ["TOTAL_STEPS = 192"])
    options = {"resume": True, "print_line": lambda line: None, "progress": False}
    run.Run(later, later.build(), directory, stop=(), **options).train()

    begun = [options for name, _, options in fake.calls if name == "init"]
    assert [(each["project"], each["name"]) for each in begun] == [("p", "run")] * 2
    assert {each["id"] for each in begun} == {(directory.path / "wandb_id").read_text()}
    logged = {options["step"]: values[0] for name, values, options in fake.calls if name == "log"}
    assert list(logged) == [64, 128, 192]
    rows = {row["step"]: row for row in processes.log(directory.path)}
    for step, values in logged.items():
        assert values["loss/total"] == pytest.approx(rows[step]["loss/total"])
        assert not any(map(math.isnan, values.values()))
    sent = [values[0] for name, values, _ in fake.calls if name == "summary"]
    assert sent[0] == summary
    sent = [values[0] for name, values, _ in fake.calls if name == "config"]
    assert [each["PPO.gamma"] for each in sent] == [first.build().agent.gamma] * 2
    assert [options for name, _, options in fake.calls if name == "finish"] == [
        {"exit_code": 0}
    ] * 2


@pytest.mark.slow
def test_the_installed_package_accepts_our_options(tmp_path, monkeypatch):
    """Offline, with wandb itself."""
    pytest.importorskip("wandb.sdk")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    directory = run_directory.RunDirectory(tmp_path)
    lines = []
    tracker = weights_and_biases.WeightsAndBiases(mode="offline", project="p")
    for resume in (False, True):
        logger = tracker.open(directory, resume, lines.append)
        logger.write(64 + resume, {"loss/total": 1.0, "episode/return": math.nan})
        logger.write_configuration({"PPO.gamma": 0.9})
        logger.write_summary({"evaluation": {"return": 1.0}})
        logger.close()
    assert len(lines) == 2 and all(str(tmp_path) in line for line in lines)
    kept = (tmp_path / "wandb_id").read_text()
    assert len(list(tmp_path.glob(f"wandb/offline-run-*/run-{kept}.wandb"))) == 2
