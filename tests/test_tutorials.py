"""Programs and tables of extending.md, varying_agents.md, coming_from.md, and of README.md.

Axis legend: `T` time, `B` streams.
"""

import importlib
import re

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents import ppo
from agents.networks import cores
from podracers import contract as contract_lib
from podracers import metrics, types, unroll
from podracers.training import experiment
from tests import contract, documented

T, B = 40, 3


@pytest.fixture(scope="module", autouse=True)
def _files(tmp_path_factory):
    """The files of the pages in the working directory, whose modules can be imported."""
    folder = tmp_path_factory.mktemp("pages")
    documented.write_files(folder)
    (folder / "mine.py").write_text(
        "from podracers import anakin\nclass Runner(anakin.Anakin): ..."
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        yield


@pytest.mark.parametrize("name", ["corridor.Corridor", "drift.Drift"])
def test_environments_keep_the_contract(name):
    module, _, kind = name.partition(".")
    contract_lib.check_environment(getattr(importlib.import_module(module), kind))


def test_files_name_another_runner_or_network():
    runner = experiment.load(["catch_ppo.gin", "mine.gin"], []).build().runner
    assert type(runner).__module__ == "mine"
    parts = experiment.load(["readme.gin"], []).build()
    assert parts.agent.init_actor(jnp.arange(B), B) and parts.environment.length == 10


MUON = "PPO.optimizer = @optax.contrib.muon"
N_STEP = "Experiment.agent = @my_ppo.PPONStep"


@pytest.mark.parametrize(
    ("files", "bindings"),
    [
        (["my_ppo.gin"], [MUON]),
        (["my_ppo.gin", "gin/runners.gin"], [N_STEP, "RUNNER = @sebulba.Sebulba"]),
    ],
)
def test_variants_of_an_agent_take_updates(files, bindings):
    bindings = [*bindings, "NUM_ENVS = 8", "ROLLOUT_LENGTH = 8", "PPO.num_minibatches = 2"]
    settings = experiment.load(files, bindings)
    runner = settings.build().runner
    state = runner.init(0)
    state, report = runner.step(state, 2)
    runner.close()
    means = metrics.summarize(jax.device_get(report.means), [])
    assert np.isfinite(means["loss/total"])
    assert ("policy/clip_fraction" in means) == (N_STEP in bindings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "bindings"),
    [
        ("corridor_ppo.gin", []),
        ("a2c_catch.gin", []),
        ("my_ppo.gin", []),
        ("my_ppo.gin", [N_STEP]),
        ("catch_ppo.gin", [MUON, "PPO.learning_rate = 0.01"]),
    ],
)
def test_experiments_learn_their_task(file, bindings):
    settings = experiment.load([file], ["Anakin.num_devices = 1", *bindings])
    parts = settings.build()
    state = parts.runner.init(settings.seed)
    updates = settings.total_steps // parts.runner.steps_per_update // 2
    for _ in range(2):
        state, report = parts.runner.step(state, updates)
    means = metrics.summarize(jax.device_get(report.means), [])
    assert means["episode/return"] > 0.9


def test_a_port_to_jax_equals_the_gymnasium_environment():
    importlib.import_module("drift_gymnasium")
    port = importlib.import_module("drift").Drift(wind=0.0)
    original, step = gymnasium.make("Drift-v0", wind=0.0), jax.jit(port.step)
    assert original.spec.max_episode_steps == port.spec.max_episode_steps
    assert original.observation_space.shape == port.spec.observation.shape
    for actions in ([2], [0, 2]):  # off the line; back and forth until the time limit
        state, timestep = port.reset(jax.random.key(0))
        original.reset(seed=0)
        original.unwrapped.position = float(timestep.observation[0])
        for time in range(port.spec.max_episode_steps):
            action = actions[time % len(actions)]
            state, timestep = step(state, action)
            observation, reward, *ends, _ = original.step(action)
            np.testing.assert_allclose(timestep.observation, observation, atol=1e-5)
            np.testing.assert_allclose(timestep.reward, reward, atol=1e-5)
            assert ends == [timestep.terminated(), timestep.truncated()]
            if timestep.last():
                break
        assert ends == ([True, False] if actions == [2] else [False, True])


def test_a_registered_environment_is_named_in_gin():
    binding = "Gymnasium.env_id = 'drift_gymnasium:Drift-v0'"
    parts = experiment.load(["catch_ppo.gin", "game.gin"], [binding]).build()
    assert (parts.environment.spec.name, type(parts.runner).__name__) == ("Drift-v0", "Sebulba")


@pytest.fixture(scope="module", name="rollout")
def _rollout():
    """A rollout of recurrent PPO, untrained, in corridors of two cells."""
    corridor = importlib.import_module("corridor").Corridor(length=2)
    network = contract.tiny_network(cores.LSTM(8))
    agent, batched = ppo.PPO(corridor.spec, network=network), unroll.BatchedEnvironment(corridor)
    key = jax.random.key(0)

    def act():
        streams = unroll.init(agent, batched, jnp.arange(B, dtype=jnp.int32), B, key)
        params = agent.actor_params(agent.init_learner(key))
        return unroll.unroll(agent, batched, params, streams, key, T)[1]

    return jax.device_get(jax.jit(act)())


def test_the_table_of_a_rollouts_fields(rollout):
    section = (documented.DOCS / "extending.md").read_text().partition("arrays of a rollout")[2]
    rows = dict(re.findall(r"^\| `([\w.]+)` \| `\[([^]]*)\]` \|", section, re.M))
    fields = [
        *(f"timestep.{field}" for field in types.TimeStep._fields),
        *types.Rollout._fields[1:],
    ]
    assert list(rows) == fields
    for name, shape in rows.items():
        value = rollout
        for field in name.split("."):
            value = getattr(value, field)
        expected = eval(f"({shape.removesuffix(', ...')},)", {"T": T, "B": B})
        assert jax.tree.leaves(value)
        for leaf in jax.tree.leaves(value):
            assert leaf.shape[: len(expected)] == expected
            assert shape.endswith("...") or leaf.shape == expected
    dtypes = re.findall(
        r"^\| `timestep.(reward|discount|step_type)` \|[^|]*\| (\w+) \|", section, re.M
    )
    assert [getattr(rollout.timestep, name).dtype for name, _ in dtypes] == [x for _, x in dtypes]


def test_the_slices_of_a_rollout_are_its_transitions(rollout):
    values = {"rollout": rollout}
    exec(documented.program("transitions", documented.DOCS / "extending.md"), values)
    moved = values["weight"] == 1  # [T, B]
    assert np.array_equal(~moved, rollout.timestep.last()[:-1]) and not moved.all()
    cell_tm1, cell_t = (np.argmax(values[f"observation_{t}"], -1) for t in ("tm1", "t"))
    assert np.array_equal(cell_t[moved], values["a_tm1"][moved])  # of two cells
    arrived = moved & (values["a_tm1"] == 1)
    assert np.array_equal(values["r_t"], arrived)
    assert np.array_equal(values["discount_t"], ~arrived)
    assert np.all(cell_t[~moved] == 0) and np.all(cell_tm1[~moved] <= 1)


def test_the_runner_of_a_purejaxrl_file():
    values = {}
    program = documented.program("make_train", documented.DOCS / "coming_from.md")
    for old, new in {
        "num_updates=10": "num_updates=1",
        "epochs=4": "epochs=1",
        "batches=4": "batches=1",
    }.items():
        assert old in program
        program = program.replace(old, new)
    exec(program, values)
    assert values["report"].means["episode/return"].total.shape == (2,)
