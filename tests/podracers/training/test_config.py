"""Reading gin: names, precedence and unused bindings; `test_mistakes.py` has the messages."""

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
    """Returns the message with which an experiment is refused."""
    with pytest.raises(errors.UserError) as raised:
        experiment.load(list(map(str, files)), bindings).build()
    return str(raised.value)


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
    file.write_text("SEED = 9  # \u00e9\n", encoding="utf-8-sig")
    assert experiment.load([tiny, str(file)], []).seed == 9


def test_short_names_long_names_and_parts_that_no_file_names(tiny):
    for name in ("@CartPole", "@cartpole.CartPole", "@environments.cartpole.CartPole"):
        loaded = experiment.load([tiny], [f"Experiment.environment = {name}", "PPO.gamma = 0.5"])
        parts = loaded.build()
        assert (parts.environment.spec.name, parts.agent.gamma) == ("CartPole", 0.5)
    loaded = experiment.load([tiny], ["catch.Catch.rows = 4", "Catch.columns = 3"])
    assert loaded.build().environment.spec.observation.shape == (4, 3, 1)


def test_names_of_earlier_versions_load(tiny, write):
    imports = "from agents import networks\nfrom agents import policy\nfrom agents import replay\n"
    core = "from agents.networks import cores\nnetworks.actor_critic.core = @cores.FeedForward()\n"
    file = write(f"{imports}{core}policy.ActorCritic.greedy_evaluation = True")
    agent = experiment.load([tiny, file]).build().agent
    assert agent.greedy_evaluation and agent.net.module.torsos[0].core is None


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

    text, values_used = used(variants(content))
    assert {name: values_used.get(name) for name in values} == values
    (tmp_path / "config.gin").write_text(text)
    assert used(tmp_path / "config.gin") == (text, values_used)


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
    code = config.read(text, "x.gin").other_code
    assert sorted(code) == [
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
