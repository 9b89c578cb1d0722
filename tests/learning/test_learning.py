"""The shipped experiments learn what they say: long runs, `make test-learning`."""

import numpy as np
import pytest

from podracers.training import experiment, run, run_directory, stop_request

# What every seed must reach in the final evaluation (of sampled actions where policies
# are stochastic), and what is the most.
_LEAST = {
    "catch_ppo": 0.95,  # of 1
    "cartpole_ppo": 475.0,  # of 500
    "pendulum_ppo": -220.0,  # of about -150
    "snake_ppo": 15.0,  # of 143; uniform legal moves reach 5
    "gridworld_ppo": 0.9,  # of 1
    "catch_impala": 0.95,
    "cartpole_impala": 475.0,
    "snake_impala": 15.0,
    "catch_vmpo": 0.95,
    "cartpole_vmpo": 475.0,
    "catch_dqn": 1.0,
    "cartpole_dqn": 475.0,
    "cartpole_rainbow": 475.0,
    "catch_pqn": 1.0,
    "cartpole_pqn": 475.0,
    "memory_pqn": 1.0,  # of 1; without memory 0
    "catch_muzero": 1.0,
    "cartpole_muzero": 475.0,
    "catch_sac": 0.95,
    "pendulum_sac": -200.0,  # of about -150
    "pendulum_masked_sac": -200.0,  # of about -150; without memory below -1000
    "catch_r2d2": 1.0,
    "memory_r2d2": 1.0,  # of 1; without memory 0
    "cartpole_masked_r2d2": 475.0,  # of 500
}
# Seeds are trained as one population; Snake and the mazes take minutes for one.
_SEEDS = {"snake_ppo": 1, "gridworld_ppo": 1, "snake_impala": 1}


@pytest.mark.learning
@pytest.mark.parametrize("name", _LEAST)
def test_experiment_learns(name, tmp_path):
    bindings = [f"Anakin.population = {_SEEDS.get(name, 3)}", "Anakin.num_devices = 1"]
    settings = experiment.load([f"gin/experiments/{name}.gin"], bindings)
    directory = run_directory.RunDirectory(tmp_path)
    with stop_request.StopRequest() as stop:
        summary = run.Run(settings, settings.build(), directory, stop=stop).train()
    reached = summary["evaluation"]
    by_seed = list(reached.get("return_by_seed", {"": reached["return"]}).values())
    assert len(by_seed) == _SEEDS.get(name, 3)
    assert np.min(by_seed) >= _LEAST[name], f"{name}: {by_seed}"
