"""Tests of runs that are sent to Weights & Biases; nothing leaves the machine."""

import math
import sys
import types

import pytest

from podracers import errors
from podracers.training import experiment, run, run_directory, weights_and_biases
from tests import processes

TRACKER = "Experiment.tracker = @WeightsAndBiases()"


@pytest.mark.parametrize("options", [{"mode": "ofline"}, {"project": ""}, {"group": 3}])
def test_refuses_values(options):
    (name,) = options
    with pytest.raises(errors.UserError, match=rf"^WeightsAndBiases\.{name}: expected"):
        weights_and_biases.WeightsAndBiases(**options)


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
    module.login = lambda verify: None
    module.setup = lambda: types.SimpleNamespace(settings=types.SimpleNamespace(mode="online"))
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


@pytest.mark.parametrize("missing", [None, types.ModuleType("wandb")])
def test_a_missing_package_is_a_mistake(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", missing)  # None: importing it fails
    with pytest.raises(errors.UserError, match=r"pip install 'podracers\[wandb\]'$"):
        weights_and_biases.WeightsAndBiases().require()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("UsageError", errors.UserError),
        ("AuthenticationError", errors.UserError),
        ("ConnectionError", errors.RunFailure),
    ],
)
def test_a_failure_at_the_start_is_one_line(tmp_path, monkeypatch, error, kind):
    monkeypatch.setitem(sys.modules, "wandb", _fake(init_error=error))
    directory = run_directory.RunDirectory(tmp_path)
    with pytest.raises(kind, match=r"^Weights & Biases: no answer \(or .*mode = 'offline'\)$"):
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
    options = {"resume": True, "say": lambda line: None, "progress": False}
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
