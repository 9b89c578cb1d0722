"""Programs and tables of extending.md, varying_agents.md, networks.md, coming_from.md and README.

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
from podracers import host_contract, metrics, types, unroll
from podracers.training import experiment
from tests import contract, documented, streams

T, B = 40, 3


@pytest.fixture(scope="module", autouse=True)
def _files(tmp_path_factory):
    """The files of the pages in the working directory, whose modules can be imported."""
    folder = tmp_path_factory.mktemp("pages")
    documented.write_files(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        yield


@pytest.mark.parametrize("name", ["corridor.Corridor", "drift.Drift"])
def test_environments_keep_the_contract(name):
    module, _, kind = name.partition(".")
    contract_lib.check_environment(getattr(importlib.import_module(module), kind))


@pytest.mark.slow
@pytest.mark.exact  # on one backend
def test_the_runner_learns_as_anakin_does():
    agent, environment = contract.AGENTS["ppo"]()
    sizes = contract.NUM_ENVS, contract.ROLLOUT_LENGTH
    loop = importlib.import_module("loop").Loop(contract.Recorder(agent), environment, *sizes)
    actual, expected = (
        contract.run(subject, 3)
        for subject in (loop, contract.RUNNERS["anakin"].make(loop.agent, environment, 1))
    )
    streams.assert_close(actual.rollouts, expected.rollouts, rtol=1e-4, atol=1e-4)
    learners = (history.states[-1].learner for history in (actual, expected))
    streams.assert_close(*learners, rtol=1e-4, atol=1e-4)
    assert loop.trace(0).jaxpr and actual.states[-1].update == 3


@pytest.mark.slow
def test_the_simulator_keeps_the_contract_and_trains():
    boats = importlib.import_module("boats")
    assert host_contract.environment_faults(boats.Boats(max_steps=20)) == []
    small = ["NUM_ENVS = 8", "ROLLOUT_LENGTH = 8", "PPO.epochs = 1", "PPO.num_minibatches = 2"]
    runner = experiment.load(["boats_ppo.gin"], small).build().runner
    state, report = runner.step(runner.init(0), 2)
    runner.close()
    assert state.update == 2 and np.isfinite(report.means["loss/total"].result())


def test_files_name_another_runner_or_network():
    runner = experiment.load(["catch_ppo.gin", "loop.gin"], []).build().runner
    assert type(runner).__module__ == "loop"
    parts = experiment.load(["readme.gin"], []).build()
    assert parts.agent.init_actor(jnp.arange(B), B) and parts.environment.length == 10


MUON = "PPO.optimizer = @optax.contrib.muon"
N_STEP = "Experiment.agent = @my_ppo.PPONStep"


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
        # Without `metrics`, which agents do not receive.
        *(f"timestep.{field}" for field in types.TimeStep._fields[:-1]),
        *types.Rollout._fields[1:],
    ]
    assert list(rows) == fields
    for name, shape in rows.items():
        value = rollout
        for field in name.split("."):
            value = getattr(value, field)
        expected = eval(f"({shape.removesuffix(', ...')},)", {"T": T, "B": B})
        assert jax.tree.leaves(value) or name == "age"  # under Anakin
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


@pytest.mark.slow
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


def test_the_encoder_of_the_page_reads_cells_and_their_places():
    encoder = importlib.import_module("board_transformer").BoardTransformer(8, 1, 2)
    board = jax.random.normal(jax.random.key(0), (2, 3, 4, 5))
    params = jax.jit(encoder.init)(jax.random.key(1), board)
    encode = jax.jit(encoder.apply)
    features = encode(params, {"board": board, "speed": jnp.ones((2, 1))})
    assert features.shape == (2, 8 + 1) and np.all(features[:, 8:] == 1.0)
    turned, features = encode(params, board[:, ::-1]), features[:, :8]
    assert not np.allclose(turned, features, atol=1e-3)
    params["params"]["places"] *= 0.0
    np.testing.assert_allclose(*(encode(params, x) for x in (board, board[:, ::-1])), atol=1e-5)


@pytest.mark.slow
def test_an_encoder_of_the_page_learns_by_one_binding():
    small = ["NUM_ENVS = 16", "ROLLOUT_LENGTH = 8", "Anakin.num_devices = 1"]
    runner = experiment.load(["snake_transformer.gin"], small).build().runner

    def encoder(state):
        return jax.device_get(runner.actor_params(state).params["torsos_0"]["encoder"])

    state = runner.init(0)
    before = encoder(state)
    assert before["places"].shape == (12 * 12, 32)
    after = encoder(runner.step(state, 3)[0])
    assert all(jax.tree.leaves(jax.tree.map(lambda x: np.isfinite(x).all(), after)))
    assert all(jax.tree.leaves(jax.tree.map(lambda x, y: np.any(x != y), before, after)))
