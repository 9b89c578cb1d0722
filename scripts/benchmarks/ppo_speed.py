"""Anakin PPO by the number of environments."""

import functools

import jax

from agents import networks, ppo
from agents.networks import encoders
from environments import cartpole, catch, gymnax
from podracers import anakin
from podracers.scripts.benchmarks import measure, records

ENVIRONMENTS = {
    "cartpole": cartpole.CartPole,
    "breakout": functools.partial(gymnax.Gymnax, "Breakout-MinAtar"),
}
TASKS = {  # settings by task
    "catch": "as in the Podracer paper's notebook: 32 steps, one gradient step, two layers of 128",
    "cartpole": "otherwise as in gin/experiments/cartpole_ppo.gin",
    "snake": "otherwise as in gin/experiments/snake_ppo.gin",
    "breakout": "128 steps, 4 epochs x 4 minibatches, two tanh layers of 64",
}


def benchmark(name: str, repeats: int) -> records.Result:
    """Measures PPO on one of `TASKS` by the number of environments."""
    rows = []
    small = jax.default_backend() == "cpu"
    for num_envs in (64, 256, 1024, 4096) if small else (1024, 8192, 65536):
        case = {"devices": jax.device_count(), "environments": num_envs}
        stepper = measure.Stepper(build(name, num_envs), updates=max(1, 2048 // num_envs))
        rows.append(measure.speed(measure.take_turns({"": stepper}, repeats)[""], **case))
        dispatch = "first dispatch, compiling included"
        rows.append(records.row(dispatch, "s", stepper.first_dispatch, **case))
    about = f"Anakin PPO on {name} by the number of environments, {TASKS[name]}."
    return records.Result(about, tuple(rows))


def build(name: str, num_envs: int) -> anakin.Anakin:
    """Returns the runner of one of `TASKS`."""
    if name == "breakout":
        environment = ENVIRONMENTS[name]()
        agent = ppo.PPO(environment.spec)
        return anakin.Anakin(agent, environment, num_envs, rollout_length=128)
    if name == "catch":
        environment = catch.Catch()
        network = functools.partial(
            networks.actor_critic, encoder=encoders.MLP((128, 128), "relu"), separate_critic=False
        )
        agent = ppo.PPO(environment.spec, network=network, epochs=1, num_minibatches=1)
        return anakin.Anakin(agent, environment, num_envs, rollout_length=32)
    files, bindings = [f"gin/experiments/{name}_ppo.gin"], [f"NUM_ENVS = {num_envs}"]
    runner = measure.build(files, bindings).runner
    assert isinstance(runner, anakin.Anakin)
    return runner
