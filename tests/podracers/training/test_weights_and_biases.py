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


@pytest.mark.parametrize("module", [None, types.ModuleType("wandb")])  # missing; an empty folder
def test_a_missing_package_is_found_before_compiling(tmp_path, monkeypatch, module):
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delitem(sys.modules, "wandb.errors", raising=False)
    loaded = experiment.load([str(processes.config_file(tmp_path))], [TRACKER])
    with pytest.raises(errors.UserError, match=r"pip install 'podracers\[wandb\]'$"):
        run.train(loaded, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def _install(monkeypatch, init_error=None, log_error=None):
    """Installs a stand-in for the package `wandb`; returns the calls of its runs."""
    module, calls = types.ModuleType("wandb"), []
    module.errors = types.ModuleType("wandb.errors")
    module.errors.UsageError = type("UsageError", (Exception,), {})
    module.errors.AuthenticationError = type("AuthenticationError", (Exception,), {})
    module.Settings = lambda **options: options

    def record(name, error=None):
        def call(*arguments, **options):
            calls.append((name, arguments, options))
            if error:
                raise error

        return call

    def init(**options):
        if init_error:
            kind = getattr(module.errors, init_error, ConnectionError)
            raise kind("no answer\nafter a minute")
        calls.append(("init", (), options))
        return types.SimpleNamespace(
            id=options.get("id", "chosen"),
            log=record("log", log_error),
            finish=record("finish"),
            config=types.SimpleNamespace(update=record("config")),
            summary=types.SimpleNamespace(update=record("summary")),
        )

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setitem(sys.modules, "wandb.errors", module.errors)
    return calls


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        ("UsageError", errors.UserError),
        ("AuthenticationError", errors.UserError),
        ("ConnectionError", errors.RunFailure),
    ],
)
def test_a_failure_at_the_start_is_one_line(tmp_path, monkeypatch, raised, kind):
    _install(monkeypatch, raised)
    directory = run_directory.RunDirectory(tmp_path)
    with pytest.raises(kind, match=r"^Weights & Biases: no answer \(or .*\)$"):
        weights_and_biases.WeightsAndBiases().open(directory, False)


def test_a_failure_later_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    calls = _install(monkeypatch, log_error=ConnectionError("the service is gone"))
    directory = run_directory.RunDirectory(tmp_path)
    logger = weights_and_biases.WeightsAndBiases().open(directory, False)
    logger.write(64, {"loss/total": 1.0})
    logger.write(128, {"loss/total": 1.0})
    logger.close()
    assert [name for name, *_ in calls] == ["init", "log"]
    assert "the service is gone" in caplog.text


def test_a_resumed_run_continues_the_run_of_weights_and_biases(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_NAME", raising=False)
    calls = _install(monkeypatch)
    directory = run_directory.RunDirectory(tmp_path / "run")
    file = str(processes.config_file(tmp_path))
    bindings = [TRACKER, "WeightsAndBiases.project = 'p'", "Experiment.evaluation_period = 0"]
    first = experiment.load([file], [*bindings, "TOTAL_STEPS = 128"])
    summary = run.train(first, directory.path)
    later = experiment.load([str(directory.config)], ["TOTAL_STEPS = 192"])
    options = {"resume": True, "print_line": lambda line: None, "progress": False}
    run.Run(later, later.build(), directory, stop=(), **options).train()

    begun = [options for name, _, options in calls if name == "init"]
    assert [(each["project"], each["name"]) for each in begun] == [("p", "run")] * 2
    assert [each.get("id") for each in begun] == [None, "chosen"]
    logged = {options["step"]: values[0] for name, values, options in calls if name == "log"}
    assert list(logged) == [64, 128, 192]
    rows = {row["step"]: row for row in processes.log(directory.path)}
    for step, values in logged.items():
        assert values["loss/total"] == pytest.approx(rows[step]["loss/total"])
        assert not any(map(math.isnan, values.values()))
    sent = [values[0] for name, values, _ in calls if name == "summary"]
    assert sent[0] == summary
    sent = [values[0] for name, values, _ in calls if name == "config"]
    assert [each["PPO.gamma"] for each in sent] == [first.build().agent.gamma] * 2
    assert [options for name, _, options in calls if name == "finish"] == [{"exit_code": 0}] * 2


@pytest.mark.slow
def test_the_installed_package_accepts_our_options(tmp_path, monkeypatch):
    """Offline, with wandb itself."""
    pytest.importorskip("wandb.sdk")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    directory = run_directory.RunDirectory(tmp_path)
    tracker = weights_and_biases.WeightsAndBiases(mode="offline", project="p")
    for resume in (False, True):
        logger = tracker.open(directory, resume)
        logger.write(64 + resume, {"loss/total": 1.0, "episode/return": math.nan})
        logger.write_configuration({"PPO.gamma": 0.9})
        logger.write_summary({"evaluation": {"return": 1.0}})
        logger.close()
    kept = (tmp_path / "wandb_id").read_text()
    assert len(list(tmp_path.glob(f"wandb/offline-run-*/run-{kept}.wandb"))) == 2
