"""EnvPool's families: the table of docs/environments.md, and ten updates of each."""

import pathlib
import re

import pytest
from envpool import registration

from podracers import errors
from podracers.training import experiment, run

ROOT = pathlib.Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "environments.md").read_text()
# Of a row: the family's module, the number of ids, an id, and the experiment that begins with it.
ROWS = re.findall(r"^\|.*\(`([\w.]+)`\) \| (\d+) \| `(.+?)` \|.* `(\w+)\.gin` \|$", PAGE, re.M)
SMALL = (
    "NUM_ENVS = 4",
    "ROLLOUT_LENGTH = 8",
    "TOTAL_STEPS = 320",
    "Sebulba.timeout = 600.0",  # on a loaded machine
    "Experiment.evaluation_episodes = 2",
    "Experiment.evaluation_max_steps = 4",
    "Experiment.greedy_evaluation_episodes = 0",
)
SMALL_AGENTS = {
    "ppo": ("PPO.epochs = 1", "PPO.num_minibatches = 2"),
    "sac": ("SAC.min_replay = 32", "SAC.batch_size = 8", "SAC.replay_ratio = 1.0"),
}


def module_of(task_id):
    """Returns the module of a task, with the family of those of MuJoCo."""
    return ".".join(registration.registry.specs[task_id][0].split(".")[1:3])


def test_the_page_counts_the_ids_of_every_family():
    modules = [module_of(task_id) for task_id in registration.registry.specs]
    counts = {module: modules.count(module) for module in set(modules)}
    assert {module: int(count) for module, count, *_ in ROWS} == counts
    assert f"{len(modules):,} ids" in PAGE
    assert all(module_of(task_id) == module for module, _, task_id, _ in ROWS)


# `test_envpool.py` plays the others, which have the experiment of box2d.
TRAINED = [row for row in ROWS if row[0] not in ("toy_text", "classic_control")]


@pytest.mark.slow
@pytest.mark.parametrize("row", TRAINED, ids=lambda row: row[0])
def test_ten_updates(row, tmp_path):
    _, _, task_id, name = row
    bindings = [f"EnvPool.task_id = '{task_id}'", *SMALL, *SMALL_AGENTS[name.rpartition("_")[2]]]
    settings = experiment.load([f"gin/experiments/{name}.gin"], bindings)
    try:
        assert run.train(settings, tmp_path / "run")["updates"] == 10
    except errors.UserError as error:  # a library is missing on this machine
        if not re.match(rf"EnvPool's {task_id}: [^\n]*`apt install \w+", str(error)):
            raise
