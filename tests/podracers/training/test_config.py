"""Reading gin: precedence, unused bindings, and the message of each mistake."""

import dataclasses
import re
import sys

import pytest

from agents import ppo
from podracers import errors
from podracers.commands import command_line
from podracers.training import config, experiment, gin_names
from tests import processes

IMPORTS = (
    "from __gin__ import dynamic_registration\nfrom agents import ppo\n"
    "from environments import cartpole\nfrom environments import catch\n"
    "from podracers import anakin\nfrom podracers import sebulba\n"
)
CARTPOLE = "gin/environments/cartpole.gin"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(processes.config_file(tmp_path_factory.mktemp("config")))


@pytest.fixture
def write(tmp_path):
    """Writes a .gin file with imports."""

    def write(content, name="mine"):
        path = tmp_path / f"{name}.gin"
        path.write_text(f"{IMPORTS}{content}\n")
        return str(path)

    return write


def _message(files, bindings=()):
    """Returns the one line with which an experiment is refused, before anything is written."""
    with pytest.raises(errors.UserError) as raised:
        loaded = experiment.load(list(map(str, files)), bindings)
        experiment.check(loaded.build(), loaded.seed)
    assert raised.value.exit_code == 2
    assert "\n" not in str(raised.value)
    return str(raised.value)


_SEBULBA = "RUNNER = @Sebulba\nSebulba."
_MEMBERS = "Anakin.population = 4\nAnakin.population_values = "
_PBT = f"Anakin.pbt_period = 2\n{_MEMBERS}{{'gamma': (0.5, 0.9)}}\nAnakin.pbt_ranges = "
# Bindings, and words of the message: the option, and the nearest name or the bad value.
MISTAKES = {
    # Names that do not exist.
    "Experiment.environment = @catch.Cach": ("@catch.Cach'", "'catch.Catch'"),
    "Experiment.environment = @CartPol": ("@CartPol'", "'CartPole'"),
    "Experiment.agent = @elsewhere.Agent": ("@elsewhere.Agent'",),
    "PP.gamma = 0.9": ("'PP'", "'PPO'"),
    "PPO.gama = 0.9": ("'PPO'", "'gama'", "'gamma'"),
    # Arguments that the experiment passes.
    "PPO.spec = 3": ("'PPO.spec'", "the caller of agents.ppo.PPO"),
    "PPO.optimizer = @optax.sgd\nsgd.learning_rate = 0.1": ("'sgd.learning_rate'", "the caller of"),
    "Experiment.agent = @DQN\nDQN.network = @x/q_network\nx/q_network.num_actions = 1": (
        "'q_network.num_actions'",
    ),
    # Bindings that nothing uses, and macros without a value.
    "cartpole.CartPole.max_episode_steps = 3": ("'CartPole.max_episode_steps'", "Catch"),
    "Sebulba.lag = 0": ("'Sebulba.lag'", "Anakin"),
    "foo/PPO.gamma = 0.5": ("'foo/PPO.gamma'",),
    "TOTAL_STEP = 3": ("'TOTAL_STEP'", "'TOTAL_STEPS'"),
    "gamma = 3": ("'gamma'", "'PPO.gamma'"),
    "PPO.gamma = %SED": ("%SED", "'SEED'"),
    # What is no binding.
    "SEED": ("binding 'SEED'", "name.parameter = value"),
    "SEED =": ("binding 'SEED ='",),
    "PPO.head = gaussian": ("binding", "'gaussian'", "quotes"),
    # Circles.
    "A = %B\nB = %A\nSEED = %A": ("%A -> %B -> %A",),
    "actor_critic.encoder = @MLP()\nMLP.hidden_sizes = %A\nA = [1, {'x': (%A,)}]": ("%A -> %A",),
    "actor_critic.encoder = @x/MLP()\nMLP.hidden_sizes = @x/MLP()": ("@x/MLP() -> @x/MLP()",),
    # Values of a wrong type, in dataclasses, Flax modules and functions.
    "PPO.gamma = '0.9'": ("PPO.gamma", "float", "'0.9'"),
    "PPO.gamma = True": ("PPO.gamma", "True"),
    "PPO.gamma = @encoders.CNN": ("PPO.gamma: expected float, got the class agents.networks.enc",),
    "PPO.network = 3": ("PPO.network", "Callable"),
    "Experiment.agent = @SAC\nSAC.network = @actor_critic": ("SAC.network", "SACNetwork"),
    "actor_critic.encoder = 'MLP'": ("actor_critic.encoder", "Module", "'MLP'"),
    "actor_critic.encoder = @cores.LSTM()": ("PPO.network", "encoder = ", "cores.LSTM"),
    "actor_critic.core = @encoders.MLP()": ("PPO.network", "core = agents.networks.encoders.MLP"),
    "actor_critic.frame_stack = 100000": ("PPO.network", "frame_stack", "up to 256"),
    "actor_critic.initial_std = 0.0": ("PPO.network", "initial_std: expected a positive number"),
    "actor_critic.critic_keys = ('state',)": (
        "critic_keys: expected None, because Catch observes one array, got ('state',)",
    ),
    "actor_critic.encoder = @MLP()\nMLP.hidden_sizes = (64, 'x')": ("MLP.hidden_sizes", "'x'"),
    "PPO.network = @networks.q_network": ("PPO.network = @agents.networks", "q_network", "int"),
    "Experiment.agent = @PQN\nPQN.network = @q_network\nq_network.num_atoms = 7": (
        "network",
        "[B, A]",
        "(2, 3, 7)",
    ),
    "PPO.network = @encoders.MLP": ("PPO.network", "encoders.MLP: expected a Network"),
    "Experiment.agent = @DQN\nDQN.network = @actor_critic": ("DQN.network", "actor_critic.head"),
    "Experiment.agent = @MuZero\nMuZero.search = @catch.Catch": ("MuZero.search", "a Search"),
    "Experiment.seed = @time.time()": ("Experiment.seed", "expected int"),
    # References with and without parentheses.
    "Experiment.agent = @impala.IMPALA()": ("@IMPALA(): ", "without parentheses"),
    "Experiment.environment = @catch.Catch()": ("; write `@Catch`, without parentheses",),
    "PPO.network = @networks.actor_critic()": ("@actor_critic(): ", "without parentheses"),
    "PPO.network = @encoders.CNN()": ("PPO.network", "encoders.CNN; write `@CNN`, without"),
    "actor_critic.encoder = @encoders.CNN": (
        "encoder: expected Module | None, got the class agents.networks.encoders.CNN; write "
        "`@CNN()`, with parentheses",
    ),
    # Bounds, and numbers that devices cannot hold.
    "Catch.rows = 1": ("Catch.rows", "at least 2"),
    "Catch.rows = 2147483647": ("Catch.rows", "up to 256"),
    "SEED = 2147483648": ("Experiment.seed",),
    "PPO.gamma = 1.5": ("PPO.gamma", "1.5"),
    "PPO.reward_clip = 2147483648": ("PPO.reward_clip", "beyond int32; write a float with"),
    f"NUM_ENVS = {10**18}": ("Anakin.num_envs",),
    "PPO.adam_epsilon = 1e300": ("PPO.adam_epsilon", "up to 1000"),
    "PPO.num_minibatches = 7": ("num_minibatches = 7", "8 steps", "use 1, 2, 4, 8"),
    "NUM_ENVS = 200000000": ("GB on each of 4 cpu devices",),
    "ROLLOUT_LENGTH = 1000000000": ("Anakin.steps_per_update",),
    "Experiment.checkpoint_directory = 'kept'": ("an absolute path, or gs://BUCKET",),
    "TOTAL_STEPS = 1e30": ("Experiment.total_steps", "updates"),
    "Experiment.profile_update = 1_000_000": ("Experiment.profile_update", "less than"),
    "TOTAL_STEPS = 1e999": ("Experiment.total_steps", "inf"),
    # Options of runs.
    "TOTAL_STEPS = 0": ("Experiment.total_steps", "got 0"),
    "TOTAL_STEPS = 1.5": ("Experiment.total_steps", "got 1.5"),
    "Experiment.keep_latest = None": ("Experiment.keep_latest", "got None"),
    "Experiment.log_period = True": ("Experiment.log_period", "got True"),
    "Experiment.evaluation_max_steps = -5": ("Experiment.evaluation_max_steps", "got -5"),
    "Experiment.evaluation_episodes = 0": ("Experiment.evaluation_episodes", "got 0"),
    "Experiment.greedy_evaluation_episodes = 1_000_001": ("greedy_eva", "up to 1000000"),
    "Experiment.checkpoint_replay = 'no'": ("Experiment.checkpoint_replay", "got 'no'"),
    "Experiment.compute_dtype = 'bfloat1'": ("Experiment.compute_dtype", "'bfloat16'"),
    "Experiment.matmul_precision = 'higest'": ("Experiment.matmul_precision", "'highest'"),
    "Experiment.tracker = @WeightsAndBiases": ("Experiment.tracker", "expected WeightsAndBiases"),
    "Experiment.tracker = @WeightsAndBiases()\nWeightsAndBiases.mode = 'ofline'": (
        "WeightsAndBiases.mode: ",
        "'offline'",
    ),
    # Parts of another kind.
    "RUNNER = (@Anakin, @Anakin, @Anakin)": ("Experiment.runner", "expected Callable"),
    "RUNNER = @catch.Catch": ("Catch", "'agent'"),
    "Experiment.agent = @catch.Catch": ("Catch", "'spec'"),
    "Experiment.environment = @ppo.PPO": ("PPO", "missing", "'spec'"),
    "Experiment.environment = @time.time": ("expected Environment, got time.time", "reset, spec"),
    "RUNNER = @Anakin\nExperiment.environment = @EnvPool\nEnvPool.task_id = 'CartPole-v1'": (
        "--runner sebulba",
    ),
    # Devices and streams.
    "NUM_ENVS = 6": ("Anakin.num_envs = 6 does not divide over 4 devices: use 4 or 8",),
    "NUM_ENVS = 3": ("Anakin.num_envs = 3 does not divide over 4 devices: use 4, or",),
    "Anakin.num_devices = 5": ("Anakin.num_devices = 5: 1 process(es) have 4",),
    "Anakin.num_devices = 0": ("Anakin.num_devices: expected",),
    "ROLLOUT_LENGTH = 2.5": ("Anakin.rollout_length: expected",),
    "Anakin.reset_batch = 0": ("Anakin.reset_batch: expected",),
    "Anakin.reset_batch = 'Auto'": ("Anakin.reset_batch: got 'Auto'", "'auto'"),
    "Anakin.steps_per_pass = 0": ("Anakin.steps_per_pass: expected",),
    f"{_SEBULBA}actor_devices = (0, 4)": ("actor_devices: ", "4 devices, 0 to 3, got (0, 4)"),
    f"{_SEBULBA}actor_devices = ()": ("actor_devices: ", "got ()"),
    f"{_SEBULBA}learner_devices = (-1,)": ("learner_devices: ", "got (-1,)"),
    f"{_SEBULBA}learner_devices = (1, 1)": ("names a device twice",),
    f"{_SEBULBA}actor_devices = (0, 1, 2)\nSebulba.learner_devices = (0, 3)": (
        "3 actors cannot feed 2 learner devices",
    ),
    f"{_SEBULBA}actor_devices = (0,)\nSebulba.batches_per_actor = 2\nNUM_ENVS = 32": (
        "32 does not divide over 1 actors",
        "use 30 or 36",
    ),
    f"{_SEBULBA}batches_per_actor = 2\nNUM_ENVS = 1": ("1 does not divide", "use 2"),
    f"{_SEBULBA}lag = -1": ("Sebulba.lag", "got -1"),
    f"{_SEBULBA}timeout = 0": ("Sebulba.timeout", "got 0"),
    # Populations.
    "Anakin.population = 0": ("Anakin.population: expected",),
    "Anakin.population_values = {'gamma': (1.0,)}": ("expected Anakin.population to be more",),
    f"{_MEMBERS}(1.0, 2.0)": ("expected numbers by option",),
    f"{_MEMBERS}{{'gama': (1.0,)}}": ("no option 'gama' that is a float; did you mean 'gamma'?",),
    f"{_MEMBERS}{{'DQN.gamma': (1.0,)}}": ("PPO has no option 'DQN.gamma'",),
    f"{_MEMBERS}{{'epochs': (1, 2)}}": ("no option 'epochs' that is a float",),
    f"{_MEMBERS}{{'gamma': 1.0}}": ("a number for each of 4 members",),
    f"{_MEMBERS}{{'gamma': (1.0, True)}}": ("a number for each of 4 members",),
    f"{_MEMBERS}{{'gamma': (1.0, 1e999)}}": ("a number for each of 4 members",),
    f"{_MEMBERS}{{'gamma': (1.0, 0.9, 0.8)}}": ("a number for each of 4 members",),
    f"{_MEMBERS}{{'learning_rate': (1.0, -1.0)}}": ("PPO.learning_rate: expected a positive",),
    "Anakin.pbt_period = 2\nAnakin.population = 4": ("expected Anakin.population_values",),
    f"{_PBT}{{'gamma': (0.5, 1.0)}}\nAnakin.population = 2": ("population of at least 4", "and 2"),
    f"{_PBT}{{}}": ("Anakin.pbt_ranges: expected a range of 'gamma', got {}",),
    f"{_PBT}(0.5, 1.0)": ("Anakin.pbt_ranges: expected numbers by option",),
    f"{_PBT}{{'gamma': (0.5, 1.0), 'gama': (0.5, 1.0)}}": ("did you mean 'gamma'?",),
    f"{_PBT}{{'gamma': (0.5, 1.0), 'learning_rate': (0.5, 1.0)}}": (
        "no values of 'learning_rate'",
    ),
    f"{_PBT}{{'gamma': (0.6, 1.0)}}": ("around (0.5, 0.9, 0.5, 0.9), got (0.6, 1.0)",),
    f"{_PBT}{{'gamma': 0.6}}": ("the lowest and the highest value",),
    f"{_PBT}{{'gamma': (0.5, 1.5)}}": ("PPO.gamma: expected",),
    f"{_MEMBERS}{{}}\nAnakin.pbt_ranges = {{'gamma': (0.5, 1.0)}}": ("expected Anakin.pbt_period",),
    # Runs in which no gradient step would change the parameters.
    "Experiment.agent = @DQN\nDQN.min_replay = 2561": ("total_steps", "at least 2,624", "DQN.min_"),
    "Experiment.agent = @SAC\nSAC.replay_ratio = 0.01\nSAC.batch_size = 64": (
        "Experiment.total_steps: expected at least 6,400",
        "SAC.replay_ratio = 0.01",
    ),
    "Experiment.agent = @MuZero\nMuZero.unroll_steps = 400\nMuZero.min_replay = 1": (
        "Experiment.total_steps: expected at least 3,264",
        "sequences of 406",
    ),
    "Experiment.agent = @R2D2\nR2D2.anneal_steps = 1024": (
        "R2D2.anneal_steps: expected at least 1,025, got 1,024",
        "R2D2.min_replay = 1000",
    ),
    "NUM_ENVS = 1\nROLLOUT_LENGTH = 1\nPPO.num_minibatches = 1\nAnakin.num_devices = 1": (
        "PPO.normalize_advantages",
        "one transition",
    ),
}


@pytest.mark.parametrize("bindings", MISTAKES)
def test_mistakes_in_bindings(tiny, bindings):
    message = _message([tiny], bindings.split("\n"))
    for words in MISTAKES[bindings]:
        assert words in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("ppo.PPO.gamma = = 3", "Unable to parse value"),
        ("ppo.PPO.gamma = high", "'high'"),
        ("ppo.PPO.gama = 3", "'gamma'"),
        ("ppo.PP.gamma = 3", "'ppo.PPO'"),
        ("envpool.EnvPool.rows = 3", "'envpool' was not provided by an import"),
        ("from environments import cach", "'environments.catch'"),
        ("from my_lab import corridors", "'my_lab' (is it in the working directory or on"),
        ("include 'gin/agents/pp.gin'", "'gin/agents/ppo.gin'"),
    ],
)
def test_mistakes_in_files_are_found_at_their_line(write, content, words):
    file = write(content)
    for path in (file, write(f"include '{file}'", "outer")):
        found = _message([path])
        assert found.startswith(f"{file}:{len(IMPORTS.splitlines()) + 1}: ")
        assert words in found


def test_missing_files_and_values(caplog, tmp_path):
    assert "'gin/agents/ppo.gin'" in _message(["gin/agents/pp.gin"])
    assert "'cartpole_ppo.gin'" in _message(["cartpole_pp.gin"])
    assert "there is no gin file" in _message(["a" * 5_000])
    (tmp_path / "bare.gin").write_text("tabular_a2c.TabularA2C.gamma = 1.0\n")
    assert "dynamic_registration" in _message([tmp_path / "bare.gin"])
    assert not caplog.records  # gin logs errors of its own
    found = _message(["gin/agents/ppo.gin", "gin/environments/catch.gin"], ["TOTAL_STEPS = 1"])
    assert "'runner', 'seed', and 'total_steps'" in found
    assert "nothing binds Experiment" in _message(["gin/runners/anakin.gin"])


def test_files_that_include_one_another(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for one, other in ("ab", "ba"):
        (tmp_path / f"{one}.gin").write_text(f"include '{other}.gin'\n")
    assert "a.gin -> b.gin -> a.gin" in _message([tiny, "a.gin"])
    twice = tmp_path / "twice.gin"
    twice.write_text(f"include '{tiny}'\ninclude '{tiny}'\n")
    assert experiment.load([str(twice), str(twice)], []).seed == 3


def test_files_are_utf8(tiny, tmp_path):
    file = tmp_path / "mine.gin"
    file.write_bytes(b"\x7fELF\x02\x00\xff")
    assert f"{file}: 'utf-8' codec can't decode" in _message([tiny, file])
    file.write_text("SEED = 9  # \u00e9\n", encoding="utf-8-sig")
    assert experiment.load([tiny, str(file)], []).seed == 9


def test_short_names_long_names_and_parts_that_no_file_names(tiny):
    for name in ("@CartPole", "@cartpole.CartPole", "@environments.cartpole.CartPole"):
        loaded = experiment.load([tiny], [f"Experiment.environment = {name}", "PPO.gamma = 0.5"])
        parts = loaded.build()
        assert (parts.environment.spec.name, parts.agent.gamma) == ("CartPole", 0.5)
    loaded = experiment.load([tiny], ["catch.Catch.rows = 4", "Catch.columns = 3"])
    assert loaded.build().environment.spec.observation.shape == (4, 3, 1)


def test_the_core_without_a_memory_of_earlier_versions_is_none(tiny, write):
    core = "networks.actor_critic.core = @cores.FeedForward()"
    file = write(f"from agents import networks\nfrom agents.networks import cores\n{core}")
    assert experiment.load([tiny, file], []).build().agent.net.module.torsos[0].core is None


def test_scopes_are_no_circle(tiny):
    bindings = [
        "Experiment.environment = @wrappers.TimeLimit",
        "TimeLimit.environment = @inner/wrappers.TimeLimit()",
        "inner/TimeLimit.environment = @catch.Catch()",
    ]
    assert experiment.load([tiny], bindings).build().environment.spec.name == "Catch"


def test_later_files_and_bindings_win(tiny, write):
    later = write("SEED = 7\nTOTAL_STEPS = 64")
    loaded = experiment.load([tiny, later], ["TOTAL_STEPS = 1e3", "TOTAL_STEPS = 128"])
    assert (loaded.seed, loaded.total_steps) == (7, 128)


def test_options_of_a_replaced_choice_are_dropped_in_silence(tiny, write, caplog):
    mine = write(f"include '{tiny}'\nROWS = 4\ncatch.Catch.rows = %ROWS")
    for files, bindings in (
        ([mine, CARTPOLE], []),
        ([mine], ["Experiment.environment = @CartPole"]),
        ([write(f"include '{mine}'\ninclude '{CARTPOLE}'", "outer")], []),
    ):
        loaded = experiment.load(files, bindings)
        assert loaded.build().environment.spec.name == "CartPole"
        # `config.gin` has to parse by itself.
        assert "Catch" not in loaded.text()
        assert "ROWS" not in loaded.text()
    assert not caplog.records
    # Bindings of the command line have to be used.
    assert "'Catch.rows'" in _message([mine, CARTPOLE], ["catch.Catch.rows = 4"])
    assert "'ROWS'" in _message([mine, CARTPOLE], ["ROWS = 4"])


VARIANTS = """
import dataclasses
from agents import ppo
from agents.networks import encoders
from environments import catch
from podracers import anakin
@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant(ppo.PPO):
    cost: float = 0.0
class Later(Variant): pass
class Encoder(encoders.MLP): pass
class Game(catch.Catch): pass
class Narrow(catch.Catch):
    def __init__(self, rows=4): super().__init__(rows, 3)
class Any(catch.Catch):
    def __init__(self, **options): super().__init__(**options)
class Runner(anakin.Anakin): pass
def first(one, other): return one
"""
GAME = "Experiment.environment = @variants.Game"
LATER = "Experiment.agent = @variants.Later\nPPO.gamma = 0.9"


@pytest.fixture
def variants(write, tiny, tmp_path, monkeypatch):
    """Writes a .gin file over the tiny experiment, which may name subclasses of its parts."""
    (tmp_path / "variants.py").write_text(VARIANTS)
    monkeypatch.syspath_prepend(tmp_path)
    head = f"include '{tiny}'\nimport variants\nfrom agents.networks import encoders\n"
    head += "from agents import networks\nfrom environments import wrappers\n"
    head += "from podracers.training import experiment\n"

    def write_variants(content):
        for name, module in (("Experiment", "experiment"), ("PPO", "ppo"), ("Catch", "catch")):
            content = re.sub(rf"\b(?<!\.){name}\.", f"{module}.{name}.", content)
        return write(head + content)

    yield write_variants
    sys.modules.pop("variants", None)


@pytest.mark.parametrize(
    ("content", "values"),
    [
        (
            "Experiment.agent = @variants.Variant\nPPO.gamma = 0.9\nvariants.Variant.cost = 0.5",
            {
                "Variant.gamma": 0.9,
                "Variant.cost": 0.5,
                "Variant.epochs": 1,
                "Variant.clip_epsilon": 0.2,
            },
        ),
        (LATER, {"Later.gamma": 0.9, "Later.epochs": 1}),
        (f"{LATER}\nvariants.Variant.gamma = 0.8", {"Later.gamma": 0.8}),
        (f"variants.Later.gamma = 0.8\n{LATER}", {"Later.gamma": 0.8}),
        (f"{GAME}\nCatch.rows = 4\nCatch.rows = 5", {"Game.rows": 5, "Game.columns": 5}),
        (
            "Experiment.environment = @wrappers.TimeLimit\n"
            "wrappers.TimeLimit.environment = @a/variants.Game()\n"
            "a/Catch.rows = 4\nCatch.rows = 6\nvariants.Game.columns = 3\na/Catch.columns = 7",
            {"a/Game.rows": 4, "a/Game.columns": 7},
        ),
        (
            "Experiment.environment = @variants.Narrow\nCatch.rows = 5\nCatch.columns = 7",
            {"Narrow.rows": 5},
        ),
        ("Experiment.environment = @variants.Any\nCatch.rows = 5", {"Any.rows": 5}),
        (
            "Experiment.environment = @variants.first\nvariants.first.one = @catch.Catch()\n"
            "variants.first.other = @variants.Narrow()\nCatch.rows = 5\nCatch.columns = 7",
            {"Catch.rows": 5, "Catch.columns": 7, "Narrow.rows": 5},
        ),
        (
            "networks.actor_critic.encoder = @variants.Encoder()\n"
            "encoders.MLP.hidden_sizes = %SIZES\nSIZES = (8,)",
            {"Encoder.hidden_sizes": (8,)},
        ),
        ("RUNNER = @variants.Runner", {"Runner.num_envs": 8, "Runner.rollout_length": 8}),
    ],
)
def test_bindings_of_a_class_hold_for_its_subclasses(variants, tmp_path, content, values):
    """Also once `config.gin` is read, without files."""

    def used(file):
        loaded = experiment.load([str(file)], [])
        loaded.build()
        return loaded.text(), config.read(loaded.texts.operative, "x").values

    text, found = used(variants(content))
    assert {name: found.get(name) for name in values} == values
    (tmp_path / "config.gin").write_text(text)
    assert used(tmp_path / "config.gin") == (text, found)


def test_bindings_of_a_base_class_on_the_command_line_are_used(variants):
    file = variants(f"{LATER}\nvariants.Later.epochs = 2")
    for option in ("PPO.gamma", "variants.Variant.gamma", "variants.Later.gamma"):
        assert experiment.load([file], [f"{option} = 0.5"]).build().agent.gamma == 0.5
    for option in ("ppo.PPO.epochs", "variants.Variant.epochs"):
        assert f"'{option.partition('.')[2]}'" in _message([file], [f"{option} = 3"])
    assert "'Later.spec'" in _message([file], ["PPO.spec = 3"])


def test_classes_of_scripts_and_notebooks_may_be_defined_anew(tiny, monkeypatch):
    for cost in (1.0, 2.0):
        fields = [("cost", float, dataclasses.field(default=cost))]
        variant = dataclasses.make_dataclass("Mine", fields, bases=(ppo.PPO,), frozen=True)
        variant.__module__ = "__main__"
        monkeypatch.setattr(sys.modules["__main__"], "Mine", variant, raising=False)
        loaded = experiment.load([tiny], ["Experiment.agent = @__main__.Mine", "PPO.gamma = 0.5"])
        agent = loaded.build().agent
        assert (agent.cost, agent.gamma, agent.epochs) == (cost, 0.5, 1)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("cartpole.CartPole.max_episode_steps = 3", "'CartPole.max_episode_steps'"),
        ("SED = 3  # %SED", "'SED'"),
        ("sebulba.Sebulba.lagg = 0", "'lag'"),
        ("x/ppo.PPO.gamma = 0.5", "'x/PPO.gamma'"),
        ("x/sebulba.Sebulba.lag = 0", "'x/Sebulba.lag'"),
    ],
)
def test_a_file_with_options_that_no_file_chose(tiny, write, content, words):
    assert words in _message([write(f"include '{tiny}'\n{content}")])


MY_PARTS = """
import typing
from environments import catch
class Named(typing.TypedDict):
    name: str
def unannotated(inner=None): return catch.Catch()
def anything(inner: typing.Any = None): return catch.Catch()
def named(inner: Named = None): return catch.Catch()
"""


def test_functions_of_users_may_take_anything(tiny, write, tmp_path, monkeypatch):
    (tmp_path / "my_parts.py").write_text(MY_PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    for part in ("unannotated", "anything", "named"):
        for value in ("3", "@catch.Catch", "@catch.Catch()", "{'name': 'x'}"):
            mine = write(f"include '{tiny}'\nimport my_parts\nmy_parts.{part}.inner = {value}")
            chosen = f"Experiment.environment = @my_parts.{part}"
            parts = experiment.load([tiny, mine], [chosen]).build()
            assert parts.environment.spec.name == "Catch"


def test_runs_may_be_longer_than_int32(tiny):
    loaded = experiment.load([tiny], ["TOTAL_STEPS = 1e11", "PPO.anneal_steps = %TOTAL_STEPS"])
    parts = loaded.build()
    experiment.check(parts, loaded.seed)
    assert parts.num_updates == 10**11 // 64


def test_values_are_read_without_importing():
    text = """
from __gin__ import dynamic_registration
import nowhere.to_be_found
from nowhere import agents

agents.Agent.learning_rate = 1e-3
agents.Agent.encoder = @agents.Encoder()
agents.Agent.options = {'sizes': %SIZES, 'head': @critic/agents.Head}
critic/agents.Head.size = %SIZE
SIZE = 64
SIZES = (%SIZE, 32)
"""
    values = config.read(text, "x.gin").values
    assert "nowhere" not in sys.modules
    assert values == {
        "Agent.learning_rate": 1e-3,
        "Agent.encoder": "Encoder()",
        "Agent.options": {"sizes": (64, 32), "head": "critic/Head"},
        "critic/Head.size": 64,
    }
    assert str(values["Agent.options"]) == "{'sizes': (64, 32), 'head': critic/Head}"
    for mistake in ("x.X.y =", "\x00\x01", "x.X.y = (1,"):
        with pytest.raises(errors.UserError, match=r"^runs/a/config\.gin") as caught:
            config.read(mistake, "runs/a/config.gin")
        assert "\n" not in str(caught.value)


def test_other_code_is_what_leads_out_of_the_public_parts_of_this_project():
    text = """
from __gin__ import dynamic_registration
from agents import networks
from agents import ppo
import agents.networks.encoders
from podracers.training import run_directory as own
import my_lab.parts as parts
experiment.Experiment.agent = @ppo.PPO
ppo.PPO.network = @x/networks.actor_critic
networks.actor_critic.encoder = @agents.networks.encoders.MLP()
A = [@parts.Core(), {"x": @scope/own.os.remove()}]
own.os.remove.path = @networks.network.dataclasses.replace()
include "a_strangers.gin"
"""
    found = config.read(text, "x.gin").other_code
    assert sorted(found) == [
        "@networks.network.dataclasses.replace",
        "@own.os.remove",
        "a_strangers.gin",
        "my_lab.parts",
    ]
    for path in (gin_names.ROOT / "gin").rglob("*.gin"):
        for name in config.read(path.read_text(), str(path)).other_code:
            assert name.startswith("gin/")  # it includes another one


@pytest.mark.parametrize(
    ("path", "importing"),
    [
        ("agents.py", "from agents import ppo"),
        ("agents/__init__.py", "from agents import ppo"),
        ("agents/ppo.py", "from agents import ppo"),
        ("agents.py", "import importing"),
    ],
)
def test_a_module_that_hides_a_package_of_this_project_is_named(
    tmp_path, monkeypatch, path, importing
):
    (tmp_path / path).parent.mkdir(exist_ok=True)
    for name in (path, "agents/__init__.py" if "/" in path else path):
        (tmp_path / name).touch()
    (tmp_path / "importing.py").write_text("from agents import ppo")
    (tmp_path / "mine.gin").write_text(
        f"from __gin__ import dynamic_registration\n{importing}\nppo.PPO.gamma = 0.9\n"
    )
    for name in [name for name in sys.modules if name.partition(".")[0] == "agents"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    # An editable installation finds the modules in the packages nevertheless.
    finders = [finder for finder in sys.meta_path if "editable" not in f"{finder}".lower()]
    monkeypatch.setattr(sys, "meta_path", finders)
    hiding = f"; '{(tmp_path / path).parent if '/' in path else tmp_path / path}' hides this"
    assert hiding in _message([tmp_path / "mine.gin"])
    assert hiding in command_line.ending(ImportError("no name")).cause
