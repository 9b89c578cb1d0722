"""Runs that are sent to Weights & Biases; nothing leaves the machine."""

import math
import sys
import types
from unittest import mock

import pytest

from podracers import errors
from podracers.training import experiment, loggers, run, run_directory
from tests import processes

TRACKER = "Experiment.tracker = @WeightsAndBiases()"


@pytest.mark.parametrize("module", [None, types.ModuleType("wandb")])  # missing; an empty folder
def test_a_missing_package_is_found_before_compiling(tmp_path, monkeypatch, module):
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delitem(sys.modules, "wandb.errors", raising=False)
    loaded = experiment.load([str(processes.config_file(tmp_path))], [TRACKER])
    with pytest.raises(errors.UserError, match=r"pip install wandb$"):
        run.train(loaded, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def _install(monkeypatch):
    """Installs a stand-in for the package `wandb`, which it returns."""
    module = mock.MagicMock()
    module.errors.UsageError = type("UsageError", (Exception,), {})
    module.errors.AuthenticationError = type("AuthenticationError", (Exception,), {})
    module.init.return_value.id = "chosen"
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setitem(sys.modules, "wandb.errors", module.errors)
    return module


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        ("UsageError", errors.UserError),
        ("AuthenticationError", errors.UserError),
        (None, errors.RunFailure),
    ],
)
def test_a_failure_at_the_start_is_one_line(tmp_path, monkeypatch, raised, kind):
    module = _install(monkeypatch)
    error = getattr(module.errors, raised) if raised else ConnectionError
    module.init.side_effect = error("no answer\nafter a minute")
    directory = run_directory.RunDirectory(tmp_path)
    with pytest.raises(kind, match=r"^Weights & Biases: no answer \(or .*\)$"):
        loggers.WeightsAndBiases().open(directory, False)


def test_a_failure_later_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    tracked = _install(monkeypatch).init.return_value
    tracked.log.side_effect = ConnectionError("the service is gone")
    directory = run_directory.RunDirectory(tmp_path)
    logger = loggers.WeightsAndBiases().open(directory, False)
    for step in (64, 128):
        logger.write(step, {"loss/total": 1.0})
    logger.close()
    assert (tracked.log.call_count, tracked.finish.call_count) == (1, 0)
    assert "the service is gone" in caplog.text


@pytest.mark.slow
def test_a_resumed_run_continues_the_run_of_weights_and_biases(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_NAME", raising=False)
    module = _install(monkeypatch)
    tracked = module.init.return_value
    directory = run_directory.RunDirectory(tmp_path / "run")
    file = str(processes.config_file(tmp_path))
    bindings = [TRACKER, "WeightsAndBiases.project = 'p'", "Experiment.evaluation_period = 0"]
    first = experiment.load([file], [*bindings, "TOTAL_STEPS = 128"])
    summary = run.train(first, directory.path)
    tracked.summary.update.assert_called_once_with(summary)
    text = directory.config.read_text()  # as an earlier version named the module
    directory.config.write_text(text.replace("loggers", "weights_and_biases"))
    later = experiment.load([str(directory.config)], ["TOTAL_STEPS = 192"])
    options = {"resume": True, "print_line": lambda line: None, "progress": False}
    run.Run(later, later.build(), directory, stop=(), **options).train()

    begun = [call.kwargs for call in module.init.call_args_list]
    assert [(options["project"], options["name"]) for options in begun] == [("p", "run")] * 2
    assert [options.get("id") for options in begun] == [None, "chosen"]
    logged = {call.kwargs["step"]: call.args[0] for call in tracked.log.call_args_list}
    assert list(logged) == [64, 128, 192]
    for row in processes.log(directory.path):
        assert logged[row["step"]]["loss/total"] == pytest.approx(row["loss/total"])
        assert not any(map(math.isnan, logged[row["step"]].values()))
    sent = [call.args[0]["PPO.gamma"] for call in tracked.config.update.call_args_list]
    assert sent == [first.build().agent.gamma] * 2
    assert "None" not in tracked.config.update.call_args.args[0].values()
    assert tracked.finish.call_args_list == [mock.call(exit_code=0)] * 2


@pytest.mark.slow
def test_the_installed_package_accepts_our_options(tmp_path, monkeypatch):
    """Offline, with wandb itself."""
    pytest.importorskip("wandb.sdk")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    directory = run_directory.RunDirectory(tmp_path)
    tracker = loggers.WeightsAndBiases(mode="offline", project="p")
    for resume in (False, True):
        logger = tracker.open(directory, resume)
        logger.write(64 + resume, {"loss/total": 1.0, "episode/return": math.nan})
        logger.write_configuration(0, {}, {"PPO.gamma": 0.9})
        logger.write_summary({"evaluation": {"return": 1.0}})
        logger.close()
    kept = (tmp_path / "wandb_id").read_text()
    assert len(list(tmp_path.glob(f"wandb/offline-run-*/run-{kept}.wandb"))) == 2
