"""Tests of runs that begin with another run's parameters."""

import functools
import json
import shutil
import types
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from agents.meta import rules
from agents.meta.rules import disco
from podracers.checkpoints import checkpoint
from podracers.training import experiment, initial_run, run, run_directory, stop_request
from tests import contract, processes, streams

# Statistics of observations and of value targets.
STATISTICS = ("{}.normalize_observations = True", "{}.popart_rate = 0.1", "TOTAL_STEPS = 128")
STATISTICS += ("Experiment.greedy_evaluation_episodes = 0",)
PPO, IMPALA = ([statistic.format(name) for statistic in STATISTICS] for name in ("PPO", "IMPALA"))
slow = pytest.mark.slow
MEMBERS = "Anakin.population = 2"


class State(NamedTuple):
    """The state of a runner."""

    learner: Any


def _rule_agent():
    """Returns an agent whose rule has a moving average of its parameters."""
    candidate, rule = streams.RandomEpisodes(), disco.Disco()
    params = jax.tree.map(
        lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(rule.init, jax.random.key(0))
    )
    network = functools.partial(rules.rule_network, encoder=contract._MLP)
    return rules.RuleAgent(
        candidate.spec, network=network, load=lambda path: (rule, params)
    ), candidate


NAMES = ("ppo_scaled", "rainbow", "sac", "muzero")
AGENTS = {name: contract.AGENTS[name] for name in NAMES} | {"rule": _rule_agent}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[slow] * (n != "rainbow")) for n in AGENTS])
def test_the_rest_of_a_learner_is_that_of_a_run_which_drew_these_parameters(name):
    """Optimizer, targets and counters: those of a fresh learner with the same parameters."""
    agent, _ = AGENTS[name]()
    fresh, drawn = map(jax.jit(agent.init_learner), jax.random.split(jax.random.key(0)))
    if jax.tree.leaves(drawn.normalizer):
        drawn = drawn._replace(normalizer=jax.tree.map(lambda x: x + 1.5, drawn.normalizer))
    leaves = jax.device_get(initial_run.taken(State(drawn)))
    runner = types.SimpleNamespace(population=1, population_values={})
    parts = types.SimpleNamespace(agent=agent, runner=runner)
    initial = initial_run.InitialRun("", 0, leaves, is_by_member=False)
    streams.assert_same(initial_run.begin(initial, parts, State(fresh)), State(drawn))


def _settings(folder, *bindings, file="tiny.gin"):
    return experiment.load([str(folder / file)], bindings)


@pytest.fixture(scope="module", name="folder")
def _folder(tmp_path_factory):
    """Experiments of PPO and IMPALA."""
    folder = tmp_path_factory.mktemp("initial")
    processes.config_file(folder)
    text = processes.CONFIG.replace("agents/ppo.gin", "agents/impala.gin")
    text = text.replace("from agents import ppo", "from agents import impala")
    lines = [line for line in text.splitlines() if not line.startswith("ppo.PPO")]
    (folder / "impala.gin").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module", name="parts")
def _parts(folder):
    """The parts of the run `single`, which its tests share: tracing a program takes seconds."""
    return _settings(folder, *PPO).build()


def _train(settings, parts, path, **options):
    directory = run_directory.RunDirectory(path)
    if not options:
        directory.create()
    directory.config.write_text(settings.text())
    stop = stop_request.StopRequest()
    options = {"print_line": lambda line: None, "progress": False} | options
    return run.Run(settings, parts, directory, stop=stop, **options).train()


def _run(folder, name, parts):
    """Returns the run `single`, or `members` of two seeds."""
    if not (folder / name).exists():
        bindings = ["Experiment.checkpoint_period = 1", *[MEMBERS] * (name == "members")]
        settings = _settings(folder, *PPO, *bindings)
        _train(settings, settings.build() if name == "members" else parts, folder / name)
    return folder / name


@pytest.mark.parametrize(
    ("source", "file", "bindings"),
    [
        ("single", "tiny.gin", [*PPO, MEMBERS, "Anakin.num_devices = 2"]),
        pytest.param("members", "impala.gin", [*IMPALA, MEMBERS], marks=slow),
    ],
)
def test_a_run_begins_with_the_parameters_and_the_statistics(folder, parts, source, file, bindings):
    """Alone, of another agent and as a population; `test_train_distributed.py` has Sebulba."""
    path = _run(folder, source, parts)
    settings = _settings(folder, *bindings, f"Experiment.initial_run = '{path}'", file=file)
    parts = settings.build()
    initial = initial_run.load(settings, parts)
    reader = checkpoint.Checkpointer(path / "checkpoints", read_only=True)
    saved = initial_run.taken(reader.restore(None, selects=lambda name: "key" not in name)[1])
    assert initial.leaves.keys() == saved.keys() and initial.step == 128
    fresh = parts.runner.init(settings.seed)
    shardings = jax.tree.map(lambda x: x.sharding, fresh)
    state = initial_run.begin(initial, parts, fresh)
    assert jax.tree.map(lambda x: x.sharding, state) == shardings
    begun = initial_run.taken(state)
    for name, leaf in saved.items():
        shape = begun[name].shape  # of a population, each member has its own, or all the same
        np.testing.assert_array_equal(begun[name], np.broadcast_to(leaf, shape), err_msg=name)
    assert np.all(np.asarray(saved["params/value_statistics/updates"]) > 0)
    assert np.all(np.asarray(saved["normalizer/count"]) == 128)
    parts.runner.close()


def test_a_run_keeps_where_it_began_and_reads_it_once(folder, parts, tmp_path):
    """The best checkpoint, in some parts; the initial run is gone when the run is resumed."""
    source, path = tmp_path / "easy-3", tmp_path / "run"
    shutil.copytree(_run(folder, "single", parts), source, ignore=shutil.ignore_patterns(".lock"))
    (source / "checkpoints" / "64" / "score.json").write_text('{"score": 1e9}')
    bindings = [*PPO, f"Experiment.initial_run = '{tmp_path}/easy-{{seed}}'"]
    bindings += ["Experiment.initial_best = True"]
    bindings += ["Experiment.initial_parts = ('encoder', 'normalizer')"]
    settings = _settings(folder, *bindings, "TOTAL_STEPS = 64")
    leaves = initial_run.load(settings, parts).leaves
    assert {name.split("/")[-2] for name in leaves} == {"Dense_0", "Dense_1", "normalizer"}
    expected = {"path": str(source), "step": 64}
    short = parts._replace(num_updates=1)
    assert _train(settings, short, path)["initial_run"] == expected
    shutil.rmtree(source)
    summary = _train(_settings(folder, *bindings), parts, path, resume=True)
    assert (summary["initial_run"], summary["updates"]) == (expected, 2)
    record = json.loads((path / "checkpoints/128/metadata/metadata").read_text())
    assert record["user"]["initial_run"] == expected
