"""Tests of reading gin: what is accepted, and what is said of a mistake."""

import sys

import pytest

from podracers import errors
from podracers.training import config, experiment
from tests import processes

ENCODER = "actor_critic.encoder = @encoders.MLP()"
IMPORTS = "from __gin__ import dynamic_registration\nfrom agents import ppo\n"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(processes.config_file(tmp_path_factory.mktemp("config")))


def _message(files, bindings=()):
    with pytest.raises(errors.UserError) as raised:
        experiment.load([str(file) for file in files], bindings)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        ("Experiment.environment = @catch.Cach", "no 'catch.Cach'; did you mean 'catch.Catch'"),
        ("Experiment.environment = @cartpol.CartPole", "did you mean 'cartpole.CartPole'"),
        ("Experiment.environment = @CartPol", "no 'CartPol'; did you mean 'CartPole'"),
        ("Experiment.agent = @ppo.PP0", "no 'ppo.PP0'; did you mean 'ppo.PPO'?"),
        ("Experiment.runner = @anakin.Anikan", "did you mean 'anakin.Anakin'"),
        ("Experiment.agent = @elsewhere.Agent", "there is no 'elsewhere.Agent'"),
        ("PP.gamma = 0.9", "there is no 'PP'; did you mean 'PPO'"),
        ("PPO.gama = 0.9", "'PPO' has no parameter 'gama'; did you mean 'gamma'?"),
        ("Experiment.log_perod = 3", "no parameter 'log_perod'; did you mean 'log_period'"),
    ],
)
def test_names_the_nearest_to_an_unknown_name(tiny, binding, message):
    found = _message([tiny], [binding])
    assert found.startswith(f"binding '{binding}': ")
    assert message in found


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        ("cartpole.CartPole.max_episode_steps = 3", "nothing uses 'CartPole.max_episode_steps'"),
        ("foo/PPO.gamma = 0.5", "nothing uses 'foo/PPO.gamma'"),
        ("TOTAL_STEP = 3", "nothing uses the macro 'TOTAL_STEP'; did you mean 'TOTAL_STEPS'"),
        ("gamma = 3", "nothing uses the macro 'gamma'; did you mean 'PPO.gamma'"),
        ("PPO.gamma = %GAMMA", "the macro %GAMMA has no value"),
        ("PPO.gamma = %SED", "the macro %SED has no value; did you mean 'SEED'"),
        ("PPO.gamma = %gin.REQUIRED", "no value for PPO.gamma, which is required"),
        ("SEED = %gin.REQUIRED", "no value for Experiment.seed, which is required"),
    ],
)
def test_refuses_what_has_no_use_or_no_value(tiny, binding, message):
    assert message in _message([tiny], [binding])


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        ("SEED", "expected 'name.parameter = value'"),
        ("SEED =", "Unable to parse value"),
        ("PPO.head = gaussian", "the value 'gaussian' is neither a Python literal"),
        ("PPO.gamma = '0.9'", "PPO.gamma: expected float, got '0.9'"),
        ("PPO.gamma = True", "PPO.gamma: expected float, got True"),
        ("PPO.epochs = (3, 3)", "PPO.epochs: expected int, got (3, 3)"),
        ("PPO.anneal_steps = 'x'", "PPO.anneal_steps: expected float | None, got 'x'"),
        ("PPO.normalize_observations = 'no'", "expected bool, got 'no'"),
        ("PPO.network = 3", "PPO.network: expected a class or a function"),
        ("catch.Catch.rows = 3.5", "Catch.rows: expected int, got 3.5"),
        ("Anakin.num_envs = '8'", "Anakin.num_envs: expected int, got '8'"),
        ("Experiment._state = 3", "Experiment._state: expected State, got 3"),
        ("TOTAL_STEPS = '1000'", "Experiment.total_steps: expected int | float, got '1000'"),
        ("actor_critic.encoder = 'MLP'", "actor_critic.encoder: expected Module | None, got 'MLP'"),
        (
            "actor_critic.encoder = @encoders.MLP()\nencoders.MLP.hidden_sizes = 64",
            "MLP.hidden_sizes: expected Sequence[int], got 64",
        ),
        (
            "actor_critic.encoder = @encoders.MLP()\nencoders.MLP.hidden_sizes = (64, 'x')",
            "MLP.hidden_sizes: expected Sequence[int], got (64, 'x')",
        ),
    ],
)
def test_refuses_values_that_cannot_be(tiny, binding, message):
    assert message in _message([tiny], [binding])


@pytest.mark.parametrize(
    ("bindings", "message"),
    [
        (
            ["Experiment.agent = @impala.IMPALA()"],
            "agent: write `@impala.IMPALA`, without the paren",
        ),
        (["Experiment.environment = @catch.Catch()"], "write `@catch.Catch`, without"),
        (["Experiment.runner = @anakin.Anakin()"], "write `@anakin.Anakin`, without"),
        (["PPO.network = @networks.actor_critic()"], "write `@networks.actor_critic`, without"),
        (
            ["A = @ppo.PPO()", "Experiment.agent = %A"],
            "Experiment.agent: write `@ppo.PPO`, without",
        ),
        (["Experiment.agent = @big/ppo.PPO()"], "write `@big/ppo.PPO`, without"),
        (["actor_critic.encoder = @encoders.CNN"], "write `@encoders.CNN()`, with the parentheses"),
        (["actor_critic.core = @cores.LSTM"], "write `@cores.LSTM()`, with the parentheses"),
        (["E = @encoders.CNN", "actor_critic.encoder = %E"], "write `@encoders.CNN()`, with"),
        (["actor_critic.encoder = @x/encoders.CNN"], "write `@x/encoders.CNN()`, with"),
        (["PPO.gamma = @encoders.CNN()"], "PPO.gamma: expected float, got @encoders.CNN()"),
        (["PPO.head = @encoders.CNN"], "PPO.head: expected str | None, got @encoders.CNN"),
    ],
)
def test_parentheses_of_references(tiny, bindings, message):
    assert message in _message([tiny], bindings)


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        (f"NUM_ENVS = {10**18}", f"Anakin.num_envs: expected int, got {10**18}, beyond int32"),
        (
            "ROLLOUT_LENGTH = 2147483648",
            "rollout_length: expected int, got 2147483648, beyond int32",
        ),
        ("ROLLOUT_LENGTH = 1000000000", "Anakin.steps_per_update: expected at most 2147483647"),
        ("NUM_ENVS = 200000000", "GB on each of 4 cpu devices, which has room for"),
        ("PPO.epochs = 2147483648", "PPO.epochs: expected int, got 2147483648, beyond int32"),
        ("PPO.reward_clip = 2147483648", "got 2147483648, beyond int32: write a point"),
        (f"PPO.learning_rate = {10**400}", "PPO.learning_rate: expected float, got 1000"),
        ("PPO.anneal_steps = -1e9", "PPO.anneal_steps: expected a positive number"),
        ("TOTAL_STEPS = 10000000000", "got 10000000000, beyond int32: write a point"),
        ("TOTAL_STEPS = 1e30", "expected at most 2147483647 updates of 64 agent steps"),
        ("TOTAL_STEPS = 1e999", "Experiment.total_steps: expected a positive int, got inf"),
        ("SEED = 2147483648", "Experiment.seed: expected int, got 2147483648, beyond int32"),
        ("catch.Catch.rows = 1000000000000", "Catch.rows: expected int, got 1000000000000, beyond"),
        ("catch.Catch.rows = 1e1", "Catch.rows: expected int, got 10.0"),
        ("SEED = -1", "Experiment.seed: expected an int of at least 0, got -1"),
    ],
)
def test_refuses_numbers_that_devices_cannot_hold(tiny, binding, message):
    with pytest.raises(errors.UserError) as raised:
        loaded = experiment.load([tiny], [binding])
        experiment.check(loaded.build(), loaded.seed)
    assert message in str(raised.value)


def test_runs_may_be_longer_than_int32(tiny):
    loaded = experiment.load([tiny], ["TOTAL_STEPS = 1e11", "PPO.anneal_steps = %TOTAL_STEPS"])
    parts = loaded.build()
    experiment.check(parts, loaded.seed)
    assert parts.num_updates == 10**11 // 64


MY_PARTS = """
import typing
from environments import catch
class Named(typing.TypedDict):
    name: str
def unannotated(inner=None): return catch.Catch()
def anything(inner: typing.Any = None): return catch.Catch()
def named(inner: Named = None): return catch.Catch()
"""


def test_what_cannot_be_checked_may_be_anything(tiny, tmp_path, monkeypatch):
    (tmp_path / "my_parts.py").write_text(MY_PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    mine = tmp_path / "mine.gin"
    for part in ("unannotated", "anything", "named"):
        for value in ("3", "@catch.Catch", "@catch.Catch()", "{'name': 'x'}"):
            mine.write_text(
                f"from __gin__ import dynamic_registration\ninclude '{tiny}'\n"
                "from environments import catch\nimport my_parts\n"
                f"my_parts.{part}.inner = {value}\n"
            )
            chosen = f"Experiment.environment = @my_parts.{part}"
            parts = experiment.load([tiny, str(mine)], [chosen]).build()
            assert parts.environment.spec.name == "Catch"


@pytest.mark.parametrize(
    ("bindings", "circle"),
    [
        (["SEED = %SEED"], "%SEED -> %SEED"),
        (["A = %B", "B = %A", "SEED = %A"], "%A -> %B -> %A"),
        (["A = %B", "B = %C", "C = %D", "D = %A", "PPO.gamma = %C"], "%A -> %B -> %C -> %D -> %A"),
        (["A = [1, {'x': (%A,)}]", "encoders.MLP.hidden_sizes = %A", ENCODER], "%A -> %A"),
        (
            ["A = @encoders.MLP()", "encoders.MLP.hidden_sizes = [%A]", ENCODER],
            "%A -> MLP.hidden_sizes -> %A",
        ),
        (
            ["MLP.hidden_sizes = @x/encoders.MLP()", "actor_critic.encoder = @x/encoders.MLP()"],
            "MLP.hidden_sizes -> MLP.hidden_sizes",
        ),
    ],
)
def test_values_that_need_themselves(tiny, bindings, circle):
    found = _message([tiny], bindings)
    assert "needs itself" in found
    for link in circle.split(" -> "):
        assert link in found


def test_a_value_of_another_scope_is_no_circle(tiny):
    bindings = [
        "Experiment.environment = @wrappers.TimeLimit",
        "TimeLimit.environment = @inner/wrappers.TimeLimit()",
        "inner/TimeLimit.environment = @catch.Catch()",
    ]
    assert experiment.load([tiny], bindings).build().environment.spec.name == "Catch"


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        ("ppo.PPO.gamma = = 3\n", 3, "Unable to parse value"),
        ("ppo.PPO.gamma\n", 3, "Couldn't parse statement"),
        # Where the file ends is its last line for Python 3.12 and later, the one after it before.
        (
            "ppo.PPO.gamma = (3,\n",
            3 if sys.version_info >= (3, 12) else 4,
            "a bracket or a quote is not closed",
        ),
        ("ppo.PPO.gamma = high\n", 3, "the value 'high' is neither"),
        ("ppo.PPO.gama = 3\n", 3, "did you mean 'gamma'?"),
        ("catch.Catch.rows = 3\n", 3, "'catch' is used but not imported in this file"),
        ("from environments import cach\n", 3, "did you mean 'environments.catch'"),
        ("from my_lab import corridors\n", 3, "no module 'my_lab' (is it on PYTHONPATH?)"),
        ("from agents import nothing_such\n", 3, "there is no module 'agents.nothing_such'"),
        ("include 'gin/agents/pp.gin'\n", 3, "no gin file 'gin/agents/pp.gin'; did you mean"),
    ],
)
def test_names_the_file_and_the_line(tmp_path, content, line, message):
    file = tmp_path / "mine.gin"
    file.write_text(IMPORTS + content)
    for path in (file, tmp_path / "outer.gin"):
        (tmp_path / "outer.gin").write_text(f"include '{file}'\n")
        found = _message([path])
        assert found.startswith(f"{file}:{line}: ")
        assert message in found


def test_says_which_file_is_missing(caplog):
    assert "did you mean 'gin/agents/ppo.gin'" in _message(["gin/agents/pp.gin"])
    assert "there is no gin file" in _message(["gin/agents"])
    assert not caplog.records  # gin logs errors of its own


@pytest.mark.parametrize("length", [1, 2, 3])
def test_files_that_include_one_another(tiny, tmp_path, monkeypatch, length):
    for index in range(length):
        following = f"{(index + 1) % length}.gin"
        (tmp_path / f"{index}.gin").write_text(f"include '{following}'\n")
    monkeypatch.chdir(tmp_path)
    circle = " -> ".join(f"{index % length}.gin" for index in range(length + 1))
    found = _message([tiny, "0.gin"])
    assert found == f"{length - 1}.gin:1: files include one another in a circle: {circle}"


def test_a_file_may_be_included_twice(tiny, tmp_path):
    twice = tmp_path / "twice.gin"
    twice.write_text(f"include '{tiny}'\ninclude '{tiny}'\n")
    assert experiment.load([str(twice), str(twice)], []).seed == 3


@pytest.mark.parametrize(
    "content", [b"\x7fELF\x02\x00\xff", "SEED = 3  # \xe9\n".encode("latin1"), b"\xff\xfeS\0"]
)
def test_refuses_files_that_are_no_text(tiny, tmp_path, content):
    file, outer = tmp_path / "mine.gin", tmp_path / "outer.gin"
    file.write_bytes(content)
    outer.write_text(f"SEED = 3\ninclude '{file}'\n")
    assert f"{file}: expected a text file in UTF-8, got the byte 0x" in _message([tiny, file])
    assert f"{outer}:2: " in _message([tiny, outer])
    assert f"'{file}': expected a text file in UTF-8" in _message([tiny, outer])


def test_files_may_begin_with_a_byte_order_mark(tiny, tmp_path):
    file = tmp_path / "mine.gin"
    file.write_text("SEED = 9  # \u00e9\n", encoding="utf-8-sig")
    assert experiment.load([tiny, str(file)], []).seed == 9


def test_says_all_that_an_experiment_lacks():
    found = _message(["gin/agents/ppo.gin", "gin/environments/catch.gin"], ["TOTAL_STEPS = 1"])
    assert "no value for Experiment.runner, Experiment.seed, Experiment.total_steps" in found
    assert "Experiment.agent" in _message([])


def test_short_names_long_names_and_modules_not_named_before(tiny):
    for name in ("@CartPole", "@cartpole.CartPole", "@environments.cartpole.CartPole"):
        for subject in ("Experiment", "experiment.Experiment"):
            loaded = experiment.load([tiny], [f"{subject}.environment = {name}", "PPO.gamma = 0.5"])
            parts = loaded.build()
            assert parts.environment.spec.name == "CartPole"
            assert parts.agent.gamma == 0.5
    loaded = experiment.load([tiny], ["catch.Catch.rows = 4", "Catch.columns = 3"])
    assert loaded.build().environment.spec.observation.shape == (4, 3, 1)


def test_later_files_and_bindings_win(tiny, tmp_path):
    later = tmp_path / "later.gin"
    later.write_text("SEED = 7\nTOTAL_STEPS = 64\n")
    loaded = experiment.load([tiny, str(later)], ["TOTAL_STEPS = 1e3", "TOTAL_STEPS = 128"])
    assert (loaded.seed, loaded.total_steps) == (7, 128)


def test_what_a_superseded_part_was_given_in_files_is_no_mistake(tiny, tmp_path):
    mine = tmp_path / "mine.gin"
    mine.write_text(
        f"include '{tiny}'\nfrom __gin__ import dynamic_registration\n"
        "from environments import catch\nROWS = 4\ncatch.Catch.rows = %ROWS\n"
    )
    files = [str(mine), "gin/environments/cartpole.gin"]
    assert experiment.load(files, []).build().environment.spec.name == "CartPole"
    # It is not written down either: `config.gin` has to be readable by itself.
    assert "Catch" not in config.text()
    assert "ROWS" not in config.text()
    # What the command line says has to count.
    assert "nothing uses 'Catch.rows'" in _message(files, ["catch.Catch.rows = 4"])
    assert "nothing uses the macro 'ROWS'" in _message(files, ["ROWS = 4"])


def test_a_file_that_configures_what_no_file_chose_is_a_mistake(tiny, tmp_path):
    mine = tmp_path / "mine.gin"
    mine.write_text(
        f"include '{tiny}'\nfrom __gin__ import dynamic_registration\n"
        "from environments import cartpole\ncartpole.CartPole.max_episode_steps = 3\n"
    )
    found = _message([mine])
    assert "nothing uses 'CartPole.max_episode_steps': this experiment has no CartPole" in found
    assert "it has Anakin, Catch, PPO, Sebulba, actor_critic" in found
    mine.write_text(f"include '{tiny}'\nSED = 3\n")
    assert "nothing uses the macro 'SED'; did you mean 'SEED'" in _message([mine])


RUNNERS = """
from __gin__ import dynamic_registration
from podracers import anakin
from podracers import sebulba

"""
CHOSEN = "gin/runners/sebulba.gin"
EITHER = "anakin.Anakin.reset_batch = 4\nsebulba.Sebulba.num_threads = 1\n"


def test_a_file_for_either_runner(tiny, tmp_path):
    either, outer = tmp_path / "either.gin", tmp_path / "outer.gin"
    either.write_text(f"{RUNNERS}{EITHER}")
    outer.write_text(f"include '{either}'\n")
    for file in map(str, (either, outer)):
        assert experiment.load([tiny, file], []).build().runner.reset_batch == 4
        assert "Sebulba" not in config.text()
        for files in ([tiny, CHOSEN, file], [tiny, file, CHOSEN]):
            assert experiment.load(files, []).build().runner.num_threads == 1
            assert "Anakin" not in config.text()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("sebulba.Sebulba.lag = 0\n", "nothing uses 'Sebulba.lag': this experiment has no Sebulba"),
        (f"{EITHER}sebulba.Sebulba.lagg = 0\n", "no parameter 'lagg'; did you mean 'lag'?"),
        (f"{EITHER}sebulba.Sebula.lag = 0\n", "did you mean 'sebulba.Sebulba'"),
        (f"{EITHER}SED = 3\n", "nothing uses the macro 'SED'; did you mean 'SEED'"),
        (
            f"from environments import cartpole\n{EITHER}cartpole.CartPole.max_episode_steps = 3\n",
            "nothing uses 'CartPole.max_episode_steps'",
        ),
    ],
)
def test_a_file_for_either_runner_may_hold_mistakes(tiny, tmp_path, content, message):
    file = tmp_path / "mine.gin"
    file.write_text(f"{RUNNERS}{content}")
    assert message in _message([tiny, file])


def test_what_one_file_says_of_either_runner_does_not_excuse_another_file(tiny, tmp_path):
    either, alone = tmp_path / "either.gin", tmp_path / "alone.gin"
    either.write_text(f"{RUNNERS}{EITHER}")
    alone.write_text(f"{RUNNERS}sebulba.Sebulba.lag = 1\n")
    assert "this experiment has no Sebulba" in _message([tiny, either, alone])


def test_what_a_file_says_of_a_runner_counts_until_a_later_one_chooses_another(tiny, tmp_path):
    mine, tuned = tmp_path / "mine.gin", tmp_path / "tuned.gin"
    mine.write_text(f"{RUNNERS}include '{tiny}'\nsebulba.Sebulba.lag = 0\n")
    tuned.write_text(f"{RUNNERS}anakin.Anakin.reset_batch = 4\n")
    # An experiment may have settings for either runner.
    assert experiment.load([str(mine)], []).runner.__name__ == "Anakin"
    assert experiment.load([str(mine), CHOSEN], []).build().runner.lag == 0
    # What was found for one runner is dropped when another one is chosen afterwards, and only then.
    assert experiment.load([str(mine), str(tuned)], []).build().runner.reset_batch == 4
    assert experiment.load([str(mine), str(tuned), CHOSEN], []).build().runner.lag == 0
    assert "this experiment has no Anakin" in _message([mine, CHOSEN, tuned])


def _said(*files, bindings=()):
    lines = []
    experiment.load(list(map(str, files)), bindings, lines.append)
    return lines


def test_says_what_one_file_takes_from_another(tiny, tmp_path):
    inner, mine, later = (tmp_path / f"{name}.gin" for name in ("inner", "mine", "later"))
    inner.write_text(f"include '{tiny}'\nSEED = 2\nNUM_ENVS = 16\n")
    mine.write_text(f"include '{inner}'\nSEED = 5\nROLLOUT_LENGTH = 8\n")
    later.write_text(
        f"{RUNNERS}from agents import ppo\nSEED = 0\nNUM_ENVS = 32\nROLLOUT_LENGTH = 8\n"
        "ppo.PPO.gamma = %GAMMA\nGAMMA = 0.5\nanakin.Anakin.num_envs = 64\n"
    )
    # What a file takes from its own includes is no news, nor is a value that stays the same.
    assert _said(mine) == []
    assert set(_said(mine, later)) == {
        f"{later} sets SEED = 0 over SEED = 5 of {mine}",
        f"{later} sets PPO.gamma = %GAMMA over PPO.gamma = 0.99 of {mine}",
        f"{later} sets Anakin.num_envs = 64 over Anakin.num_envs = %NUM_ENVS of {mine}",
    }
    assert set(_said(mine, "gin/hardware/v5e_8.gin", later)) >= {
        f"{later} sets SEED = 0 over SEED = 5 of {mine}",
    }
    # Bindings win openly.
    bindings = ["SEED = 7", "PPO.gamma = 0.9", "Anakin.num_envs = %NUM_ENVS"]
    assert _said(mine, later, bindings=bindings) == [
        f"{later} sets NUM_ENVS = 32 over NUM_ENVS = 16 of {mine}"
    ]
    # To choose one of the runners that were offered takes nothing from anybody.
    assert _said(mine, CHOSEN) == []
    assert _said(mine, "gin/runners/anakin.gin", CHOSEN) == [
        f"{CHOSEN} sets RUNNER = @sebulba.Sebulba over RUNNER = @anakin.Anakin of "
        "gin/runners/anakin.gin"
    ]


@pytest.mark.parametrize(
    ("comment", "unused"),
    [("@cartpole.CartPole", "cartpole.CartPole.max_episode_steps = 3"), ("not %SED", "SED = 3")],
)
def test_comments_do_not_count(tiny, tmp_path, comment, unused):
    mine = tmp_path / "mine.gin"
    mine.write_text(
        f"include '{tiny}'\n{IMPORTS}from environments import cartpole\n"
        f"# {comment}\nppo.PPO.gamma = 0.5  # {comment}\n{unused}\n"
    )
    assert "nothing uses" in _message([mine])


def test_the_text_of_a_configuration_parses_to_the_same(tiny, tmp_path):
    bindings = ["Experiment.environment = @CartPole", "PPO.gamma = 0.5", "SEED = 9"]
    loaded = experiment.load([tiny], bindings)
    text = config.text()
    (tmp_path / "config.gin").write_text(text)
    again = experiment.load([str(tmp_path / "config.gin")], [])
    assert config.text() == text
    assert (again.seed, again.total_steps) == (loaded.seed, loaded.total_steps) == (9, 2560)
    assert again.build().agent.gamma == 0.5
