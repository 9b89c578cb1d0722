"""User mistakes in runs: errors of one line that name the option, and the nearest name."""

import functools
import pathlib
import re
import types as python_types

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from agents import networks, ppo
from environments import catch, gymnasium, wrappers
from podracers import anakin, errors, evaluation, parallel, types, video
from podracers.checkpoints import storage
from podracers.commands import command_line
from podracers.hosts import processes as hosts
from podracers.training import config, experiment
from tests import contract, processes

_HERE = f"@{__name__}"
_DQN, _MUZERO, _PQN, _R2D2, _SAC = (
    f"Experiment.agent = @{name}\n{name}." for name in ("DQN", "MuZero", "PQN", "R2D2", "SAC")
)
_MLP = "actor_critic.encoder = @MLP()\nMLP.hidden_sizes = "
_SEBULBA = "RUNNER = @Sebulba\nSebulba."
_TRACKER = "Experiment.tracker = @WeightsAndBiases"
_MEMBERS = "Anakin.population = 4\nAnakin.population_values = "
_PBT = f"Anakin.pbt_period = 2\n{_MEMBERS}{{'gamma': (0.5, 0.9)}}\nAnakin.pbt_ranges = "


class Shapeless(catch.Catch):
    """Returns a reward that is not a scalar."""

    def step(self, state, action):
        state, timestep = super().step(state, action)
        return state, timestep._replace(reward=jnp.zeros((2,)))


class Leaking(catch.Catch):
    """Keeps an array that JAX traced."""

    scale = functools.cached_property(lambda self: jnp.ones(()) * 2)

    def step(self, state, action):
        state, timestep = super().step(state, action)
        return state, timestep._replace(reward=timestep.reward * self.scale)


class LeakingAgent(ppo.PPO):
    _optimizer = functools.cached_property(lambda self: optax.sgd(jnp.ones(()) * 2))


def values(spec, head):
    return networks.q_network(spec, head.num_outputs)


# Words of the message ("..." stands for anything), and bindings over a run of PPO on Catch.
BINDINGS = [
    # Names that do not exist.
    ("@catch.Cach'...did you mean 'catch.Catch'", "Experiment.environment = @catch.Cach"),
    ("@CartPol'; did you mean 'CartPole'", "Experiment.environment = @CartPol"),
    ("@elsewhere.Agent'", "Experiment.agent = @elsewhere.Agent"),
    ("'PP'; did you mean 'PPO'", "PP.gamma = 0.9"),
    ("'PPO'...'gama'; did you mean 'gamma'", "PPO.gama = 0.9"),
    # Arguments that the experiment passes.
    ("'PPO.spec': the caller of agents.ppo.PPO", "PPO.spec = 3"),
    ("'sgd.learning_rate': the", "PPO.optimizer = @optax.sgd\nsgd.learning_rate = 0.1"),
    ("'q_network.num_actions'", f"{_DQN}network = @x/q_network\nx/q_network.num_actions = 1"),
    # Bindings that nothing uses, and macros without a value.
    ("'CartPole.max_episode_steps'...has Anakin, C", "cartpole.CartPole.max_episode_steps = 3"),
    ("'Sebulba.lag'...no Sebulba; it has Anakin", "Sebulba.lag = 0"),
    ("'foo/PPO.gamma'", "foo/PPO.gamma = 0.5"),
    ("'TOTAL_STEP'; did you mean 'TOTAL_STEPS'", "TOTAL_STEP = 3"),
    ("'gamma'; did you mean 'PPO.gamma'", "gamma = 3"),
    ("%SED has no value; did you mean 'SEED'", "PPO.gamma = %SED"),
    # What is no binding.
    ("binding 'SEED': expected 'name.parameter = value'", "SEED"),
    ("binding 'SEED ='", "SEED ="),
    ("binding...'gaussian'...quotes", "PPO.head = gaussian"),
    # Circles.
    ("%A -> %B -> %A", "A = %B\nB = %A\nSEED = %A"),
    ("%A -> %A", f"{_MLP}%A\nA = [1, {{'x': (%A,)}}]"),
    ("@x/MLP() -> @x/MLP()", "actor_critic.encoder = @x/MLP()\nMLP.hidden_sizes = @x/MLP()"),
    # Values of a wrong type, in dataclasses, Flax modules and functions.
    ("PPO.gamma: expected float, got '0.9'", "PPO.gamma = '0.9'"),
    ("PPO.gamma: expected float, got True", "PPO.gamma = True"),
    ("PPO.gamma...got the class agents.networks.encoders.CNN", "PPO.gamma = @encoders.CNN"),
    ("PPO.network: expected Callable", "PPO.network = 3"),
    ("SAC.network...SACNetwork", f"{_SAC}network = @actor_critic"),
    ("actor_critic.encoder: expected Module...'MLP'", "actor_critic.encoder = 'MLP'"),
    ("PPO.network...encoder = ...cores.LSTM", "actor_critic.encoder = @cores.LSTM()"),
    ("PPO.network...core = ...encoders.MLP", "actor_critic.core = @encoders.MLP()"),
    ("PPO.network...frame_stack...up to 256", "actor_critic.frame_stack = 100000"),
    ("initial_std: expected a positive number", "actor_critic.initial_std = 0.0"),
    ("expected None, because Catch obs...('state',)", "actor_critic.critic_keys = ('state',)"),
    ("MLP.hidden_sizes...'x'", f"{_MLP}(64, 'x')"),
    ("PPO.network...num_actions: expected int", "PPO.network = @networks.q_network"),
    ("network: ...[B, A]...(2, 3, 7)", f"{_PQN}network = @q_network\nq_network.num_atoms = 7"),
    ("PPO.network...encoders.MLP: expected a Network", "PPO.network = @encoders.MLP"),
    ("DQN.network...actor_critic.head", f"{_DQN}network = @actor_critic"),
    ("MuZero.search...a Search", f"{_MUZERO}search = @catch.Catch"),
    ("Experiment.seed: expected int", "Experiment.seed = @time.time()"),
    # References with and without parentheses.
    ("@IMPALA(): ...without parentheses", "Experiment.agent = @impala.IMPALA()"),
    ("; write `@Catch`, without parenth", "Experiment.environment = @catch.Catch()"),
    ("@actor_critic(): ...without parentheses", "PPO.network = @networks.actor_critic()"),
    ("PPO.network: ...; write `@CNN`, without", "PPO.network = @encoders.CNN()"),
    ("expected Module | None...`@CNN()`, with paren", "actor_critic.encoder = @encoders.CNN"),
    # Bounds, and numbers that devices cannot hold.
    ("Catch.rows: expected an int of at least 2", "Catch.rows = 1"),
    ("Catch.rows...up to 256", "Catch.rows = 2147483647"),
    ("Experiment.seed: expected int", "SEED = 2147483648"),
    ("PPO.gamma: ...1.5", "PPO.gamma = 1.5"),
    ("PPO.reward_clip...int32; write a float with", "PPO.reward_clip = 2147483648"),
    ("Anakin.num_envs: expected", f"NUM_ENVS = {10**18}"),
    ("PPO.adam_epsilon...up to 1000", "PPO.adam_epsilon = 1e300"),
    ("minibatches = 7...8 steps...use 1, 2, 4, 8", "PPO.num_minibatches = 7"),
    ("GB on each of 4 cpu devices", "NUM_ENVS = 200000000"),
    ("Anakin.steps_per_update", "ROLLOUT_LENGTH = 1000000000"),
    ("an absolute path, or gs://BUCKET", "Experiment.checkpoint_directory = 'kept'"),
    ("Experiment.total_steps: ...updates", "TOTAL_STEPS = 1e30"),
    ("Experiment.profile_update: expected less", "Experiment.profile_update = 1_000_000"),
    ("Experiment.total_steps: ...inf", "TOTAL_STEPS = 1e999"),
    # Options of runs.
    ("Experiment.total_steps: ...got 0", "TOTAL_STEPS = 0"),
    ("Experiment.total_steps: ...got 1.5", "TOTAL_STEPS = 1.5"),
    ("Experiment.keep_latest: ...got None", "Experiment.keep_latest = None"),
    ("Experiment.log_period: ...got True", "Experiment.log_period = True"),
    ("evaluation_max_steps: ...got -5", "Experiment.evaluation_max_steps = -5"),
    ("evaluation_episodes: ...got 0", "Experiment.evaluation_episodes = 0"),
    ("greedy_eva...up to 1000000", "Experiment.greedy_evaluation_episodes = 1_000_001"),
    ("checkpoint_replay: ...got 'no'", "Experiment.checkpoint_replay = 'no'"),
    ("compute_dtype: ...did you mean 'bfloat16'", "Experiment.compute_dtype = 'bfloat1'"),
    ("matmul_precision: ...mean 'highest'", "Experiment.matmul_precision = 'higest'"),
    ("tracker: expected WeightsAndBiases", _TRACKER),
    ("WeightsAndBiases.mode: ...'offline'", f"{_TRACKER}()\nWeightsAndBiases.mode = 'ofline'"),
    # Parts of another kind, or that do not fit.
    ("Experiment.runner: expected Callable", "RUNNER = (@Anakin, @Anakin, @Anakin)"),
    ("Experiment.runner: Catch...'agent'", "RUNNER = @catch.Catch"),
    ("Experiment.agent: Catch...'spec'", "Experiment.agent = @catch.Catch"),
    ("Experiment.environment: PPO...missing...'spec'", "Experiment.environment = @ppo.PPO"),
    ("time.time, which has no reset, spec", "Experiment.environment = @time.time"),
    ("--runner sebulba", f"RUNNER = @Anakin\nExperiment.environment = {_HERE}.on_host"),
    ("Catch (tests...Shapeless): ...reward", f"Experiment.environment = {_HERE}.Shapeless"),
    ("Leaking.scale keeps an array of a JAX trace", f"Experiment.environment = {_HERE}.Leaking"),
    ("LeakingAgent._optimizer keeps an array of", f"Experiment.agent = {_HERE}.LeakingAgent"),
    ("network: expected an ActorCriticOutput", f"PPO.network = {_HERE}.values"),
    # Devices and streams.
    ("num_envs = 6 does not ... 4 devices: use 4 or 8", "NUM_ENVS = 6"),
    ("num_envs = 3 does not ... 4 devices: use 4, or", "NUM_ENVS = 3"),
    ("Anakin.num_devices = 5: 1 process(es) have 4", "Anakin.num_devices = 5"),
    ("Anakin.num_devices: expected", "Anakin.num_devices = 0"),
    ("Anakin.rollout_length: expected", "ROLLOUT_LENGTH = 2.5"),
    ("Anakin.reset_batch: expected", "Anakin.reset_batch = 0"),
    ("Anakin.reset_batch: got 'Auto'...'auto'", "Anakin.reset_batch = 'Auto'"),
    ("Anakin.steps_per_pass: expected", "Anakin.steps_per_pass = 0"),
    ("actor_devices: ...4 devices, 0 to 3, got (0, 4)", f"{_SEBULBA}actor_devices = (0, 4)"),
    ("actor_devices: ...got ()", f"{_SEBULBA}actor_devices = ()"),
    ("learner_devices: ...got (-1,)", f"{_SEBULBA}learner_devices = (-1,)"),
    ("names a device twice", f"{_SEBULBA}learner_devices = (1, 1)"),
    (
        "3 actors cannot feed 2 learner devices",
        f"{_SEBULBA}actor_devices = (0, 1, 2)\nSebulba.learner_devices = (0, 3)",
    ),
    (
        "32 does not divide over 1 actors of 2 batches...use 30 or 36",
        f"{_SEBULBA}actor_devices = (0,)\nSebulba.batches_per_actor = 2\nNUM_ENVS = 32",
    ),
    ("1 does not divide...use 2", f"{_SEBULBA}batches_per_actor = 2\nNUM_ENVS = 1"),
    ("Sebulba.lag: ...got -1", f"{_SEBULBA}lag = -1"),
    ("Sebulba.timeout: ...got 0", f"{_SEBULBA}timeout = 0"),
    # Populations.
    ("Anakin.population: expected", "Anakin.population = 0"),
    ("population to be more than 1", "Anakin.population_values = {'gamma': (1.0,)}"),
    ("expected numbers by option", f"{_MEMBERS}(1.0, 2.0)"),
    ("'gama' that is a float; did you mean 'gamma'", f"{_MEMBERS}{{'gama': (1.0,)}}"),
    ("PPO has no option 'DQN.gamma'", f"{_MEMBERS}{{'DQN.gamma': (1.0,)}}"),
    ("no option 'epochs' that is a float", f"{_MEMBERS}{{'epochs': (1, 2)}}"),
    ("a number for each of 4 members", f"{_MEMBERS}{{'gamma': 1.0}}"),
    ("a number for each of 4 members", f"{_MEMBERS}{{'gamma': (1.0, True)}}"),
    ("a number for each of 4 members", f"{_MEMBERS}{{'gamma': (1.0, 1e999)}}"),
    ("a number for each of 4 members", f"{_MEMBERS}{{'gamma': (1.0, 0.9, 0.8)}}"),
    ("PPO.learning_rate: expected a positive", f"{_MEMBERS}{{'learning_rate': (1.0, -1.0)}}"),
    ("expected Anakin.population_values", "Anakin.pbt_period = 2\nAnakin.population = 4"),
    ("population of at least 4...and 2", f"{_PBT}{{'gamma': (0.5, 1.0)}}\nAnakin.population = 2"),
    ("Anakin.pbt_ranges: expected a range of 'gamma', got {}", f"{_PBT}{{}}"),
    ("Anakin.pbt_ranges: expected numbers by option", f"{_PBT}(0.5, 1.0)"),
    ("did you mean 'gamma'?", f"{_PBT}{{'gamma': (0.5, 1.0), 'gama': (0.5, 1.0)}}"),
    ("no values of 'value_cost'", f"{_PBT}{{'gamma': (0.5, 1.0), 'value_cost': (0.5, 1.0)}}"),
    ("around (0.5, 0.9, 0.5, 0.9), got (0.6, 1.0)", f"{_PBT}{{'gamma': (0.6, 1.0)}}"),
    ("the lowest and the highest value", f"{_PBT}{{'gamma': 0.6}}"),
    ("PPO.gamma: expected", f"{_PBT}{{'gamma': (0.5, 1.5)}}"),
    ("expected Anakin.pbt_period", f"{_MEMBERS}{{}}\nAnakin.pbt_ranges = {{'gamma': (0.5, 1.0)}}"),
    # Runs in which no gradient step would change the parameters.
    ("total_steps: expected at least 2,624...DQN.min_", f"{_DQN}min_replay = 2561"),
    ("least 6,400...SAC.replay_", f"{_SAC}replay_ratio = 0.01\nSAC.batch_size = 64"),
    ("3,264...es of 406", f"{_MUZERO}unroll_steps = 400\nMuZero.min_replay = 1"),
    ("R2D2.anneal_steps: expected at least 1,025, got 1,024", f"{_R2D2}anneal_steps = 1024"),
    (
        "PPO.normalize_advantages...one transition",
        "NUM_ENVS = 1\nROLLOUT_LENGTH = 1\nPPO.num_minibatches = 1\nAnakin.num_devices = 1",
    ),
]
# Words of the message, and the line below these imports.
IMPORTS = (
    "from __gin__ import dynamic_registration\nfrom agents import ppo\n"
    "from environments import cartpole\nfrom podracers import sebulba\n"
)
LINES = [
    ("Unable to parse value", "ppo.PPO.gamma = = 3"),
    ("'high'", "ppo.PPO.gamma = high"),
    ("'gamma'", "ppo.PPO.gama = 3"),
    ("'ppo.PPO'", "ppo.PP.gamma = 3"),
    ("'envpool' was not provided by an import", "envpool.EnvPool.rows = 3"),
    ("'environments.catch'", "from environments import cach"),
    ("'my_lab' (is it in the working directory or on", "from my_lab import corridors"),
    ("'gin/agents/ppo.gin'", "include 'gin/agents/pp.gin'"),
]
# Of files that are read beside the run's.
UNUSED = [
    ("'CartPole.max_episode_steps'", "cartpole.CartPole.max_episode_steps = 3"),
    ("'SED'", "SED = 3  # %SED"),
    ("'lag'", "sebulba.Sebulba.lagg = 0"),
    ("'x/PPO.gamma'", "x/ppo.PPO.gamma = 0.5"),
    ("'x/Sebulba.lag'", "x/sebulba.Sebulba.lag = 0"),
    ("mine.gin: 'utf-8' codec can't decode", b"\x7fELF\x02\x00\xff"),
    ("dynamic_registration", b"tabular_a2c.TabularA2C.gamma = 1.0\n"),
]
_load, _group = experiment.load, hosts.Group
_PLACE = "Experiment.checkpoint_directory"


def on_host():
    return gymnasium.Gymnasium("CartPole-v1")


def _members(name, option, numbers):
    """Traces an update of two members with different numbers."""
    differing = {"gamma": (0.9, 0.99), option: numbers}
    options = {"population": 2, "population_values": differing}
    anakin.Anakin(*contract.AGENTS[name](), 8, 6, num_devices=4, **options).trace(0)


def _drawing(render):
    return type("Drawn", (catch.Catch,), {"render": render})()


def _unlit(self):
    raise AttributeError("no lamp")


_DARK = python_types.SimpleNamespace(spec=python_types.SimpleNamespace(name="Dark"))
_NESTED = {"ring": jnp.zeros((3, 2)), "count": jnp.zeros(())}

# Words of the message, and a call.
CALLS = [
    ("'gin/agents/ppo.gin'", lambda: _load(["gin/agents/pp.gin"])),
    ("'cartpole_ppo.gin'", lambda: _load(["cartpole_pp.gin"])),
    ("there is no gin file", lambda: _load(["a" * 5_000])),
    ("nothing binds Experiment", lambda: _load(["gin/runners/anakin.gin"])),
    (
        "'runner', 'seed', and 'total_steps'",
        lambda: _load(["gin/agents/ppo.gin", "gin/environments/catch.gin"], ["TOTAL_STEPS = 1"]),
    ),
    *(
        ("runs/a/config.gin", functools.partial(config.read, text, "runs/a/config.gin"))
        for text in ("x.X.y =", "\x00\x01", "x.X.y = (1,")
    ),
    (
        "unrecognized arguments: --seed 3 (see --help)",
        lambda: command_line.Parser().parse_args(["--seed", "3"]),
    ),
    ("need all of --coordinator", lambda: _group("host:1", None, None)),
    *(
        ("expected HOST:PORT", functools.partial(_group, address, 2, 0))
        for address in ("host", "host:99999", "a..b:1")
    ),
    ("IPv4", lambda: _group("[::1]:1", 2, 0)),
    ("expected a number from 0 to 1", lambda: _group("host:1", 2, 2)),
    *(
        ("--peer_timeout", functools.partial(hosts.initialize, _group("localhost:1", 2, 0), x))
        for x in (0.0, float("nan"), float("inf"))
    ),
    *(
        (
            f"{_PLACE}: expected an absolute path, or gs:",
            functools.partial(storage.check, _PLACE, x),
        )
        for x in ("runs/a", "gs://", "gs://bucket", "gs://bucket/", "s3://a/b", 3)
    ),
    (
        "cannot be written: Not a dir",
        lambda: storage.require_shared(_PLACE, __file__ + "/a", False),
    ),
    ("cannot differ ... gamma, anneal_st", lambda: _members("ppo", "anneal_steps", (1e2, 1e3))),
    ("gamma, priority_exponent", lambda: _members("dqn", "priority_exponent", (0.4, 0.6))),
    ("num_episodes: ...got True", lambda: evaluation.Evaluator(None, on_host(), True)),
    ("got None", lambda: types.transition(0.0, None)),
    ("'count' is a scalar: give it the shape (1,)", lambda: parallel.check_leading_axis(_NESTED)),
    ("No such file", lambda: video.save([np.zeros((4, 6, 3), np.uint8)], pathlib.Path("no/a.gif"))),
    ("Dark (types.SimpleNamespace) has no `render`", lambda: video.drawable(_DARK)),
    (
        "no video of it (no lamp)",
        lambda: video.drawable(wrappers.TimeLimit(_drawing(property(_unlit)), 3)),
    ),
    *(
        (
            "Catch (...Drawn): render: expected ..., got uint8[",
            lambda shape=shape: video.drawable(_drawing(lambda *_: jnp.zeros(shape, jnp.uint8))),
        )
        for shape in ((4, 4), (4, 4, 4), (0, 4, 3))
    ),
]


def _message(words, call):
    """Returns the one line with which a call is refused."""
    with pytest.raises(errors.UserError, match=re.escape(words).replace(r"\.\.\.", ".*")) as caught:
        call()
    assert caught.value.exit_code == 2
    return str(caught.value)


def _build(*files, bindings=()):
    loaded = experiment.load(list(map(str, files)), bindings)
    experiment.check(loaded.build(), loaded.seed)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(processes.config_file(tmp_path_factory.mktemp("mistakes")))


@pytest.mark.parametrize(("words", "bindings"), BINDINGS)
def test_a_mistake_in_bindings_is_one_line(tiny, words, bindings):
    assert "\n" not in _message(words, lambda: _build(tiny, bindings=bindings.split("\n")))


@pytest.mark.parametrize(("words", "line"), LINES)
def test_a_mistake_in_a_file_is_found_at_its_line(tmp_path, words, line):
    file, outer = tmp_path / "mine.gin", tmp_path / "outer.gin"
    file.write_text(f"{IMPORTS}{line}\n")
    outer.write_text(f"include '{file}'\n")
    for path in (file, outer):
        message = _message(words, lambda path=path: _build(path))
        assert message.startswith(f"{file}:5: ")
        assert "\n" not in message


@pytest.mark.parametrize(("words", "content"), UNUSED)
def test_a_mistake_in_a_further_file_is_one_line(tiny, tmp_path, caplog, words, content):
    file = tmp_path / "mine.gin"
    file.write_bytes(content if isinstance(content, bytes) else f"{IMPORTS}{content}\n".encode())
    assert "\n" not in _message(words, lambda: _build(tiny, file))
    assert not caplog.records  # gin logs errors of its own


@pytest.mark.parametrize(("words", "call"), CALLS)
def test_a_mistake_is_one_line(words, call):
    assert "\n" not in _message(words, call)
