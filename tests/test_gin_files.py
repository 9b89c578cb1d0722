"""Every .gin file builds, is traced, and some take an update."""

import fractions
import pathlib
import re

import jax
import numpy as np
import pytest

from podracers import anakin, environment, errors, parallel, sebulba
from podracers.training import experiment
from tests import groups

ROOT = pathlib.Path(__file__).resolve().parents[1]

DEFAULTS = ("gin/runners.gin", "gin/agents/ppo.gin", "gin/environments/catch.gin")
SMALL = (
    "TOTAL_STEPS = 2048",
    "NUM_ENVS = 8",
    "ROLLOUT_LENGTH = 4",
    "Experiment.evaluation_episodes = 4",
    "Experiment.evaluation_max_steps = 10",
)
# Short loops are compiled faster.
SMALL_AGENTS = {
    "AlphaZero": {"batch_size": 8},
    "DQN": {"batch_size": 8, "min_replay": 8, "replay_capacity": 400},
    "IMPALA": {"num_minibatches": 1},
    "LPG": {"chunk_length": 2, "updates": 1},
    "MuZero": {"batch_size": 8, "min_replay": 100, "replay_capacity": 4_000, "unroll_steps": 2},
    "PPO": {"epochs": 1, "num_minibatches": 1},
    "PQN": {"epochs": 1, "num_minibatches": 1},
    "R2D2": {"batch_size": 8, "min_replay": 8, "replay_capacity": 4_000},
    "RuleAgent": {"batch_size": 8, "min_replay": 8},
    "SAC": {"batch_size": 8, "min_replay": 8, "replay_capacity": 400, "replay_ratio": 1.0},
    "VMPO": {"epochs": 1, "num_minibatches": 1},
}
TRACED = ("memory_r2d2", "pong_ppo_cpu", "snake_ppo")  # in every run of the tests
# Experiments that take an update: those whose agents, runner and kind of environment neither
# test_agents.py nor envpool/test_families.py combines.
UPDATES = ("snake_ppo", "minatar_breakout_pqn", "pong_dqn_cpu")
# Values that a file leaves to the user.
CHOICES = {
    "gin/environments/jumanji.gin": ("Jumanji.name = 'Maze-v0'",),
    "gin/environments/gymnasium.gin": ("Gymnasium.env_id = 'CartPole-v1'",),
    "gin/environments/envpool.gin": ("EnvPool.task_id = 'Hopper-v4'",),
    "gin/environments/dmc.gin": ("EnvPool.task_id = 'ReacherEasy-v1'",),
    "gin/environments/atari.gin": ("EnvPool.task_id = 'Pong-v5'",),
    "gin/environments/atari_classic.gin": ("EnvPool.task_id = 'Pong-v5'",),
}
# Files that a part needs: Atari's networks take frames of a size that no JAX environment has.
BESIDE = {
    f"gin/agents/{path.name}": ("gin/environments/pong.gin",)
    for path in (ROOT / "gin/agents").glob("*_atari*.gin")
}
BESIDE["gin/agents/sac_pixels.gin"] = ("gin/environments/pong.gin",)
BESIDE["gin/agents/lpg.gin"] = ("gin/environments/lifetimes.gin",)
BESIDE["gin/agents/alphazero.gin"] = ("gin/environments/catch_searchable.gin",)


def _files(*folders):
    """Returns the .gin files of folders as parameters of a test."""
    return [
        pytest.param(path.relative_to(ROOT).as_posix(), id=path.stem)
        for folder in folders
        for path in sorted((ROOT / "gin" / folder).glob("*.gin"))
    ]


def _require_extras(path):
    """Skips if the file needs an optional package or driver that is not installed."""
    text = (ROOT / path).read_text()
    extras = "brax|craftax|gymnax|jaxmarl|pgx|playground|xminigrid"
    for module in re.findall(f"^from environments import ({extras})", text, re.M):
        pytest.importorskip("mujoco_playground" if module == "playground" else module)
    drivers = pathlib.Path("/usr/share/glvnd/egl_vendor.d")
    if "'from_pixels': True" in text and not any(drivers.glob("*.json")):
        pytest.skip("EGL is not installed")


def _load_small(path, *bindings):
    """Returns the experiment of a file, with few environments and short loops."""
    _require_extras(path)
    files = [path]
    if not path.startswith("gin/experiments"):
        files = [*DEFAULTS, *BESIDE.get(path, ()), path]
    bindings = [*SMALL, *CHOICES.get(path, ()), *bindings]
    agent = experiment.load(files, bindings).agent.__name__
    bindings += [f"{agent}.{name} = {value}" for name, value in SMALL_AGENTS[agent].items()]
    if agent in ("AlphaZero", "MuZero"):
        bindings.append("Search.num_simulations = 2")
    return experiment.load(files, bindings)


@pytest.mark.slow  # `make check` has it
@pytest.mark.parametrize("path", _files("experiments"))
def test_experiments_can_be_built(path):
    """And the network fits the observations."""
    _require_extras(path)
    assert not re.search("anakin|sebulba", pathlib.Path(path).stem)
    assert "gin/runners/" not in (ROOT / path).read_text()
    parts = experiment.load([path], []).build()
    assert parts.num_updates > 0
    assert jax.eval_shape(parts.agent.init_learner, jax.random.key(0))
    is_host = environment.is_host(parts.environment)
    assert type(parts.runner) is (sebulba.Sebulba if is_host else anakin.Anakin)


# Files that an experiment includes: others, or a part.
INCLUDED = {
    name
    for path in (ROOT / "gin/experiments").glob("*.gin")
    for name in re.findall(r"^include '(.*)'", path.read_text(), re.M)
}
PARTS = [path for path in _files("agents", "environments") if path.values[0] not in INCLUDED]


@pytest.mark.slow
@pytest.mark.parametrize("name", UPDATES)
def test_experiments_take_an_update(name):
    loaded = _load_small(f"gin/experiments/{name}.gin")
    parts = loaded.build()
    experiment.check(parts, loaded.seed)
    state = parts.runner.init(loaded.seed)
    state, report = parts.runner.step(state, 1)
    params = jax.device_get(parts.runner.actor_params(state))
    parts.runner.close()
    assert jax.device_get(report).means
    for leaf in jax.tree.leaves(params):
        assert np.all(np.isfinite(leaf))


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(*path.values, id=path.id, marks=() if path.id in TRACED else pytest.mark.slow)
        for path in (*PARTS, *_files("experiments"))
        if path.id in TRACED or (path.id not in UPDATES and path.values[0] not in INCLUDED)
    ],
)
def test_files_are_traced(path):
    """And experiments in JAX place their streams under Sebulba too."""
    loaded = _load_small(path)
    parts = loaded.build()
    experiment.check(parts, loaded.seed)
    if "experiments" in path and not environment.is_host(parts.environment):
        plain, other = (
            experiment.load([path, *files], []).build().runner
            for files in ((), ("gin/runners/sebulba.gin",))
        )
        assert type(other) is sebulba.Sebulba
        assert other.steps_per_update == plain.steps_per_update


# Settings of machines, after an experiment: NUM_ENVS is theirs, so rollouts are short.
BASE = "gin/experiments/catch_ppo.gin"
SHORT = ("ROLLOUT_LENGTH = 2", "PPO.epochs = 1", "PPO.num_minibatches = 1")


def _check_under_both(path):
    """Places the streams and traces an update: compiling so many takes too long."""
    for runner in ("anakin", "sebulba"):
        loaded = experiment.load([BASE, f"gin/runners/{runner}.gin", path], SHORT)
        experiment.check(loaded.build(), loaded.seed)


CHIPS = (1, 4, 8, 16)  # presets of large batches
MACHINES = ("colab_tpu", "cpu", "gpu", "pod", "v4_8", "v5e_8")
ACTORS = (0, 0, 1, 1, 2, 2, 3, 3)  # of v4_8
SAME = ("gpu_8", "v5p", "v6e_8")  # presets that include another one and bind nothing


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "v4_8" else pytest.mark.slow) for n in MACHINES]
)
def test_hardware(name):
    path = f"gin/hardware/{name}.gin"
    if name != "v5e_8":
        _check_under_both(path)
        return
    # Eight devices: more than conftest.py fakes.
    code = f"from tests import test_gin_files; test_gin_files._check_under_both({path!r})"
    groups.python(code, 1, 8, (0,))


@pytest.mark.parametrize("runner", ["anakin", "sebulba"])
def test_hardware_holds_wherever_the_runner_is_named_and_after_a_restart(runner, tmp_path):
    hardware, chosen = "gin/hardware/v4_8.gin", f"gin/runners/{runner}.gin"
    saved = tmp_path / "config.gin"
    for files in ([BASE, chosen, hardware], [BASE, hardware, chosen], [str(saved)]):
        loaded = experiment.load(files, [])
        built, text = loaded.build().runner, loaded.text()
        saved.write_text(text)
        for other in {"anakin.Anakin", "sebulba.Sebulba"} - {f"{runner}.{runner.title()}"}:
            assert other not in text
        assert built.num_envs == 1024
        if runner == "sebulba":
            assert (built.actor_devices, built.learner_devices) == (ACTORS, (0, 1, 2, 3))
    assert experiment.load([str(saved)], ["NUM_ENVS = 64"]).build().runner.num_envs == 64


@pytest.mark.parametrize("chips", CHIPS)
def test_a_large_batch_is_of_anakin_alone(chips):
    presets = [f"gin/hardware/{name}.gin" for name in ("v4_8", f"large_batch_{chips}")]
    files = ["gin/experiments/cartpole_ppo.gin", *presets]
    runners = [
        experiment.load([*files, f"gin/runners/{runner}.gin"], []).build().runner
        for runner in ("anakin", "sebulba")
    ]
    assert [parts.num_envs for parts in runners] == [8192 * chips, 1024]
    assert [parts.rollout_length for parts in runners] == [32, 128]
    with pytest.raises(errors.UserError, match="nothing uses the macro 'NUM_ENVS'"):
        experiment.load([*files, "gin/runners/anakin.gin"], ["NUM_ENVS = 64"]).build()


@pytest.mark.parametrize("name", ["catch_dqn", "cartpole_dqn"])
def test_a_large_batch_of_replay_learns_each_state_as_often(name):
    file, preset = f"gin/experiments/{name}.gin", "gin/hardware/large_batch_dqn.gin"
    plain, large = (experiment.load(files, []).build() for files in ([file], [file, preset]))
    states = [
        parts.agent.buffer.mean_gradient_steps(1) * parts.agent.batch_size
        for parts in (plain, large)
    ]
    assert states[0] == states[1]
    assert (large.runner.num_envs, large.agent.batch_size) == (256, 2048)
    experiment.check(large, 0)


def _at_full_size(path, *bindings):
    """Returns the parts with the agent that a file describes, and few environments."""
    files = [*DEFAULTS, *BESIDE.get(path, ()), path]
    return experiment.load(files, [*SMALL[:3], *bindings]).build()


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
    "gin/experiments/pendulum_masked_sac.gin": fractions.Fraction(1, 2),
}


@pytest.mark.parametrize("path", GRADIENT_STEPS, ids=lambda path: pathlib.Path(path).stem)
def test_gradient_steps_follow_agent_steps(path):
    assert _at_full_size(path).agent.buffer.mean_gradient_steps(1) == GRADIENT_STEPS[path]


def test_means_of_impala_on_atari_have_the_scale_of_published_sums():
    parts = experiment.load(["gin/experiments/pong_impala.gin"], []).build()
    size = parts.runner.steps_per_update / parts.agent.num_minibatches
    assert parts.agent.max_grad_norm == pytest.approx(40.0 / size)
    assert parts.agent.optimizer_epsilon == pytest.approx(0.01 / size)


def test_r2d2_on_atari_has_the_published_hidden_layers_and_its_replay_fits():
    """As in SEED RL's atari/networks.py."""
    bindings = ("NUM_ENVS = 32", "ROLLOUT_LENGTH = 40")
    for name, gigabytes in (("r2d2_atari", 12.5), ("r2d2_atari_small", 0.8)):
        runner = _at_full_size(f"gin/agents/{name}.gin", *bindings).runner
        state = jax.eval_shape(lambda runner=runner: runner.init(0))
        assert parallel.num_bytes(state.memory) / 1e9 == pytest.approx(gigabytes, rel=0.03)
        for head in ("state_hidden_0", "action_hidden_0"):
            assert state.learner.params[head]["kernel"].shape == (512, 512)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dqn", "r2d2", "muzero"])
def test_atari_agents_with_replay_are_traced_at_full_size(name):
    """Experiments trace PPO and IMPALA."""
    runner = _at_full_size(f"gin/agents/{name}_atari.gin").runner
    after, _ = runner.trace(0).out_info
    before = jax.eval_shape(lambda: runner.init(0))
    assert jax.tree.map(lambda x: x.shape, after) == jax.tree.map(lambda x: x.shape, before)


def test_every_kind_of_file_is_tried():
    folders = {path.parent.name for path in (ROOT / "gin").glob("*/*.gin")}
    assert folders == {"agents", "environments", "experiments", "hardware", "runners"}
    for path in (ROOT / "gin/runners").iterdir():  # they bind the runner and nothing else
        assert re.findall(r"^([\w./]+)\s*=|^include", path.read_text(), re.M) == ["RUNNER"]
    hardware = {path.stem: path.read_text() for path in (ROOT / "gin/hardware").iterdir()}
    assert {*hardware} == {*MACHINES, *SAME, *(f"large_batch_{n}" for n in (*CHIPS, "dqn"))}
    for name in SAME:
        lines = [line for line in hardware[name].splitlines() if not line.startswith("#")]
        assert lines in (["include 'gin/hardware/v4_8.gin'"], ["include 'gin/hardware/v5e_8.gin'"])
