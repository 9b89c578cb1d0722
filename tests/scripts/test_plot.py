"""Tests of learning curves: grouping of runs, titles and legends."""

import importlib
import json
import os

import numpy as np
import pytest

from podracers import errors
from podracers.training import experiment, run_directory

CATCH = "gin/experiments/catch_ppo.gin"
CARTPOLE = "gin/experiments/cartpole_ppo.gin"
SEBULBA = "gin/runners/sebulba.gin"


@pytest.fixture(scope="module", name="curves")
def _curves(tools):
    return tools("results.curves").curves


@pytest.fixture(name="make")
def _make(tmp_path):
    """Writes the directory of a run; each is newer than the one before."""
    count = 0

    def make(files, *bindings, seeds=(), value=0.0, used="", steps=(10, 20)):
        nonlocal count
        count += 1
        text = experiment.load(files, bindings).text()
        directory = run_directory.RunDirectory(tmp_path / f"catch-{count}")
        directory.path.mkdir()
        directory.config.write_text(text)
        if used:
            directory.operative_config.write_text(text + used)
        values = {"loss": value, "episode/return": value}
        values |= {f"episode/return/seed_{seed}": value + 100 * seed for seed in seeds}
        rows = [
            {"step": n, "wall_time": 1.0} | {name: x + n for name, x in values.items()}
            for n in steps
        ]
        directory.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.utime(directory.config, (count, count))
        return str(directory.path)

    return make


def _drawn(curves, *paths):
    """Returns the number of seeds of each curve by panel and label."""
    panels = curves.panels([x for path in paths for x in curves.read(path)], "episode/return")
    return {x.title: {label: len(seeds) for label, seeds in x.curves.items()} for x in panels}


def test_options_without_influence_on_learning_make_no_curve(make, curves):
    paths = [
        make([CATCH]),
        make(
            [CATCH],
            "Experiment.seed = 1",
            "Experiment.log_period = 1",
            "Anakin.reset_batch = None",
            "Experiment.total_steps = 5e5",  # a literal, where the others have a macro
            "PPO.anneal_steps = 500_000",
        ),
        make([CATCH], "SEED = 2", "Anakin.population = 3", seeds=(2, 3, 4)),
    ]
    assert _drawn(curves, *paths) == {"Catch": {"PPO, Anakin": 5}}
    known = {f"Experiment.{x}" for x in experiment.Experiment.__dataclass_fields__}
    for module, name in (("anakin", "Anakin"), ("sebulba", "Sebulba")):
        part = getattr(importlib.import_module(f"podracers.{module}"), name)
        known |= {f"runner.{x}" for x in part.__dataclass_fields__}
    assert known >= curves.IGNORED


def test_the_legend_has_the_parameters_that_differ(make, curves):
    drawn = _drawn(
        curves,
        make([CATCH], "PPO.learning_rate = 1e-3"),
        make([CATCH], "PPO.learning_rate = 3e-4", "NUM_ENVS = 32"),
        make([CATCH, SEBULBA], "PPO.learning_rate = 3e-4", "NUM_ENVS = 32"),
        make([CATCH, SEBULBA], "PPO.learning_rate = 3e-4", "Sebulba.lag = 2"),
        make([CARTPOLE, "gin/agents/dqn.gin"], "Experiment.agent = @dqn.DQN"),
    )
    assert drawn == {
        "Catch": {
            "PPO, Anakin, num_envs = 64, learning_rate = 0.001": 1,
            "PPO, Anakin, num_envs = 32, learning_rate = 0.0003": 1,
            "PPO, Sebulba, num_envs = 32, learning_rate = 0.0003, lag = default": 1,
            "PPO, Sebulba, num_envs = 64, learning_rate = 0.0003, lag = 2": 1,
        },
        "CartPole": {"DQN, Anakin": 1},
    }
    # A panel is an environment inside its wrappers.
    searched, pong = "gin/experiments/catch_alphazero.gin", "gin/experiments/pong_ppo_cpu.gin"
    drawn = _drawn(curves, make([searched]), make([CATCH]), make([pong]))
    assert list(drawn) == ["Catch", "Pong-v5"]
    first, second = drawn["Catch"]
    assert first.startswith("AlphaZero, Anakin, environment = Searchable, ")
    assert second.startswith("PPO, Anakin, environment = Catch, ")


def test_a_default_equals_its_value(make, curves):
    drawn = _drawn(
        curves,
        make([CATCH], used="ppo.PPO.normalize_advantages = True\n"),
        make([CATCH], "SEED = 1", "PPO.normalize_advantages = True"),
        make([CATCH], "PPO.normalize_advantages = False"),
    )
    labels = (f"PPO, Anakin, normalize_advantages = {value}" for value in (True, False))
    assert drawn == {"Catch": dict(zip(labels, (2, 1)))}


def test_the_newest_of_several_runs_of_a_seed_is_drawn(make, curves):
    old, new = make([CATCH], value=100.0), make([CATCH], value=200.0)
    runs = [x for path in (new, old) for x in curves.read(path)]
    (panel,) = curves.panels(runs, "episode/return")
    ((curve,),) = panel.curves.values()
    np.testing.assert_array_equal(curve[:, 2], [210.0, 220.0])


def test_runs_with_seeds_that_the_configuration_computes_are_several_seeds(make, curves):
    population = ([CATCH], "Anakin.population = 2")
    paths = make([CATCH]), make([CATCH]), make(*population, seeds=(7, 8), value=5.0)
    for path, seed in zip(paths, ("%numbers.SEED", "@numbers.draw()", "@numbers.draw()")):
        directory = run_directory.RunDirectory(path)
        text = directory.read_config()
        assert "SEED = 0" in text
        directory.config.write_text(text.replace("SEED = 0", f"SEED = {seed}"))
    runs = [x for path in paths for x in curves.read(path)]
    (panel,) = curves.panels(runs, "episode/return")
    ends = {name: [curve[-1, 2] for curve in seeds] for name, seeds in panel.curves.items()}
    assert ends == {"PPO, Anakin": [20.0, 20.0, 725.0, 825.0]}


def test_population_values_are_configurations(make, curves):
    values = "{'PPO.learning_rate': (1e-3, 3e-4), 'gamma': (0.9,)}"
    population = ("Anakin.population = 4", f"Anakin.population_values = {values}")
    paths = [
        make([CATCH], "SEED = 2", *population, seeds=(2, 3, 4, 5)),
        make([CATCH], "SEED = 7", "PPO.learning_rate = 3e-4", "PPO.gamma = 0.9"),
    ]
    labels = (f"PPO, Anakin, learning_rate = {rate}" for rate in (0.001, 0.0003))
    assert _drawn(curves, *paths) == {"Catch": dict(zip(labels, (2, 3)))}


def test_the_options_of_an_evolving_population_are_drawn_by_lineage(make, curves, tools):
    """Its members are seeds of one configuration."""
    pbt = ("Anakin.population = 4", "Anakin.population_values = {'gamma': (0.5, 0.6)}")
    pbt += ("Anakin.pbt_period = 1", "Anakin.pbt_ranges = {'gamma': (0.1, 0.9)}")
    path = make([CATCH], *pbt, seeds=(0, 1, 2, 3))
    assert _drawn(curves, path) == {"Catch": {"PPO, Anakin": 4}}
    rates = [(0.5, 0.6, 0.5, 0.6), (0.5, 0.6, 0.4, 0.6), (0.5, 0.6, 0.4, 0.3)]
    sources = [(0, 1, 0, 3), (None,) * 4, (0, 1, 2, 2)]
    rows = [
        {"step": step}
        | {f"pbt/gamma/seed_{seed}": x for seed, x in enumerate(rates[index])}
        | {f"pbt/source/seed_{seed}": x for seed, x in enumerate(sources[index])}
        for index, step in enumerate((10, 20, 30))
    ]
    plotting = tools("results.plotting").plotting
    options, copies = plotting.segments(rows, "gamma")
    # Founder, and ends of the line: member 2 descends from member 0 after the first line.
    drawn = [(founder, x) for founder, (x, _) in options]
    assert drawn == [(member, (0, 10)) for member in range(4)] + [
        (founder, (10 * n, 10 * n + 10)) for n in (1, 2) for founder in (0, 1, 0, 3)
    ]
    assert [values for _, (_, values) in options] == [(x, x) for row in rates for x in row]
    assert copies == [(0, ((10, 10), (0.5, 0.4)))]  # that after the last line has no option yet
    assert len(plotting.lineage(rows).axes) == 1
    with pytest.raises(errors.UserError, match="logged no population that evolves"):
        plotting.lineage([{"step": 1, "loss": 2.0}])


def test_an_option_that_a_resume_changed_is_a_configuration_of_its_own(make, curves):
    paths = [make([CATCH], f"SEED = {n}", f"PPO.gamma = {x}") for n, x in enumerate((0.9, 0.5))]
    directory = run_directory.RunDirectory(paths[0])
    for step in (5, 15):
        directory.replace_config(
            directory.read_config().replace("gamma = 0.9", "gamma = 0.5"), step
        )
    changed = "gamma = 0.9 to 5 steps, then 0.5"
    assert _drawn(curves, paths[0]) == {f"Catch; {changed}": {"PPO, Anakin": 1}}
    labels = (f"PPO, Anakin, {value}" for value in (changed, "gamma = 0.5"))
    assert _drawn(curves, *paths) == {"Catch": dict.fromkeys(labels, 1)}


def test_panels_of_returns_have_the_level_of_a_random_policy(make, curves):
    def levels(*paths, metric="episode/return"):
        (panel,) = curves.panels([x for path in paths for x in curves.read(path)], metric)
        return panel.levels

    paths = [make([CATCH]), make([CATCH, SEBULBA]), make([CATCH]), make([CATCH], "Catch.rows = 9")]
    for path, value in zip(paths, ("-0.5", "-0.7", "null", "-0.8")):
        text = f'{{"random_policy_return": {value}}}'
        run_directory.RunDirectory(path).summary.write_text(text)
    assert levels(*paths[:3]) == {"random policy": pytest.approx(-0.6)}
    assert levels(*paths) == levels(paths[0], metric="loss") == levels(make([CATCH])) == {}


def test_a_comparison_has_a_curve_for_each_runner(make, tools):
    modules, runners = tools("compare", "results.training_process"), {}
    for label, *words in (("one", [CATCH]), ("one", [CATCH], "SEED = 1"), ("other", [CATCH])):
        directory = run_directory.RunDirectory(make(*words))
        run = modules.training_process.Run(label, 0, (), directory, 20, "")
        runners.setdefault(label, []).append(run)
    panel = modules.compare.panel(runners)
    assert panel.title == "Catch"
    counts = {label: len(seeds) for label, seeds in panel.curves.items()}
    assert counts == {"PPO, one": 2, "PPO, other": 1}


@pytest.mark.parametrize("count", [1, 4, 14])
def test_legends_are_below_the_labels_of_axes(curves, count):
    page, last, long = curves.plotting, (1.0, 1.5, 2.0), ", ".join(["an_option = 12345"] * 4)
    seeds = [np.array([[0.0, 0.0, 1.0], [90.0, 1.0, x]]) for x in last]
    levels = {"random": 1.5, "highest $\\frac$": 500.0}  # no formula
    one = page.Panel("Snake", {str(count - 1): seeds, long: seeds}, levels)
    several = page.Panel("Catch", {str(number): seeds for number in range(count)}, {})
    figure = page.page([several, one], "episode/return", page.COLUMNS)
    figure.canvas.draw()
    for axis in figure.axes:
        label, legend = axis.xaxis.label.get_window_extent(), axis.get_legend().get_window_extent()
        assert figure.bbox.y0 <= legend.y0 < legend.y1 < label.y0
        assert axis.get_window_extent().height > 150.0 and axis.get_xlim()[0] == 0.0
    first, *_, axis, _ = figure.axes
    assert len(first.get_legend().get_texts()) == count
    texts = [text.get_text().replace("\u00a0", " ") for text in axis.get_legend().get_texts()]
    assert texts[2:] == ["random: 1.50", "highest $\\frac$: 500.0 (outside)"]
    assert texts[0] == f"{count - 1} (3 seeds)"
    assert texts[1].replace("\n", " ") == f"{long} (3 seeds)"
    # The interval, which ends at 2.74, neither widens the axis nor leaves it.
    assert 2.0 < axis.get_ylim()[1] < 2.1
    areas, bars = len(first.collections), first.get_lines()[count:]
    assert (areas, len(bars)) == ((0, count) if count > 4 else (count, 0))
    assert {max(bar.get_ydata()) for bar in bars} <= {first.get_ylim()[1]}
    assert first.get_lines()[count - 1].get_color() == axis.get_lines()[0].get_color()
    page.plt.close(figure)


@pytest.mark.parametrize("end, scale", [(50.0, "linear"), (5.0, "log")])
def test_a_curve_shorter_than_a_tenth_makes_the_axis_logarithmic(curves, end, scale):
    page = curves.plotting
    ends = {"quick": end, "slow": 90.0}
    seeds = {label: [np.array([[1.0, 0.0, 1.0], [last, 1.0, 2.0]])] for label, last in ends.items()}
    figure = page.page([page.Panel("Snake", seeds, {"random": 1.5})], "episode/return")
    assert figure.axes[0].get_xscale() == scale
    page.plt.close(figure)


def test_a_folder_stands_for_the_runs_in_it(make, call, tmp_path, capsys):
    *_, path = map(make, ([CATCH], [CATCH, SEBULBA], [CARTPOLE]))
    empty = make(["gin/experiments/snake_ppo.gin"], "Anakin.population = 2", steps=())
    out, log = tmp_path / "x.jpg", tmp_path / "catch.log"
    log.touch()
    call("plot", "--run_dir", tmp_path, log, "--run_dir", path, "--out", out)
    assert capsys.readouterr().out.splitlines() == [
        f"left out: '{empty}' has logged no 'episode/return'",
        f"{out}: 3 curves",
    ]
    assert out.stat().st_size > 10_000  # bytes


def test_a_single_point_has_a_mark(curves):
    page = curves.plotting
    seeds = {"one": [np.array([[64.0, 1.0, 2.0]])], "two": [np.array([[0.0, 0, 1], [64, 1, 2]])]}
    figure = page.page([page.Panel("Snake", seeds, {})], "episode/return")
    marks = {line.get_label(): line.get_marker() for line in figure.axes[0].get_lines()}
    assert [marks[f"{label} (1\u00a0seed)"] for label in seeds] == ["o", "None"]
    page.plt.close(figure)
