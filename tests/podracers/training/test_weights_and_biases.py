"""Tests of runs that are sent to Weights & Biases; nothing leaves the machine."""

import importlib.util
import json
import math
import pathlib
import sys
import types

import pytest

from podracers import errors
from podracers.training import config, experiment, run, run_directory, signals, weights_and_biases
from tests import processes

TRACKER = "Experiment.tracker = @WeightsAndBiases()"
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None or importlib.util.find_spec("wandb").origin is None,
    reason="the package wandb is not installed (extra wandb)",
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "ofline"}, r"mode: expected one of .*; did you mean 'offline'"),
        ({"project": ""}, "project: expected a name or None, got ''"),
        ({"group": 3}, "group: expected a name or None, got 3"),
    ],
)
def test_refuses_values(options, message):
    with pytest.raises(errors.UserError, match=f"^WeightsAndBiases.{message}"):
        weights_and_biases.WeightsAndBiases(**options)


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        ("Experiment.tracker = 'wandb'", r"Experiment.tracker: expected @WeightsAndBiases\(\)"),
        (
            "Experiment.tracker = @WeightsAndBiases",
            r"Experiment.tracker: expected @WeightsAndBiases\(\)",
        ),
        ("WeightsAndBiases.project = 'p'", "nothing uses 'WeightsAndBiases.project'"),
    ],
)
def test_a_binding_that_cannot_be_meant_is_refused(tmp_path, binding, message):
    with pytest.raises(errors.UserError, match=message):
        experiment.load([str(processes.config_file(tmp_path))], [binding])


def test_one_binding_is_enough_and_the_configuration_keeps_it(tmp_path):
    file = str(processes.config_file(tmp_path))
    loaded = experiment.load([file], [TRACKER, "WeightsAndBiases.project = 'p'"])
    assert loaded.tracker == weights_and_biases.WeightsAndBiases(project="p")
    kept = tmp_path / "config.gin"
    kept.write_text(config.text())
    assert experiment.load([str(kept)], []).tracker == loaded.tracker
    assert experiment.load([file], []).tracker is None


@pytest.mark.parametrize("missing", [None, types.ModuleType("wandb")])
def test_without_the_package_a_line_says_what_to_install(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", missing)  # None: importing it fails
    with pytest.raises(errors.UserError, match=r"pip install 'podracers\[wandb\]'$"):
        weights_and_biases.WeightsAndBiases().require()


@pytest.mark.slow
def test_without_the_package_nothing_is_begun(tmp_path):
    (tmp_path / "wandb.py").write_text("raise ImportError('as if it were missing')")
    config_file = processes.config_file(tmp_path)
    result = processes.run(
        *("train", "--gin_file", config_file, "--run_dir", tmp_path / "run"),
        *("--gin_bindings", TRACKER),
        environment={"PYTHONPATH": str(tmp_path)},
    )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and "pip install 'podracers[wandb]'" in result.stderr
    assert not (tmp_path / "run").exists()


class FakeRun:
    """Remembers what it is told; from call number `outage` on it fails."""

    def __init__(self, outage=math.inf, **options):
        self.options, self.outage, self.calls = options, outage, []
        self.id, self.url = options["id"], "https://wandb.example/run"
        self.settings = types.SimpleNamespace(mode=options["mode"], sync_dir="DIR")
        self.config = types.SimpleNamespace(update=self._told("config"))
        self.summary = types.SimpleNamespace(update=self._told("summary"))
        self.log, self.finish = self._told("log"), self._told("finish")

    def _told(self, name):
        def tell(*arguments, **options):
            self.calls.append((name, arguments, options))
            if len(self.calls) >= self.outage:
                raise ConnectionError("the network is gone\nfor good")

        return tell


def _fake(outage=math.inf, init_error=None, login_error=None):
    """Returns a module in the place of `wandb`; its attribute `runs` has the runs it began."""
    module = types.ModuleType("wandb")
    module.errors = types.SimpleNamespace()
    module.errors.Error = type("Error", (Exception,), {})
    module.errors.CommError = type("CommError", (module.errors.Error,), {})
    module.errors.AuthenticationError = type("AuthenticationError", (module.errors.CommError,), {})
    module.errors.UsageError = type("UsageError", (module.errors.Error,), {})
    module.runs = []

    held = set()  # as W&B's own process holds the ids of runs that could not begin

    def init(mode=None, **options):
        if options["id"] in held or init_error == "always":
            raise RuntimeError(f"run ID {options['id']} is in use")
        if init_error and mode != "offline":
            held.add(options["id"])
            raise getattr(module.errors, init_error)("no answer\nafter a minute")
        module.runs.append(FakeRun(outage, mode=mode or "online", **options))
        return module.runs[-1]

    def login(verify):
        if login_error:
            raise module.errors.UsageError(login_error)

    module.init, module.login, module.teardown = init, login, held.clear
    module.Settings = types.SimpleNamespace
    settings = types.SimpleNamespace(mode="online")
    module.setup = lambda: types.SimpleNamespace(settings=settings)
    return module


def _open(monkeypatch, directory, fake, resume=False, **options):
    monkeypatch.setitem(sys.modules, "wandb", fake)
    lines = []
    tracker = weights_and_biases.WeightsAndBiases(**options)
    return tracker.open(directory, resume, lines.append), lines


def test_who_is_not_logged_in_hears_it_before_anything_is_begun(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", _fake(login_error="No API key. Log in."))
    with pytest.raises(errors.UserError, match=r"No API key. Log in \(or .*mode = 'offline'\)$"):
        weights_and_biases.WeightsAndBiases().require()
    weights_and_biases.WeightsAndBiases(mode="offline").require()


def test_the_id_stays_and_names_come_from_bindings_then_from_the_environment(tmp_path, monkeypatch):
    for name in ("WANDB_NAME", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    fake = _fake()
    _open(monkeypatch, tmp_path, fake)
    monkeypatch.setenv("WANDB_NAME", "of the environment")
    _open(monkeypatch, tmp_path, fake, resume=True)
    _open(monkeypatch, tmp_path, fake, resume=True, name="bound", entity="team", group="g")
    monkeypatch.setenv("WANDB_RUN_ID", "given")
    _open(monkeypatch, tmp_path, fake)
    options = [each.options for each in fake.runs]
    assert [each["name"] for each in options[:3]] == [tmp_path.name, "of the environment", "bound"]
    assert (options[2]["entity"], options[2]["group"], options[2]["project"]) == ("team", "g", None)
    first, *others = [each["id"] for each in options]
    assert others == [first, first, "given"]
    assert (tmp_path / "wandb_id").read_text() == "given\n"


def test_an_outage_at_the_start_is_logged_offline(tmp_path, monkeypatch, caplog):
    fake = _fake(init_error="CommError")
    _, lines = _open(monkeypatch, tmp_path, fake)
    assert fake.runs[0].options["mode"] == "offline"
    assert lines == ["Weights & Biases: offline; to send it: wandb sync DIR"]
    assert [each.message for each in caplog.records] == [
        "Weights & Biases cannot be reached (no answer): logging offline"
    ]


def test_whatever_fails_at_the_start_the_run_goes_on(tmp_path, monkeypatch, caplog):
    tracked, lines = _open(monkeypatch, tmp_path, _fake(init_error="always"))
    tracked.write(64, {"loss/total": 1.0})
    tracked.close()
    assert lines == []
    assert caplog.records[-1].message.endswith("is in use; the run goes on without it")


@pytest.mark.parametrize("error", ["UsageError", "AuthenticationError"])
def test_a_wrong_key_is_a_mistake(tmp_path, monkeypatch, error):
    with pytest.raises(errors.UserError, match="no answer"):
        _open(monkeypatch, tmp_path, _fake(init_error=error))


@pytest.mark.parametrize("outage", [1, 2, 3, 4])
def test_an_outage_ends_no_training(tmp_path, monkeypatch, caplog, outage):
    fake = _fake(outage)
    tracked, _ = _open(monkeypatch, tmp_path, fake)
    tracked.write(64, {"loss/total": 1.0})
    tracked.write_configuration({"PPO.gamma": 0.9})
    tracked.write_summary({"seed": 3})
    tracked.close()
    assert [name for name, _, _ in fake.runs[0].calls] == [
        *("log", "config", "summary", "finish")[:outage]
    ]
    (record,) = caplog.records
    assert "the network is gone; the run goes on without it" in record.message


def test_what_was_not_measured_leaves_a_gap_and_a_failure_is_said(tmp_path, monkeypatch):
    fake = _fake()
    tracked, _ = _open(monkeypatch, tmp_path, fake)
    tracked.write(64, {"loss/total": 1.0, "episode/return": math.nan})
    with pytest.raises(errors.RunFailure):
        try:
            raise errors.RunFailure("a metric became NaN")
        finally:
            tracked.close()
    tracked.write(128, {"loss/total": 1.0})
    (_, (values,), options), (_, _, end) = fake.runs[0].calls
    assert values == {"loss/total": 1.0} and options["step"] == 64
    assert end == {"exit_code": 1}


# With the package itself, offline.


def _records(folder: pathlib.Path):
    """Returns the records of each start of a run, as the package's own messages.

    They lie in LevelDB's log format: blocks of 32 KiB of fragments, each after a checksum (4
    bytes), its length (2) and its kind (1: whole, 2: first, 3: middle, 4: last).
    """
    from wandb.proto import wandb_internal_pb2  # noqa: PLC0415 (no requirement)

    starts = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        data, position, parts, records = path.read_bytes(), 7, b"", []  # after the file's own head
        while position < len(data):
            if (left := 2**15 - position % 2**15) < 7:
                position += left
                continue
            length = int.from_bytes(data[position + 4 : position + 6], "little")
            kind = data[position + 6]
            parts += data[position + 7 : position + 7 + length]
            position += 7 + length
            if kind in (1, 4):
                records.append(wandb_internal_pb2.Record.FromString(parts))
                parts = b""
        starts.append(records)
    return starts


def _rows(records):
    """Returns the logged values by step."""
    rows = {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            values = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items
            }
            rows[record.history.step.num] = values
    return rows


@needs_package
@pytest.mark.slow
def test_a_run_and_its_resumption_are_one_run_of_weights_and_biases(tmp_path, monkeypatch):
    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_RUN_ID", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_RUN_GROUP", "of the environment")
    directory = run_directory.RunDirectory(tmp_path / "run")
    file = processes.config_file(tmp_path)
    offline = (TRACKER, "WeightsAndBiases.mode = 'offline'", "WeightsAndBiases.project = 'p'")
    first = experiment.load([str(file)], [*offline, "TOTAL_STEPS = 128"])
    assert run.train(first, directory.path) is not None
    with first.configured():
        later = experiment.load(
            [str(directory.config)], ["TOTAL_STEPS = 192", "PPO.entropy_cost = 0.5"]
        )
    lines = []
    with signals.StopRequest() as stop:
        options = {"stop": stop, "resume": True, "say": lines.append, "progress": False}
        summary = run.Run(later, later.build(), directory, **options).train()
    assert any("wandb sync" in line for line in lines)

    one, two = _records(directory.path)
    begun = [next(r.run for r in records if r.HasField("run")) for records in (one, two)]
    kept = (directory.path / "wandb_id").read_text().strip()
    assert [each.run_id for each in begun] == [kept, kept]
    assert {(each.project, each.run_group, each.display_name) for each in begun} == {
        ("p", "of the environment", "run")
    }
    rows = [_rows(records) for records in (one, two)]
    assert [list(each) for each in rows] == [[64, 128], [192]]
    logged = {line["step"]: line for line in processes.log(directory.path)}
    for step, values in (rows[0] | rows[1]).items():
        assert values["loss/total"] == pytest.approx(logged[step]["loss/total"])
        assert values["_step"] == step
    for records, entropy_cost in ((one, 0.01), (two, 0.5)):
        sent = [item for r in records if r.HasField("run") for item in r.run.config.update]
        sent += [item for r in records if r.HasField("config") for item in r.config.update]
        values = {item.key or "/".join(item.nested_key): item.value_json for item in sent}
        assert json.loads(values["PPO.entropy_cost"]) == entropy_cost
    sent = [item for r in two if r.HasField("summary") for item in r.summary.update]
    values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in sent}
    assert values["seed"] == summary["seed"]
    assert values["evaluation"]["return"] == pytest.approx(summary["evaluation"]["return"])
    assert [r.exit.exit_code for r in (*one, *two) if r.HasField("exit")] == [0, 0]
