"""Exported policies equal their agents, without this project.

Axis legend: `B` streams, `T` time.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import re
import sys
import zipfile
from typing import Any
from unittest import mock

import huggingface_hub
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from agents import dqn, networks, ppo, sac
from agents.meta import rules
from agents.meta.lpg import rule as rule_lib
from agents.networks import encoders
from podracers import environment, errors, precision, trees, types
from podracers.exports import archive, cards, onnx_model
from podracers.exports import program as program_lib
from podracers.training import trained
from tests import contract, documented, processes, streams

pytestmark = pytest.mark.exact

T = 5
_ACTION = specs.BoundedArray((2,), np.float32, np.array([-1, 0], np.float32), 3.0)


@pytest.fixture(autouse=True)
def _optimized():
    """Compiles with all optimizations, which fold constants."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def _program(agent, spec, **options):
    """Returns the program of an agent whose parameters are drawn, statistics included."""
    shapes = jax.eval_shape(lambda: agent.actor_params(agent.init_learner(jax.random.key(0))))
    draw = np.random.default_rng(0).normal

    def leaf(path, x):
        values = draw(0.0, 0.5, x.shape) if jnp.issubdtype(x.dtype, jnp.floating) else 0
        is_statistic = "normalizer" in jax.tree_util.keystr(path)
        return jnp.full(x.shape, abs(values) if is_statistic else values, x.dtype)

    params = jax.tree_util.tree_map_with_path(leaf, shapes)
    return program_lib.Program(agent, params, spec, precision.Precision(**options))


def _timestep(spec, first, rng):
    """Draws a time step of streams, whose masks have a legal action."""

    def leaf(path, part):
        shape = first.shape + part.shape
        if part.dtype == bool:  # a mask
            legal = environment.legal_values(spec.action)
            return np.where(legal.cumsum(-1) == 1, True, legal & (rng.random(shape) < 0.5))
        if np.issubdtype(part.dtype, np.integer):
            return rng.integers(part.minimum, int(part.maximum) + 1, shape).astype(part.dtype)
        return rng.normal(size=shape).astype(part.dtype)

    observation = jax.tree_util.tree_map_with_path(leaf, spec.observation)
    reward = np.where(first, 0.0, rng.normal(size=first.shape)).astype(np.float32)
    step_type = np.where(first, types.FIRST, types.MID).astype(np.int8)
    return types.TimeStep(observation, reward, np.ones_like(reward), step_type)


def _kept(template, observation):
    """Returns the parts of an observation that an exported policy reads."""
    if not isinstance(template, dict):
        return observation
    return {key: _kept(part, observation[key]) for key, part in template.items()}


class _Robot:
    """The robot of the page's loop: it observes the parts that the policy reads."""

    def __init__(self, template, timesteps):
        self.timesteps, self.actions, self.template = timesteps, [], template

    def is_running(self):
        return len(self.actions) < len(self.timesteps)

    def observe(self):
        observation = self.timesteps[len(self.actions)].observation
        return jax.tree.map(lambda x: x[0], _kept(self.template, observation))

    def reward(self):
        return self.timesteps[len(self.actions)].reward[0]

    def move(self, action):
        self.actions.append(action[None])


def _timesteps(spec, size):
    """Draws time steps; an episode of one stream goes on, those of several begin at any time."""
    rng = np.random.default_rng(size)
    firsts = [(time == 0) | (rng.random(size) < 0.3 * (size > 1)) for time in range(T)]
    return [_timestep(spec, first, rng) for first in firsts]


def _acted(program, timesteps):
    """Returns the agent's actions in streams of the seeds 0, 1, ..., and the state after them."""
    agent, size = program.agent, timesteps[0].reward.size

    @jax.jit
    def act(params, actor_state, timestep, key):
        with program.precision.tracing():
            return agent.act(params, actor_state, timestep, key, evaluation=True)[:2]

    key, actions = jax.vmap(jax.random.key)(np.arange(size, dtype=np.uint32)), []
    actor_state = agent.init_actor(jnp.arange(size), size, True)
    for timestep in timesteps:
        key, act_key = jax.vmap(jax.random.split, out_axes=1)(key)
        action, actor_state = act(program.params, actor_state, timestep, act_key)
        actions.append(action)
    return actions, trees.leaves({"actor": actor_state, "key": jax.random.key_data(key)})


def _assert_equals_agent(program, folder, batch_sizes=(3, 8)):
    """One stream acts by the loop of the page."""
    _, data = archive.archived(program, {"platforms": ["cpu"], "batch_size": None})
    (folder / "policy").write_bytes(data)
    with zipfile.ZipFile(folder / "policy") as file:
        programs = [jax.export.deserialize(file.read(f"cpu/{name}")) for name in ("initial", "act")]
    initial, act = (jax.jit(exported.call) for exported in programs)
    kept, _ = jax.tree.unflatten(programs[1].in_tree, programs[1].in_avals)
    kept = program_lib.Arguments(*kept)

    for size in (1, *batch_sizes):
        timesteps, exported = _timesteps(program.spec, size), []
        actions, expected = _acted(program, timesteps)
        if size == 1:
            names = {"robot": _Robot(kept.observation, timesteps)}
            with contextlib.chdir(folder):
                exec(documented.program("robot", documented.DOCS / "export.md"), names)
            exported, state = names["robot"].actions, names["state"]
        else:
            state = initial(np.arange(size, dtype=np.uint32))
            for timestep in timesteps:
                observation = _kept(kept.observation, timestep.observation)
                reward = () if kept.reward is None else (timestep.reward,)
                action, state = act(state, observation, timestep.first(), *reward)
                exported.append(action)
        assert exported[0].dtype == actions[0].dtype
        np.testing.assert_array_equal(exported, actions)
        assert state.keys() == kept.state.keys() <= expected.keys()
        for name, leaf in state.items():
            np.testing.assert_array_equal(leaf, expected[name], name)
    assert np.std(actions) > 0.0
    return kept


def _images(encoder, size):
    image = specs.BoundedArray((size, size, 1), np.uint8, 0, 255)
    spec = environment.EnvironmentSpec("images", image, specs.DiscreteArray(18))
    network = functools.partial(networks.q_network, encoder=encoder, frame_stack=4)
    return dqn.DQN(spec, network=network, evaluation_epsilon=0.3), spec


def _continuous(agent, **options):
    spec = environment.EnvironmentSpec("continuous", specs.Array((3,), np.float32), _ACTION)
    return agent(spec, normalize_observations=True, **options), spec


def _rule_agent():
    rule = rule_lib.Rule(hidden_size=8, prediction_size=5)
    network = functools.partial(rules.rule_network, encoder=encoders.MLP((8,)))
    spec = streams.RandomEpisodes().spec
    return rules.RuleAgent(spec, load=lambda path: (rule, None), network=network), spec


# Of agents that act alike, one. `test_a_policy_reads_its_own_leaves` has another one.
_NAMES = ("ppo_lstm", "rainbow", "r2d2_attention", "muzero_sampled", "sac_gru")
_CASES = {name: contract.AGENTS[name] for name in _NAMES} | {
    "images": lambda: _images(encoders.CNN((4,), hidden_sizes=(8,)), 6),
    "sac_sampled": lambda: _continuous(sac.SAC, greedy_evaluation=False),
    "rule": _rule_agent,
    "gaussian_greedy": lambda: _continuous(ppo.PPO, greedy_evaluation=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", _CASES)
def test_an_exported_policy_equals_its_agent(name, tmp_path):
    agent, candidate = _CASES[name]()
    _assert_equals_agent(_program(agent, getattr(candidate, "spec", candidate)), tmp_path)


def test_a_policy_reads_its_own_leaves(tmp_path):
    agent, candidate = contract.AGENTS["ppo_asymmetric"]()
    kept = _assert_equals_agent(_program(agent, candidate.spec), tmp_path, batch_sizes=())
    assert [*kept.observation] == ["state"]
    assert not [name for name in kept.state if "privileged" in name or "states/1" in name]


@dataclasses.dataclass(frozen=True)
class _Delayed:
    """A policy whose actions are a part of the observation of two steps before."""

    part: str = "late"

    def init_actor(self, env_id, num_envs, evaluation=False):
        return dict.fromkeys(("next", "later", "steps"), jnp.zeros(env_id.shape))

    def act(self, params, actor_state, timestep, key, evaluation=False):
        later, steps = timestep.observation[self.part], actor_state["steps"] + 1.0
        state = {"next": actor_state["later"], "later": later, "steps": steps}
        return actor_state["next"], state, timestep.observation["never"]


def test_a_policy_reads_the_leaves_that_later_actions_depend_on(tmp_path):
    scalar = specs.Array((), np.float32)
    observation = {"late": scalar, "never": scalar}
    spec = environment.EnvironmentSpec("delayed", observation, _ACTION)
    program = program_lib.Program(_Delayed(), (), spec, precision.DEFAULT)
    kept = _assert_equals_agent(program, tmp_path, batch_sizes=(2,))
    assert [*kept.observation] == ["late"] and kept.reward is None
    assert {*kept.state} == {"actor/later", "actor/next"}


def test_programs_have_the_layouts_of_their_platforms():
    program = _program(*_images(encoders.NatureCNN(hidden=8), 36))
    assert program.actions == "sampled"  # `evaluation_epsilon`
    frames = {}
    for platform in ("cpu", "cuda", "tpu"):
        kept, *programs = archive.export(program, platform, None)
        assert [exported.platforms for exported in programs] == [(platform,)] * 2
        frames[platform] = kept.state["actor/frames"]
    assert not any(isinstance(x.shape[0], int) for x in frames.values())
    bytes_, words = (np.uint8, (3, 36, 36, 1)), (np.uint32, (3, 9, 9, 4))
    layouts = {name: (x.dtype, x.shape[1:]) for name, x in frames.items()}
    assert layouts == {"cpu": bytes_, "cuda": bytes_, "tpu": words}


def test_bounds_are_described():
    mask = specs.BoundedArray((3,), bool, False, True)
    about = {"shape": [3], "dtype": "bool", "minimum": False, "maximum": True}
    assert program_lib._described(mask) == about
    about = {"shape": [2], "dtype": "float32", "minimum": [-1.0, 0.0], "maximum": 3.0}
    assert program_lib._described(_ACTION) == about
    assert "maximum" not in program_lib._described(_ACTION.replace(maximum=[np.inf, 3.0]))


_MODELS = {name: make for name, make in (contract.AGENTS | _CASES).items() if "muzero" not in name}


@pytest.mark.parametrize(
    "name", [x if x == "dqn" else pytest.param(x, marks=pytest.mark.slow) for x in _MODELS]
)
def test_an_onnx_model_acts_as_its_agent(name, tmp_path):
    """One stream whose observation is an array acts by the loop of the page."""
    pytest.importorskip("jax2onnx")
    agent, candidate = _MODELS[name]()
    spec = getattr(candidate, "spec", candidate)
    program = _program(onnx_model.deterministic(agent), spec)
    assert program.actions == "greedy"
    kept, data = onnx_model.converted(program, {"batch_size": None})
    session = onnx_model.session(data)
    for size in (1, 3):
        timesteps = _timesteps(program.spec, size)
        state = {key: np.zeros((size, *x.shape[1:]), x.dtype) for key, x in kept.state.items()}
        actions, expected = _acted(program, timesteps)
        if size == 1 and not isinstance(kept.observation, dict):
            names = {"robot": _Robot(kept.observation, timesteps)}
            (tmp_path / "policy.onnx").write_bytes(data)
            with contextlib.chdir(tmp_path):
                exec(documented.program("onnx", documented.DOCS / "export.md"), names)
            np.testing.assert_allclose(names["robot"].actions, actions, 1e-5, 1e-5)
        for timestep, action in zip(timesteps, actions):
            observation = _kept(kept.observation, timestep.observation)
            reward = None if kept.reward is None else timestep.reward
            arguments = program_lib.Arguments(state, observation, timestep.first(), reward)
            outputs = dict(
                zip(onnx_model.output_names(kept), session.run(None, trees.leaves(arguments)))
            )
            assert outputs["action"].dtype == action.dtype
            np.testing.assert_allclose(outputs["action"], action, 1e-5, 1e-5)
            state = {key: outputs[f"next_state/{key}"] for key in state}
        for key, leaf in state.items():
            np.testing.assert_allclose(leaf, expected[key], 1e-4, 1e-5, err_msg=key)
    about = json.loads(session.get_modelmeta().custom_metadata_map["policy.json"])
    assert about["reads_reward"] == (kept.reward is not None)


@dataclasses.dataclass(frozen=True)
class _Mode(_Delayed):
    """A policy that computes what ONNX, jax2onnx or onnxruntime has not."""

    operator: Any = None

    def act(self, params, actor_state, timestep, key, evaluation=False):
        return self.operator(timestep.observation["late"], key), actor_state, ()


@pytest.mark.parametrize(
    ("operator", "message"),
    [
        (lambda x, key: jax.vmap(jax.random.uniform)(key), "_Mode draws random numbers"),
        (
            lambda x, key: jax.lax.linalg.schur(x[:, None, None])[0][:, 0, 0],
            "convert .*_Mode: .*schur",
        ),
        (
            lambda x, key: jax.lax.cummax(jnp.stack([x, x]).astype(jnp.int32))[0],
            "model of .*_Mode does not run: ",
        ),
    ],
)
def test_a_policy_that_onnx_cannot_hold_is_refused(operator, message):
    pytest.importorskip("jax2onnx")
    spec = environment.EnvironmentSpec("any", {"late": specs.Array((), np.float32)}, _ACTION)
    program = program_lib.Program(_Mode(operator=operator), (), spec, precision.DEFAULT)
    with pytest.raises(errors.UserError, match=message):
        onnx_model.converted(program, {"batch_size": None})


class _Batched(ppo.PPO):
    def act(self, params, actor_state, timestep, key, evaluation=False):
        np.zeros(timestep.reward.shape)
        return super().act(params, actor_state, timestep, key, evaluation)


def test_a_batch_size_is_fixed_for_code_that_depends_on_it():
    program = _program(*_continuous(_Batched))
    with pytest.raises(errors.UserError, match="open batch dimension; fix it by --batch_size"):
        archive.export(program, "cpu", None)
    _, initial, act = archive.export(program, "cpu", 2)
    assert [x.in_avals[0].shape[0] for x in (initial, act)] == [2, 2]


def test_a_search_in_the_environment_is_refused():
    scalar = specs.Array((), np.float32)
    observation = {environment.STATE: scalar, "never": scalar}
    spec = environment.EnvironmentSpec("searched", observation, _ACTION)
    program = program_lib.Program(_Delayed(environment.STATE), (), spec, precision.DEFAULT)
    with pytest.raises(errors.UserError, match="_Delayed searches in the environment"):
        archive.export(program, "cpu", None)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, run):
    """A population of two, which normalises observations."""
    path = tmp_path_factory.mktemp("export") / "run"
    bindings = (
        *("TOTAL_STEPS = 64", "NUM_ENVS = 4", "ROLLOUT_LENGTH = 8", "Anakin.population = 2"),
        *("PPO.epochs = 1", "PPO.num_minibatches = 1", "Experiment.evaluation_max_steps = 2"),
    )
    run("train", "--gin_file", "pendulum_ppo.gin", "--gin_bindings", *bindings, "--run_dir", path)
    return path


# A robot that repeats its observations, in a process that cannot import the project.
_ROBOT = """
import sys

class Refusal:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("podracers", "agents", "environments", "flax", "gin", "chex"):
            raise ImportError(f"{name} is not part of the policy")

sys.meta_path.insert(0, Refusal())
import numpy as np

class Robot:
    observations, actions = np.load("observations.npy"), []
    is_running = lambda self: len(self.actions) < len(self.observations)
    observe = lambda self: self.observations[len(self.actions)]
    move = lambda self, action: self.actions.append(action)

robot = Robot()
"""


@pytest.mark.slow
def test_the_loop_of_the_page_drives_a_robot_without_the_project(run_dir, run, tmp_path):
    words = ("--out", tmp_path / "policy", "--platforms", "cpu", "--member", 1)
    result = run("export", "--run_dir", run_dir, *words)
    assert result.stderr == ""
    assert re.search("for cpu; reads state, observation, first$", result.stdout.strip())
    about = json.loads(zipfile.ZipFile(tmp_path / "policy").read("policy.json"))
    assert about["action"] == {"shape": [1], "dtype": "float32", "minimum": -2.0, "maximum": 2.0}
    assert about["observation"]["shape"] == [3] and about["environment"] == "Pendulum"
    assert about["agent"] == "agents.ppo.PPO" and about["agent_steps"] == 64
    assert about["actions"] == "sampled" and about["reads_seed"] and not about["reads_reward"]

    policy = trained.load(run_dir, member=1)
    spec = policy.parts.environment.spec
    program = program_lib.Program(policy.parts.agent, policy.params, spec, precision.DEFAULT)
    timesteps = _timesteps(spec, 1)
    np.save(tmp_path / "observations.npy", [x.observation[0] for x in timesteps])
    page = documented.program("robot", documented.DOCS / "export.md")
    end = "np.save('actions.npy', robot.actions)"
    robot = processes.spawn(
        [sys.executable, "-c", "\n".join((_ROBOT, page, end))],
        {"PYTHONPATH": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"},
        cwd=tmp_path,
    )
    processes.finish(robot)
    actions, _ = _acted(program, timesteps)
    np.testing.assert_array_equal(np.load(tmp_path / "actions.npy"), np.concatenate(actions))


@pytest.mark.slow
def test_greedy_actions_need_no_seed(run_dir, run, tmp_path):
    words = ("--member", 0, "--platforms", "cpu,cpu", "--greedy", "--best", "--batch_size", 2)
    result = run("export", "--run_dir", run_dir, "--out", tmp_path / "policy", *words)
    assert result.stderr == ""
    with zipfile.ZipFile(tmp_path / "policy") as file:
        about = json.loads(file.read("policy.json"))
        initial = jax.export.deserialize(file.read("cpu/initial")).call
    assert about["actions"] == "greedy" and not about["reads_seed"] and about["batch_size"] == 2
    assert about["platforms"] == ["cpu"]
    assert initial(np.zeros(2, np.uint32)) == {}


NAME = "someone/pendulum"


@pytest.fixture
def hub(monkeypatch):
    """The hub's API, whose methods have the signatures of the package's."""
    hub = mock.create_autospec(huggingface_hub.HfApi, instance=True)
    hub.endpoint = "https://hub"
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setenv("HF_TOKEN", "known")
    return hub


def _uploaded(hub):
    """Returns the contents by name of the files of the only commit."""
    hub.create_repo.assert_called_once_with(NAME, exist_ok=True)
    ((name, files), _), contents = hub.create_commit.call_args, {}
    for operation in files:
        with operation.as_file() as file:
            contents[operation.path_in_repo] = file.read()
    assert (name, hub.create_commit.call_count) == (NAME, 1)
    return contents


def test_a_file_and_its_card_are_uploaded_in_one_commit(hub, tmp_path):
    (tmp_path / "policy").write_bytes(b"data")
    assert cards.push(NAME, tmp_path / "policy", "a card") == f"https://hub/{NAME}"
    assert _uploaded(hub) == {"policy": b"data", "README.md": b"a card"}
    hub.create_commit.side_effect = OSError("401\nno such token")
    with pytest.raises(errors.RunFailure, match=f"^--push {NAME}: OSError: 401$"):
        cards.push(NAME, tmp_path / "policy", "a card")


@pytest.mark.slow
def test_a_run_is_uploaded_as_an_onnx_model_with_its_card(hub, run_dir, run, tmp_path):
    pytest.importorskip("jax2onnx")
    words = ("--run_dir", run_dir, "--member", 1, "--out", tmp_path / "p.onnx", "--format", "onnx")
    ended = run("export", *words, "--push", NAME)
    text = (tmp_path / "p.onnx.md").read_text()
    assert _uploaded(hub) == {
        "README.md": text.encode(),
        "p.onnx": (tmp_path / "p.onnx").read_bytes(),
    }
    card = huggingface_hub.ModelCard(text)
    (result,) = card.data.eval_results
    assert (result.task_type, result.dataset_name) == ("reinforcement-learning", "Pendulum")
    printed = re.search(r"\.md: return (\S+) ± ", ended.stdout)
    np.testing.assert_allclose(result.metric_value, float(printed[1]), atol=0.01)
    commit = json.loads((run_dir / "summary.json").read_text())["commit"]
    assert f"- Commit: {commit}" in text and "seed 1, 64 agent steps" in text
    with contextlib.chdir(tmp_path):
        exec(re.search("```python\n(.*)```", text, re.DOTALL)[1], names := {})
    assert [x.name for x in names["session"].get_inputs()] == ["observation", "first"]


@pytest.mark.slow
def test_a_missing_package_is_named(run_dir, run, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = run("export", "--run_dir", run_dir, "--out", tmp_path / "policy", code=2)
    processes.assert_mistake(result, "pip install 'flatbuffers'")
