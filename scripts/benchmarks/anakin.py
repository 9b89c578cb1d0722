"""Anakin's speed: against PPO in one file, part by part, by batch size, and with an empty cache."""

import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from baselines import single_file_ppo
from benchmarks import measure

from agents import encoders, minibatches, networks, ppo
from environments import cartpole, catch, gymnax, jumanji
from podracers import anakin, batch, evaluation, types, unroll

_SCRIPTS = pathlib.Path(__file__).resolve().parents[1]


def _breakout():
    return gymnax.Gymnax("Breakout-MinAtar")


_PPO_ENVIRONMENTS = {"cartpole": cartpole.CartPole, "breakout": _breakout}


def _ppo_anakin(environment, **settings) -> anakin.Anakin:
    agent = ppo.PPO(spec=environment.spec)
    return anakin.Anakin(
        agent=agent, environment=environment, num_envs=64, rollout_length=128, **settings
    )


def benchmark_ppo(name: str, repeats: int) -> dict[str, Any]:
    """Compares Anakin PPO with a PPO in one file: 64 x 128 steps, 4 x 4, two tanh layers of 64."""
    environment = _PPO_ENVIRONMENTS[name]()
    ours = measure.Stepper(_ppo_anakin(environment), updates=20)
    theirs = measure.Stepper(single_file_ppo.SingleFilePPO(environment), updates=20)
    rates = measure.take_turns({"anakin": ours, "single_file": theirs}, repeats)
    ratios = np.array(rates["anakin"]) / np.array(rates["single_file"])
    return {
        "unit": "agent steps/s",
        "anakin": measure.spread(rates["anakin"], 0),
        "single_file": measure.spread(rates["single_file"], 0),
        "ratio": measure.spread(ratios, 3),
        "first_dispatch_s": {
            "anakin": round(ours.first_dispatch, 2),
            "single_file": round(theirs.first_dispatch, 2),
        },
    }


def benchmark_breakdown(repeats: int) -> dict[str, Any]:
    """Says where the time of one Anakin PPO update on CartPole goes, in milliseconds.

    Each part is compiled by itself; what the whole takes beyond their sum is what their being in
    one program costs (or, if negative, saves).
    """
    environment = cartpole.CartPole()
    runner = _ppo_anakin(environment, num_devices=1)
    agent, state = runner.agent, runner.init(0)
    program = functools.partial(
        jax.shard_map,
        mesh=runner.mesh,
        in_specs=jax.sharding.PartitionSpec(),
        out_specs=jax.sharding.PartitionSpec(),
        check_vma=False,
    )
    key = jax.random.key(0)
    batched = batch.BatchedEnvironment(environment, runner.reset_batch)
    length = runner.rollout_length

    def act(learner, streams):
        params = agent.actor_params(learner)
        return unroll.unroll(agent, batched, params, streams, key, length)

    def step_only(streams):
        action = jnp.zeros((runner.num_envs,), jnp.int32)

        def body(carry, _):
            state, timestep = batched.step(carry, action)
            return state, timestep.reward

        return jax.lax.scan(body, streams.environment, None, length=length)

    act = jax.jit(program(act))
    _, rollout = act(state.learner, state.streams)

    def learn(learner, rollout):
        return agent.update(types.AgentState(learner, ()), rollout, key)

    def shuffle(rollout):
        items = (rollout.timestep.observation[:-1], rollout.extras, rollout.timestep.reward[1:])
        items = (items, rollout.timestep.step_type[:-1], rollout.timestep.discount[1:])
        return [
            minibatches.over_time(items, jax.random.fold_in(key, epoch), agent.num_minibatches)
            for epoch in range(agent.epochs)
        ]

    stepper = measure.Stepper(runner, updates=20)
    turns = {
        "environment": measure.seconds(jax.jit(program(step_only)), state.streams),
        "environment and acting": measure.seconds(act, state.learner, state.streams),
        "learning": measure.seconds(jax.jit(program(learn)), state.learner, rollout),
        "shuffling": measure.seconds(jax.jit(program(shuffle)), rollout),
        "whole": lambda: runner.steps_per_update / stepper(),
    }
    times = measure.take_turns(turns, repeats)
    milliseconds = {name: 1e3 * float(np.median(values)) for name, values in times.items()}
    whole = milliseconds["whole"]
    parts = {
        "environment": milliseconds["environment"],
        "acting": milliseconds["environment and acting"] - milliseconds["environment"],
        "shuffling (within learning)": milliseconds["shuffling"],
        "gradients and the rest of learning": milliseconds["learning"] - milliseconds["shuffling"],
        "beyond the sum of the parts": whole
        - milliseconds["environment and acting"]
        - milliseconds["learning"],
    }
    return {
        "unit": "ms per update of 8192 agent steps",
        "whole": round(whole, 3),
        "parts": {name: round(value, 3) for name, value in parts.items()},
        "share": {name: round(value / whole, 3) for name, value in parts.items()},
    }


def benchmark_overhead(repeats: int) -> dict[str, Any]:
    """Compares `Anakin.step` with its own compiled program, called bare; 10 updates a dispatch.

    A machine's drift from turn to turn is larger than what is looked for. So a dispatch of no
    update at all, which is nothing but overhead, is timed too, and set against a whole dispatch.
    """
    runner = _ppo_anakin(cartpole.CartPole())
    compiled = runner._step.lower(runner.init(0), jnp.int32(10)).compile()

    class Bare:
        """The compiled program without the runner around it."""

        steps_per_update = runner.steps_per_update
        init = staticmethod(runner.init)

        def step(self, state, num_updates):
            return compiled(state, np.int32(num_updates))

    rates = measure.take_turns(
        {"runner": measure.Stepper(runner, 10), "bare": measure.Stepper(Bare(), 10)}, 3 * repeats
    )
    ratio = np.array(rates["bare"]) / np.array(rates["runner"])
    state, empty = runner.init(0), []
    for _ in range(100):
        start = time.perf_counter()
        state, report = runner.step(state, 0)
        jax.block_until_ready((state, report))
        empty.append(time.perf_counter() - start)
    whole = 10 * runner.steps_per_update / np.median(rates["runner"])
    return {
        "unit": "agent steps/s",
        "runner": measure.spread(rates["runner"], 0),
        "bare program": measure.spread(rates["bare"], 0),
        "overhead by turns (bare / runner - 1)": measure.spread(ratio - 1.0, 4),
        "a dispatch of no update, ms": measure.spread(1e3 * np.array(empty), 3),
        "its share of a dispatch of 10 updates": round(float(np.median(empty) / whole), 5),
    }


def _podracer_catch(num_envs: int) -> anakin.Anakin:
    """The setting of the Podracer paper's notebook: Catch and a small network."""
    environment = catch.Catch()
    network = functools.partial(
        networks.actor_critic, encoder=encoders.MLP((128, 128), "relu"), separate_critic=False
    )
    agent = ppo.PPO(spec=environment.spec, network=network, epochs=1, num_minibatches=1)
    return anakin.Anakin(agent=agent, environment=environment, num_envs=num_envs, rollout_length=32)


def benchmark_catch(repeats: int, batches: Iterable[int]) -> dict[str, Any]:
    """Measures Catch against the batch of environments, on all devices of this process."""
    devices = jax.device_count()
    rows = {}
    for num_envs in batches:
        stepper = measure.Stepper(_podracer_catch(num_envs), updates=max(1, 2048 // num_envs))
        rates = measure.take_turns({"anakin": stepper}, repeats)["anakin"]
        rows[str(num_envs)] = {
            **measure.spread(rates, 0),
            "first_dispatch_s": round(stepper.first_dispatch, 2),
        }
    return {"unit": "agent steps/s", "devices": devices, "environments": rows}


def benchmark_resets(repeats: int) -> dict[str, Any]:
    """Compares ways to reset under a random policy: 256 environments, 64 steps."""
    return {
        name: _reset_cost(environment, repeats)
        for name, environment in (
            ("CartPole", cartpole.CartPole()),
            ("Snake-v1", jumanji.Jumanji("Snake-v1")),
            ("Maze-v0", jumanji.Jumanji("Maze-v0")),
        )
    }


def _reset_cost(environment, repeats: int) -> dict[str, Any]:
    policy = evaluation.UniformPolicy(environment.spec)
    turns = {}
    key = jax.random.key(0)

    def act(streams, batched):
        final, rollout = unroll.unroll(policy, batched, (), streams, key, 64)
        return final, jnp.sum(rollout.timestep.reward)

    for reset_batch in (None, 4, 16):
        batched = batch.BatchedEnvironment(environment, reset_batch)
        streams = unroll.init(policy, batched, jnp.arange(256), 256, key)
        label = "every lane" if reset_batch is None else f"{reset_batch} at a time"
        turns[label] = measure.seconds(jax.jit(functools.partial(act, batched=batched)), streams)
    times = measure.take_turns(turns, repeats)
    return {
        "unit": "agent steps/s",
        **{
            name: measure.spread((256 * 64 / np.array(values)).tolist(), 0)
            for name, values in times.items()
        },
    }


def benchmark_startup(repeats: int) -> dict[str, Any]:
    """Times the start of training with an empty compilation cache, then with a full one."""
    script = str(_SCRIPTS / "train.py")
    results = {"unit": "s from the start of the process to the end of 1 update"}
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": f"{folder}/cache"}
        for start in ("first", "second"):
            files = len(list(pathlib.Path(folder).glob("cache/*")))
            began = time.perf_counter()
            subprocess.run(
                [
                    *(sys.executable, script),
                    *("--gin_file", "gin/experiments/cartpole_ppo_anakin.gin"),
                    *("--gin_bindings", "TOTAL_STEPS = 8192"),
                    *("--run_dir", f"{folder}/{start}"),
                ],
                env=environment,
                check=True,
                capture_output=True,
            )
            seconds = time.perf_counter() - began
            added = len(list(pathlib.Path(folder).glob("cache/*"))) - files
            results[start] = {"seconds": round(seconds, 2), "cache files added": added}
    return results


def _on_devices(count: int, arguments: list[str]) -> dict[str, Any]:
    """Runs this script in a process of its own with `count` fake CPU devices."""
    flags = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={count}"
    environment = os.environ | {"XLA_FLAGS": flags, "PJRT_NPROC": str(max(2 * count, 4))}
    done = subprocess.run(
        [sys.executable, str(_SCRIPTS / "benchmark.py"), *arguments, "--quiet"],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout)["results"]


def benchmark_catch_on_devices(
    repeats: int, batches: Iterable[int], devices: Iterable[int]
) -> dict[str, Any]:
    """Measures Catch on several numbers of fake devices, in a process each."""
    arguments = ["catch", "--repeats", str(repeats), "--batches", *map(str, batches)]
    return {str(n): _on_devices(n, arguments)["catch"] for n in devices}
