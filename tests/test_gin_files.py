"""Every .gin file of the project builds, and what it describes takes one update."""

import dataclasses
import fractions
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from podracers import anakin, environment, errors, parallel, sebulba
from podracers.training import config, experiment

ROOT = pathlib.Path(__file__).resolve().parents[1]

DEFAULTS = ("gin/runners.gin", "gin/agents/ppo.gin", "gin/environments/catch.gin")
SMALL = (
    "TOTAL_STEPS = 128",
    "NUM_ENVS = 8",
    "ROLLOUT_LENGTH = 4",
    "Experiment.evaluation_episodes = 4",
    "Experiment.evaluation_max_steps = 10",
)
# Loops that are unrolled: what takes the time here is compiling.
SMALL_AGENTS = {
    "PPO": ("PPO.epochs = 1", "PPO.num_minibatches = 1"),
    "IMPALA": ("IMPALA.num_minibatches = 1",),
    "DQN": ("DQN.batch_size = 8", "DQN.min_replay = 8", "DQN.replay_capacity = 400"),
    "MuZero": (
        "MuZero.unroll_steps = 2",
        "MuZero.replay_capacity = 4_000",
        "MuZero.min_replay = 100",
        "MuZero.batch_size = 8",
        "Search.num_simulations = 2",
    ),
    "AlphaZero": ("AlphaZero.batch_size = 8", "Search.num_simulations = 2"),
    "LPG": ("LPG.chunk_length = 2", "LPG.updates = 1"),
    "PQN": ("PQN.epochs = 1", "PQN.num_minibatches = 1"),
    "RuleAgent": ("RuleAgent.batch_size = 8", "RuleAgent.min_replay = 8"),
    "R2D2": ("R2D2.replay_capacity = 4_000", "R2D2.min_replay = 8", "R2D2.batch_size = 8"),
    "SAC": (
        "SAC.batch_size = 8",
        "SAC.min_replay = 8",
        "SAC.replay_capacity = 400",
        "SAC.replay_ratio = 1.0",
    ),
}
# Experiments that take an update in every run of the tests.
COMPILED = {
    "snake_ppo",
    "pong_ppo_cpu",
    "catch_impala",
    "cartpole_dqn",
    "memory_pqn",
    "memory_r2d2",
    "pendulum_sac",
}
SLOW = ("brax", "breakout", "atari_classic", "sac_mujoco", "sac_pixels")
# What a file leaves for the user to choose.
CHOICES = {
    "gin/environments/jumanji.gin": ("Jumanji.name = 'Maze-v0'",),
    "gin/environments/gymnasium.gin": ("Gymnasium.env_id = 'CartPole-v1'",),
    "gin/environments/envpool.gin": ("EnvPool.task_id = 'Hopper-v4'",),
    "gin/environments/dmc.gin": ("EnvPool.task_id = 'ReacherEasy-v1'",),
    "gin/environments/atari.gin": ("EnvPool.task_id = 'Pong-v5'",),
    "gin/environments/atari_classic.gin": ("EnvPool.task_id = 'Pong-v5'",),
}
# What a file needs beside it: Atari's networks see frames of a size that no JAX environment has.
BESIDE = {
    f"gin/agents/{path.name}": ("gin/environments/pong.gin",)
    for path in (ROOT / "gin/agents").glob("*_atari*.gin")
}
BESIDE["gin/agents/sac_pixels.gin"] = ("gin/environments/pong.gin",)
BESIDE["gin/agents/lpg.gin"] = ("gin/environments/lifetimes.gin",)
BESIDE["gin/agents/alphazero.gin"] = ("gin/environments/catch_searchable.gin",)


# Parts that `test_experiments` traces, where an experiment that is not slow includes them.
INCLUDED = {
    name
    for path in (ROOT / "gin/experiments").glob("*.gin")
    if not path.stem.startswith(SLOW)
    for name in re.findall(r"^include '(.*)'", path.read_text(), re.M)
}


def _is_slow(path):
    if str(path.relative_to(ROOT)) in INCLUDED:
        return True
    return path.stem.startswith(SLOW) or (path.parent.name == "agents" and "_atari" in path.stem)


def _files(*folders):
    """Returns the files as parameters of a test; physics takes a minute to compile.

    More of Atari's repeat what `pong`, `atari` and the experiments show. An agent or environment
    by itself repeats what the experiments that include it show.
    """
    paths = [path for folder in folders for path in sorted((ROOT / "gin" / folder).rglob("*.gin"))]
    return [
        pytest.param(
            str(path.relative_to(ROOT)),
            marks=pytest.mark.slow if _is_slow(path) else (),
            id=path.stem,
        )
        for path in paths
    ]


def _environments(path):
    """Returns the modules of environments that the file imports."""
    return re.findall(r"^from environments import (\w+)", (ROOT / path).read_text(), re.M)


def _require_extras(path):
    """Skips if the file needs an optional package that is not installed."""
    for module in _environments(path):
        if module in ("brax", "gymnax") and importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    drivers = pathlib.Path("/usr/share/glvnd/egl_vendor.d")
    if "'from_pixels': True" in (ROOT / path).read_text() and not any(drivers.glob("*.json")):
        pytest.skip("EGL is not installed")


def _load_small(files, bindings):
    agent = experiment.load(files, bindings).agent.__name__
    return experiment.load(files, [*bindings, *SMALL_AGENTS.get(agent, ())])


def _trace(files, bindings):
    loaded = _load_small(files, bindings)
    experiment.check(loaded.build(), loaded.seed)


def _take_one_update(files, bindings):
    loaded = _load_small(files, bindings)
    parts = loaded.build()
    experiment.check(parts, loaded.seed)
    state = parts.runner.init(loaded.seed)
    state, report = parts.runner.step(state, 1)
    params = jax.device_get(parts.runner.actor_params(state))
    parts.runner.close()
    assert jax.device_get(report).means
    for leaf in jax.tree.leaves(params):
        assert np.all(np.isfinite(leaf))


@pytest.mark.parametrize("path", _files("experiments"))
def test_experiments_can_be_built(path):
    """Nothing is traced: `make check` does no more."""
    _require_extras(path)
    parts = experiment.load([path], []).build()
    assert parts.num_updates > 0


@pytest.mark.parametrize("path", _files("experiments"))
def test_experiments(path):
    """All are traced, and some take an update; the rest do in the slow test below."""
    _require_extras(path)
    if pathlib.Path(path).stem in COMPILED:
        _take_one_update([path], SMALL)
        return
    _trace([path], SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("path", _files("experiments"))
def test_experiments_take_an_update(path):
    _require_extras(path)
    _take_one_update([path], SMALL)


@pytest.mark.parametrize("path", _files("agents", "environments", "runners"))
def test_parts(path):
    """They are traced; most of them take an update in some experiment."""
    _require_extras(path)
    _trace([*DEFAULTS, *BESIDE.get(path, ()), path], [*SMALL, *CHOICES.get(path, ())])


@pytest.mark.slow
@pytest.mark.parametrize("path", _files("agents", "environments", "runners"))
def test_parts_take_an_update(path):
    _require_extras(path)
    files = [*DEFAULTS, *BESIDE.get(path, ()), path]
    _take_one_update(files, [*SMALL, *CHOICES.get(path, ())])


# Settings of machines, after an experiment: NUM_ENVS is theirs, so rollouts are short.
BASE = "gin/experiments/catch_ppo.gin"
SHORT = ("ROLLOUT_LENGTH = 2", *SMALL_AGENTS["PPO"])
MORE_DEVICES = {"v5e_8": 8}  # than conftest.py fakes


def _check_under_both(path):
    """Places the streams and traces an update: compiling so many takes too long."""
    for runner in ("anakin", "sebulba"):
        loaded = experiment.load([BASE, f"gin/runners/{runner}.gin", path], SHORT)
        experiment.check(loaded.build(), loaded.seed)


SAME = {"gpu_8": "v5e_8", "v5p": "v4_8", "v6e_8": "v5e_8"}  # presets that are another's


def _is_machine(path):
    """Returns whether a preset is of a machine of its own, and binds no rollout of its own."""
    name = pathlib.Path(path).stem
    return name not in SAME and not name.startswith("large_batch")


@pytest.mark.parametrize(
    "path", [each for each in _files("hardware") if _is_machine(each.values[0])]
)
def test_hardware(path):
    count = MORE_DEVICES.get(pathlib.Path(path).stem)
    if count is None:
        _check_under_both(path)
        return
    result = subprocess.run(
        [
            *(sys.executable, "-c"),
            f"from tests import test_gin_files; test_gin_files._check_under_both({path!r})",
        ],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("name", "other"), SAME.items())
def test_hardware_of_another_name(name, other):
    for runner in ("anakin", "sebulba"):
        own, same = (
            experiment.load([BASE, f"gin/runners/{runner}.gin", f"gin/hardware/{each}.gin"], SHORT)
            .build()
            .runner
            for each in (name, other)
        )
        values = [
            {field.name: getattr(each, field.name) for field in dataclasses.fields(each)}
            for each in (own, same)
        ]
        for each in values:
            del each["agent"], each["environment"]
        assert values[0] == values[1]
        assert own.num_envs in (512, 1024)


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["anakin", "sebulba"])
def test_hardware_takes_an_update(runner):
    _take_one_update([BASE, f"gin/runners/{runner}.gin", "gin/hardware/v4_8.gin"], SHORT)


@pytest.mark.parametrize("runner", ["anakin", "sebulba"])
def test_hardware_holds_wherever_the_runner_is_named_and_after_a_restart(runner, tmp_path):
    hardware, chosen = "gin/hardware/v4_8.gin", f"gin/runners/{runner}.gin"
    saved = tmp_path / "config.gin"
    for files in ([BASE, chosen, hardware], [BASE, hardware, chosen], [str(saved)]):
        made = experiment.load(files, []).build().runner
        saved.write_text(config.text())
        assert made.num_envs == 512
        if runner == "anakin":
            assert made.reset_batch is None
        else:
            assert (made.actor_devices, made.learner_devices) == ((0, 0, 1, 1), (2, 3))
    assert experiment.load([str(saved)], ["NUM_ENVS = 64"]).build().runner.num_envs == 64


@pytest.mark.parametrize("chips", [1, 4, 8, 16])
def test_a_large_batch_is_of_anakin_alone(chips):
    presets = [f"gin/hardware/{name}.gin" for name in ("v4_8", f"large_batch_{chips}")]
    files = ["gin/experiments/cartpole_ppo.gin", *presets]
    made = [
        experiment.load([*files, f"gin/runners/{runner}.gin"], []).build().runner
        for runner in ("anakin", "sebulba")
    ]
    assert [each.num_envs for each in made] == [8192 * chips, 512]
    assert [each.rollout_length for each in made] == [32, 128]
    with pytest.raises(errors.UserError, match="nothing uses the macro 'NUM_ENVS'"):
        experiment.load([*files, "gin/runners/anakin.gin"], ["NUM_ENVS = 64"]).build()


def _at_full_size(path):
    """Returns the parts with the agent that a file describes, and few environments."""
    return experiment.load([*DEFAULTS, *BESIDE.get(path, ()), path], SMALL[:3]).build()


# Gradient steps for each agent step: the numbers of papers, and those that results were made with.
GRADIENT_STEPS = {
    "gin/agents/dqn_atari.gin": fractions.Fraction(1, 4),
    "gin/agents/dqn_rainbow_atari.gin": fractions.Fraction(1, 4),
    "gin/agents/r2d2_atari.gin": fractions.Fraction(3, 4) / (64 * 80),
    "gin/agents/r2d2_atari_small.gin": fractions.Fraction(1, 1280),
    "gin/agents/muzero_atari.gin": fractions.Fraction(2, 1024),
    "gin/agents/sac_mujoco.gin": 1,
    "gin/agents/sac_dmc.gin": 2,
    "gin/agents/sac_pixels.gin": 1,
    "gin/experiments/cartpole_dqn.gin": fractions.Fraction(1, 16),
    "gin/experiments/catch_r2d2.gin": fractions.Fraction(1, 256),
    "gin/experiments/cartpole_masked_r2d2.gin": fractions.Fraction(1, 32),
    "gin/experiments/catch_muzero.gin": fractions.Fraction(1, 16),
    "gin/experiments/cartpole_muzero.gin": fractions.Fraction(1, 16),
    "gin/experiments/catch_alphazero.gin": fractions.Fraction(1, 64),
    "gin/experiments/pendulum_sac.gin": 1,
}


@pytest.mark.parametrize("path", GRADIENT_STEPS, ids=lambda path: pathlib.Path(path).stem)
def test_gradient_steps_follow_agent_steps(path):
    assert _at_full_size(path).agent._replay.mean_gradient_steps(1) == GRADIENT_STEPS[path]


@pytest.mark.parametrize(("name", "gigabytes"), [("r2d2_atari", 12.5), ("r2d2_atari_small", 0.8)])
def test_the_replay_of_r2d2_takes_what_its_file_says(name, gigabytes):
    path = f"gin/agents/{name}.gin"
    bindings = (*SMALL[:1], "NUM_ENVS = 32", "ROLLOUT_LENGTH = 40")
    runner = experiment.load([*DEFAULTS, *BESIDE[path], path], bindings).build().runner
    memory = jax.eval_shape(lambda: runner.init(0)).memory
    assert parallel.num_bytes(memory) / 1e9 == pytest.approx(gigabytes, rel=0.03)


def test_impala_on_atari_takes_means_where_published_are_sums():
    parts = experiment.load(["gin/experiments/pong_impala.gin"], []).build()
    size = parts.runner.steps_per_update / parts.agent.num_minibatches
    assert parts.agent.max_grad_norm == pytest.approx(40.0 / size)
    assert parts.agent.optimizer_epsilon == pytest.approx(0.01 / size)


# As in SEED RL's atari/networks.py, but for the bias of the actions' head, which is not there.
def test_the_heads_of_r2d2_on_atari_are_those_published():
    agent = _at_full_size("gin/agents/r2d2_atari.gin").agent
    params = jax.eval_shape(agent.init_learner, jax.random.key(0)).params
    heads = {name: params[name] for name in params if name != "torso"}
    assert jax.tree.map(lambda x: x.shape, heads) == {
        "state_hidden_0": {"kernel": (512, 512), "bias": (512,)},
        "state": {"kernel": (512, 1), "bias": (1,)},
        "action_hidden_0": {"kernel": (512, 512), "bias": (512,)},
        "action": {"kernel": (512, 18), "bias": (18,)},
    }


@pytest.mark.parametrize("name", ["dqn", "r2d2", pytest.param("muzero", marks=pytest.mark.slow)])
def test_atari_agents_with_replay_are_traced_at_full_size(name):
    """Experiments trace PPO and IMPALA."""
    _at_full_size(f"gin/agents/{name}_atari.gin").runner.trace(0)


@pytest.mark.parametrize("path", _files("experiments"))
def test_experiments_name_no_runner_and_parse_under_each(path):
    _require_extras(path)
    assert not re.search("anakin|sebulba", pathlib.Path(path).stem)
    assert "gin/runners/" not in (ROOT / path).read_text()
    parts = experiment.load([path], []).build()
    is_host = environment.is_host(parts.environment)
    assert type(parts.runner) is (sebulba.Sebulba if is_host else anakin.Anakin)
    for name in ["sebulba"] if is_host else ["anakin", "sebulba"]:
        runner = experiment.load([path, f"gin/runners/{name}.gin"], []).build().runner
        assert type(runner).__name__.lower() == name
        assert runner.steps_per_update == parts.runner.steps_per_update


@pytest.mark.parametrize("path", _files("runners"))
def test_the_files_of_runners_bind_the_runner_and_nothing_else(path):
    text = (ROOT / path).read_text()
    assert re.findall(r"^([\w./]+)\s*=", text, re.M) == ["RUNNER"]
    assert "include" not in text


@pytest.mark.parametrize("new", ["cartpole_ppo", "cartpole_masked_r2d2", "catch_alphazero"])
def test_an_old_name_leads_to_the_new_one(new):
    with pytest.raises(errors.UserError, match=f"did you mean 'gin/experiments/{new}.gin'"):
        experiment.load([f"gin/experiments/{new}_anakin.gin"], [])


def test_what_is_compiled_is_there():
    there = {path.stem for path in (ROOT / "gin" / "experiments").glob("*.gin")}
    assert there >= COMPILED


def test_every_file_is_tried():
    tried = {path.parent.name for path in (ROOT / "gin").glob("*/*.gin")}
    assert tried <= {"agents", "environments", "experiments", "hardware", "runners"}
