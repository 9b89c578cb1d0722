"""Mistakes on the command lines of scripts: one line and exit code 2, and nothing is written."""

import gc
import json
import shlex
import shutil
import signal

import pytest

from environments import catch
from tests import processes

HERE = "tests.scripts.test_mistakes"
_BEGIN = "train --gin_file {config} --run_dir {folder}/own --initial_run"
_CATCH = "environments.catch.Catch"
_COMPARE = "compare --gin_file {config} --seeds 1 --output_dir {folder}/new --runners"
_EXPORT = "export --run_dir {run} --out {folder}/policy"
_PLOT = "plot --out {folder}/x.png --run_dir"
_RESUME = "train --run_dir {run} --resume"
_REPRODUCE = "reproduce --results {ledger} --out {folder}/new"
_SWEEP = "sweep {config} --study {folder}/study --space"

# Spaces by the name of their file, and the message on each.
SPACES = [
    ("option", "PPO.gama = {linear = [0.9, 0.99]}", "option.toml: PPO.gama: "),
    ("near", "PPO.gama = {linear = [0.9, 0.99]}", "did you mean 'gamma'"),
    ("part", "PP0.gamma = {linear = [0.9, 0.99]}", "'PPO'"),
    ("macro", "NUM_ENV = {choice = [8, 16]}", "'NUM_ENVS'"),
    ("refused", "PPO.gamma = {linear = [0.9, 1.5]}", "refused.toml: PPO.gamma: "),
    ("kind", "PPO.gamma = {liner = [0.9, 0.99]}", "'linear'"),
    ("range", "PPO.gamma = {linear = [0.99, 0.9]}", "expected linear = [LOW, HIGH]"),
    ("sign", "PPO.gamma = {log = [0, 1]}", "two positive numbers"),
    ("whole", "PPO.epochs = {int = [1, 2.5]}", "two whole numbers"),
    ("empty", "PPO.epochs = {choice = []}", "expected choice = [VALUE, ...]"),
    ("bare", "PPO.epochs = 3", "PPO: expected {{KIND = [...]}}, one of log"),
    ("nothing", "", "expected a line such as"),
]
MISTAKES = [
    ("benchmark party", "'parity'"),
    ("benchmark sebulbas", "'sebulba_impala'"),
    ("benchmark peers --peers {folder}", "prepare_peers.sh"),
    ("benchmark tpu_ppo --libtpu {folder}", "libtpu=="),
    ("benchmark kernels --cuda {folder}", "jax-cuda12-plugin=="),
    ("benchmark sebulba_impala --gin_bindings 'IMPALA.gama = 0.9'", "'gamma'"),
    ("check Catch", "expected MODULE.Class"),
    ("check Pong-v6", "'Pong-v5'"),
    ("check CartPol-v1", "'CartPole-v1'"),
    ("check envpool:Pong-v6", "'Pong-v5'"),
    ("check gymnasium:CartPol-v1", "'CartPole-v1'"),
    ("check no_such_games:Game-v0", "'no_such_games'"),
    ("check environments.catch.Cach", "'Catch'"),
    ("check environments.cach.Catch", "'environments.catch'"),
    ("check environmets.catch.Catch", "PYTHONPATH"),
    (f"check {HERE}.MISTAKES", "not callable"),
    ("check environments.gymnasium.Gymnasium", "missing 1 required positional argument: 'env_id'"),
    (f"check {HERE}.mistyped", "Catch.columns"),
    ("check agents.ppo.PPO", "--environment"),
    (f"check {_CATCH} --environment {_CATCH}", _CATCH),
    ("match random", "two or more different players"),
    ("match random greedy", "expected players of one game, got none"),
    ("match random gredy --game tic_tac_toe", "'greedy'"),
    ("match random uct --game tic_tac_toe", "uct:SIMULATIONS"),
    ("match random uct:x --game tic_tac_toe", "uct:SIMULATIONS"),
    ("match random greedy --game tic_tac_to", "'tic_tac_toe'"),
    ("match random {run}", "is no game of two players"),
    ("match random {run}@7", "there is no checkpoint of step 7"),
    ("match random {run}@last", "@best or"),
    ("match random greedy --game tic_tac_toe --games 99 --opening_moves 1", "--opening_moves"),
    (f"{_COMPARE} anakim", "'anakin'"),
    (f"{_COMPARE} anakin --runners anakin", "--runners"),
    (f"{_COMPARE} a/b=anakin", "--runners"),
    (f"{_COMPARE} anakin --runner_gin anakim:x.gin", "--runner_gin"),
    (f"{_COMPARE} anakin --runner_gin x.gin", "--runner_gin"),
    (f"{_COMPARE} anakin --runner_bindings 'anakin:PPO.gama = 1'", "'gamma'"),
    (f"{_COMPARE} anakin --gin_bindings 'SEED = 5'", "seed 0"),
    ("evaluate --run_dir {begun}", "has no checkpoint yet"),
    ("evaluate --run_dir {folder}/nothing", "there is no run in"),
    ("evaluate --run_dir {run} --episodes 0", "expected a whole number of at least 1, got '0'"),
    ("evaluate --run_dir {run} --seed -1", "Experiment.seed: expected an int of at least 0"),
    ("evaluate --run_dir {run} --video {folder}/no/x.gif", "--video: cannot write '{folder}/no/"),
    ("evaluate --run_dir {run} --video x.mp4", "expected a name in .gif, got 'x.mp4'"),
    (f"{_EXPORT} --platforms cpu,gpu", "expected some of cpu,cuda,rocm,tpu, got 'gpu'"),
    (f"{_EXPORT} --push a/b/c", "--push: Repo id must be"),
    ("export --run_dir {run} --out {folder}/no/policy", "'{folder}/no' is no folder"),
    ("export --run_dir {run} --out {folder}", "it is a folder"),
    ("evaluate_rule --run_dir {run} --json {folder}/no/x.json", "--json: cannot write"),
    ("benchmark entered --json {folder}/no/x.json", "--json: cannot write"),
    (f"{_PLOT} {{folder}}/none", "no run"),
    (f"{_PLOT} {{run}} {{new}}", "new'"),
    (f"{_PLOT} {{begun}}/config.gin", "expected folders"),
    (f"{_PLOT} {{bare}}", "Experiment.agent"),
    (f"{_PLOT} {{run}} --metric los", "'los'"),
    (f"{_PLOT} {{run}} --metric return", "'return'"),
    ("plot --run_dir {run} --out {folder}/no/x.png", "--out: cannot write"),
    (_REPRODUCE, "--list"),
    (f"{_REPRODUCE} tny", "'tiny'"),
    (f"{_REPRODUCE} tiny --runner sebulba", "anakin"),
    (f"{_REPRODUCE} other", "'gamma'"),
    (f"{_REPRODUCE} --suite two tiny", "known: other"),
    (f"{_REPRODUCE} --suite two --record", "--record"),
    ("train --gin_file {config} --run_dir {run}", "continue it with --resume"),
    ("train --gin_file {config} --run_dir {config}/run", "Not a directory"),
    ("train --run_dir {folder}/rum --resume", "did you mean '{run}'"),
    ("train --run_dir {binary} --resume", "config.gin"),
    ("train --gin_file {binary}/config.gin --sed=3", "--sed"),
    ("train --gin_file {config} --gin_bindings SEED = 3", "'SEED': expected 'name.parameter ="),
    ("train --resume", "--resume needs --run_dir"),
    ("train --run_dir {folder}/other", "no --gin_file"),
    (f"{_BEGIN} {{folder}}/rum", "did you mean '{run}'"),
    (f"{_BEGIN} {{begun}}", "the run in '{begun}' has no checkpoint yet"),
    (f"{_BEGIN} {{folder}}/own", "there is no run in '{folder}/own'"),
    (
        f"{_BEGIN} {{run}} --gin_bindings 'Catch.columns = 7'",
        "encoder/Dense_0/kernel': expected float32[70, 64], got float32[50, 64]; "
        "Experiment.initial_parts = ('encoder', ...)",
    ),
    (f"{_BEGIN} {{run}} --gin_bindings \"Experiment.initial_parts = ('encodr',)\"", "'encoder'"),
    ("train --run_dir {run} --resume --initial_run {begun}", "keeps its initial_run, default"),
    (f"{_RESUME} --gin_bindings 'Catch.columns = 7'", "does not fit"),
    (f"{_RESUME} --gin_bindings 'Experiment.environment = @GridWorld'", "its environment, Cat"),
    (f"{_RESUME} --gin_file gin/agents/dqn.gin", "keeps its agent, PPO: got DQN"),
    (f"{_RESUME} --runner sebulba", "keeps its runner, Anakin: got Sebulba"),
    ("train --gin_file {config} --distributed", "--coordinator HOST:PORT"),
    (f"{_SWEEP} {{folder}}/none.toml", "cannot read '{folder}/none.toml'"),
    (f"{_SWEEP} {{config}}", "tiny.gin: "),
    *((f"{_SWEEP} {{folder}}/{name}.toml", phrase) for name, _, phrase in SPACES),
    (f"{_SWEEP} {{folder}}/good.toml --objective evaluation/retrun", "'evaluation/return'"),
    (f"{_SWEEP} {{folder}}/good.toml --sampler grid", "PPO.gamma"),
    (f"{_SWEEP} {{folder}}/good.toml --sampler gp", "pip install torch"),
    (f"{_SWEEP} {{folder}}/good.toml --sampler tpee", "'tpee'"),
    (f"{_SWEEP} {{folder}}/good.toml --batch 2 --runner sebulba", "expected the runner Anakin"),
    (f"{_SWEEP} {{folder}}/epochs.toml --batch 2", "no option 'PPO.epochs' that is a float"),
    (f"{_SWEEP} {{folder}}/good.toml --storage nonsense://x", "--storage: cannot open"),
    (f"{_SWEEP} {{folder}}/good.toml --storage sqlite:// --study {{config}}/a", "write the study"),
    (f"{_SWEEP} {{folder}}/good.toml --gin_bindings 'PPO.gama = 1'", "'gamma'"),
    (f"{_SWEEP} {{folder}}/good.toml --trials 0", "--trials"),
]


def mistyped():
    return catch.Catch(rows=10, columns="wide")


@pytest.fixture(scope="module")
def places(tmp_path_factory, reference):
    """Paths by name: `run` is a finished run, of which `begun` has the configuration alone."""
    folder = tmp_path_factory.mktemp("mistakes")
    config, trained, ledger = processes.config_file(folder), folder / "run", folder / "results.json"
    places = {name: folder / name for name in ("bare", "begun", "binary", "new")}
    for path in places.values():
        path.mkdir()
    other = shutil.copy(config, folder / "other.gin")
    shutil.copytree(reference, trained, ignore=shutil.ignore_patterns(".lock"))
    shutil.copy(trained / "config.gin", places["begun"])
    (places["bare"] / "config.gin").write_text("SEED = 3\n")
    (places["binary"] / "config.gin").write_bytes(b"\x7fELF\xff\xfe\x00\x01" * 9)
    good = {"good": "PPO.gamma = {linear = [0.9, 0.99]}", "epochs": "PPO.epochs = {int = [1, 2]}"}
    for name, text in [*good.items(), *(space[:2] for space in SPACES)]:
        (folder / f"{name}.toml").write_text(text)
    row = {"runner": "Anakin", "agent": "PPO", "environment": "a"}
    rows = (
        {"experiment": str(config), "suite": "three"},
        {"experiment": str(other), "suite": "two", "gin_bindings": ["PPO.gama = 1"]},
    )
    ledger.write_text(json.dumps([row | other for other in rows]))
    return {**places, "folder": folder, "config": config, "run": trained, "ledger": ledger}


def _files(places):
    """Returns all paths, and what the configurations are."""
    paths = [path for path in places["folder"].rglob("*") if path.name != ".lock"]
    return sorted((path, path.suffix == ".gin" and path.read_bytes()) for path in paths)


@pytest.mark.parametrize(("words", "phrase"), MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(places, run, words, phrase):
    before, handler = _files(places), signal.getsignal(signal.SIGTERM)
    result = run(*shlex.split(words.format_map(places)), code=2)
    processes.assert_mistake(result, phrase.format_map(places))
    assert _files(places) == before
    if "--resume" in words:
        gc.collect()  # frees the lock, as the end of a process does
    signal.signal(signal.SIGTERM, handler)
