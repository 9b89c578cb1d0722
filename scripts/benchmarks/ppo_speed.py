"""Anakin's speed: beside other programs, part by part, by batch size, and by ways to reset."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from benchmarks import contender, measure, records, single_file_ppo

from agents import minibatches, networks, ppo
from agents.networks import encoders
from environments import cartpole, catch, gymnax, jumanji
from podracers import anakin, evaluation, types, unroll
from podracers.training import experiment

_WHOLE = records.Kind("time of an update", "ms", records.LOWER, 3)
_PART = records.Kind("time of an update", "ms", None, 3)  # what one part saves, another may cost
_SHARE = records.Kind("share of an update", "share", None, 3)
_OVERHEAD = records.Kind("overhead, turn by turn", "share", None, 4)  # noise about zero
_EMPTY = records.Kind("a dispatch of no update", "ms", records.LOWER, 3)
_EMPTY_SHARE = records.Kind("its share of a dispatch of ten updates", "share", records.LOWER, 5)
_PPO_ENVIRONMENTS = {
    "cartpole": cartpole.CartPole,
    "breakout": functools.partial(gymnax.Gymnax, "Breakout-MinAtar"),
}
BATCHES = (64, 256, 1024, 4096)  # environments
_ABOUT_BATCHES = {
    "catch": "Anakin PPO on Catch against the batch of environments, in the setting of the "
    "Podracer paper's notebook: 32 steps, one gradient step, two layers of 128.",
    "cartpole": "Anakin PPO on CartPole against the batch of environments, else as shipped in "
    "gin/experiments/cartpole_ppo.gin.",
    "breakout": "Anakin PPO on gymnax's MinAtar Breakout against the batch of environments: 128 "
    "steps, 4 epochs x 4 minibatches, two tanh layers of 64.",
    "snake": "Anakin PPO on Jumanji's Snake against the batch of environments, else as shipped in "
    "gin/experiments/snake_ppo.gin.",
}


def _ppo_anakin(environment, num_envs: int = 64, **settings) -> anakin.Anakin:
    agent = ppo.PPO(spec=environment.spec)
    return anakin.Anakin(
        agent=agent, environment=environment, num_envs=num_envs, rollout_length=128, **settings
    )


def benchmark_ppo(name: str, repeats: int) -> records.Result:
    """Compares Anakin PPO with a PPO in one file: 64 x 128 steps, 4 x 4, two tanh layers of 64."""
    environment = _PPO_ENVIRONMENTS[name]()
    runners = {
        "Anakin": _ppo_anakin(environment),
        "a PPO in one file": single_file_ppo.SingleFilePPO(environment),
    }
    programs = {key: measure.Stepper(runner, updates=20) for key, runner in runners.items()}
    rates = measure.take_turns(programs, repeats)
    ratios = measure.ratios(*rates.values())
    first = {key: stepper.first_dispatch for key, stepper in programs.items()}
    return records.Result(
        f"Anakin PPO and a PPO in one file on {name}: 64 environments x 128 steps, 4 epochs x 4 "
        "minibatches, two tanh layers of 64.",
        (
            *(measure.SPEED.row(values, program=key) for key, values in rates.items()),
            measure.RATIO.row(ratios, program=" / ".join(programs)),
            *(measure.FIRST_DISPATCH.row(value, program=key) for key, value in first.items()),
        ),
    )


def benchmark_minatar(repeats: int) -> records.Result:
    """Compares PQN and PPO on MinAtar: the same network, streams, epochs and minibatches."""
    rows = []
    for game in ("breakout", "asterix"):
        runner = experiment.load([f"gin/experiments/gymnax_{game}_pqn.gin"], []).build().runner
        network = functools.partial(
            networks.actor_critic,
            encoder=encoders.CNN((16,), padding="VALID", layer_norm=True),
            separate_critic=False,
        )
        settings = {"epochs": runner.agent.epochs, "num_minibatches": runner.agent.num_minibatches}
        other = dataclasses.replace(
            runner, agent=ppo.PPO(runner.environment.spec, network, **settings)
        )
        turns = {"PQN": measure.Stepper(runner, 4), "PPO": measure.Stepper(other, 4)}
        rates = measure.take_turns(turns, repeats)
        for agent, values in rates.items():
            rows.append(measure.SPEED.row(values, environment=game, agent=agent))
        ratios = measure.ratios(rates["PQN"], rates["PPO"])
        rows.append(measure.RATIO.row(ratios, environment=game, agent="PQN / PPO"))
    return records.Result(
        "PQN and PPO under Anakin on MinAtar, with the network, the streams, the epochs and the "
        "minibatches of PQN's experiments: 128 environments x 32 steps, 2 epochs x 32 minibatches, "
        "a convolution of 16 channels and a layer of 128, both normalised.",
        tuple(rows),
    )


def benchmark_breakdown(repeats: int) -> records.Result:
    """Says where the time of one Anakin PPO update on CartPole goes, in milliseconds.

    Each part is compiled by itself; what the whole takes beyond their sum is what their being in
    one program costs (or, if negative, saves).
    """
    environment = cartpole.CartPole()
    runner = _ppo_anakin(environment, num_devices=1)
    agent, state = runner.agent, runner.init(0)
    key = jax.random.key(0)
    batched = unroll.BatchedEnvironment(environment, runner.reset_batch)
    length, everywhere = runner.rollout_length, jax.sharding.PartitionSpec()

    def program(function):
        specs = {"in_specs": everywhere, "out_specs": everywhere}
        return jax.jit(jax.shard_map(function, mesh=runner.mesh, check_vma=False, **specs))

    @program
    def act(learner, streams):
        params = agent.actor_params(learner)
        return unroll.unroll(agent, batched, params, streams, key, length)

    @program
    def step_only(streams):
        action = jnp.zeros((runner.num_envs,), jnp.int32)

        def body(carry, _):
            state, timestep = batched.step(carry, action)
            return state, timestep.reward

        return jax.lax.scan(body, streams.environment, None, length=length)

    @program
    def learn(learner, rollout):
        return agent.update(types.AgentState(learner, ()), rollout, key)

    @program
    def shuffle(rollout):
        items = (rollout.timestep.observation[:-1], rollout.extras, rollout.timestep.reward[1:])
        items = (items, rollout.timestep.step_type[:-1], rollout.timestep.discount[1:])
        return [
            minibatches.over_time(items, jax.random.fold_in(key, epoch), agent.num_minibatches)
            for epoch in range(agent.epochs)
        ]

    _, rollout = act(state.learner, state.streams)
    stepper = measure.Stepper(runner, updates=20)
    turns = {
        "environment": measure.seconds(step_only, state.streams),
        "environment and acting": measure.seconds(act, state.learner, state.streams),
        "learning": measure.seconds(learn, state.learner, rollout),
        "shuffling": measure.seconds(shuffle, rollout),
        "whole": lambda: runner.steps_per_update / stepper(),
    }
    times = measure.take_turns(turns, repeats)
    stepping, both, learning, shuffling, whole = (
        1e3 * float(np.median(values)) for values in times.values()
    )
    parts = {
        "environment": stepping,
        "acting": both - stepping,
        "shuffling (within learning)": shuffling,
        "gradients and the rest of learning": learning - shuffling,
        "beyond the sum of the parts": whole - both - learning,
    }
    rows = [_PART.row(value, part=name) for name, value in parts.items()]
    rows += [_SHARE.row(value / whole, part=name) for name, value in parts.items()]
    return records.Result(
        "Where the time of one Anakin PPO update on CartPole goes (8192 agent steps, one device): "
        "medians of parts that are compiled by themselves.",
        (_WHOLE.row(whole, part="whole"), *rows),
    )


def benchmark_overhead(repeats: int) -> records.Result:
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
    ratio = measure.ratios(rates["bare"], rates["runner"])
    state, empty = runner.init(0), []
    for _ in range(100):
        start = time.perf_counter()
        state, report = runner.step(state, 0)
        jax.block_until_ready((state, report))
        empty.append(time.perf_counter() - start)
    whole = 10 * runner.steps_per_update / np.median(rates["runner"])
    return records.Result(
        "`Anakin.step` and its own compiled program, called bare: PPO on CartPole, ten updates a "
        "dispatch.",
        (
            measure.SPEED.row(rates["runner"], program="runner"),
            measure.SPEED.row(rates["bare"], program="bare program"),
            _OVERHEAD.row(ratio - 1.0, program="runner"),
            _EMPTY.row(1e3 * np.array(empty), program="runner"),
            _EMPTY_SHARE.row(np.median(empty) / whole, program="runner"),
        ),
    )


def _of_batch(name: str, num_envs: int) -> measure.Stepper:
    """Returns a contender with so many environments; on Catch, that of the paper's notebook."""
    if name == "catch":
        environment = catch.Catch()
        network = functools.partial(
            networks.actor_critic, encoder=encoders.MLP((128, 128), "relu"), separate_critic=False
        )
        agent = ppo.PPO(spec=environment.spec, network=network, epochs=1, num_minibatches=1)
        runner = anakin.Anakin(
            agent=agent, environment=environment, num_envs=num_envs, rollout_length=32
        )
    elif name == "breakout":
        runner = _ppo_anakin(_PPO_ENVIRONMENTS[name](), num_envs)
    else:
        file = f"gin/experiments/{name}_ppo.gin"
        runner = experiment.load([file], [f"NUM_ENVS = {num_envs}"]).build().runner
    return measure.Stepper(runner, updates=max(1, 2048 // num_envs))


def benchmark_batches(
    name: str, repeats: int, batches: Sequence[int], devices: Sequence[int] = ()
) -> records.Result:
    """Measures Anakin PPO against the batch of environments.

    Args:
      name: "catch", "cartpole", "snake" or "breakout".
      repeats: turns of each batch.
      batches: numbers of environments.
      devices: numbers of fake devices, each in a process of its own; none for all that there are.
    """
    rows = []
    for count in devices or (None,):
        for num_envs in batches:
            case = {"devices": count or jax.device_count(), "environments": num_envs}
            with _contender(name, num_envs, count) as each:
                rates = measure.take_turns({"anakin": each}, repeats)["anakin"]
                first = each.ask("first_dispatch") if count else each.first_dispatch
            rows.append(measure.SPEED.row(rates, **case))
            rows.append(measure.FIRST_DISPATCH.row(first, **case))
    notes = (contender.FAKE,) if devices else ()
    return records.Result(_ABOUT_BATCHES[name], tuple(rows), notes)


@contextlib.contextmanager
def _contender(name: str, num_envs: int, devices: int | None):
    if devices is None:
        yield _of_batch(name, num_envs)
        return
    environments = {name: contender.fake_devices(devices)}
    with contender.together({name: _of_batch}, (name, num_envs), environments) as contenders:
        yield contenders[name]


def benchmark_resets(repeats: int) -> records.Result:
    """Compares ways to reset under a random policy: 256 environments, 64 steps."""
    environments = {
        "CartPole": cartpole.CartPole(),
        "Snake-v1": jumanji.Jumanji("Snake-v1"),
        "Maze-v0": jumanji.Jumanji("Maze-v0"),
    }
    rows = [
        measure.SPEED.row(256 * 64 / np.array(values), environment=name, reset=label)
        for name, environment in environments.items()
        for label, values in _reset_times(environment, repeats).items()
    ]
    return records.Result(
        "Ways to reset, under a random policy: 256 environments, 64 steps; every lane at every "
        "step, or so many at a time.",
        tuple(rows),
    )


def _reset_times(environment, repeats: int) -> dict[str, list[float]]:
    """Returns the seconds of 64 steps, by the way to reset."""
    policy = evaluation.UniformPolicy(environment.spec)
    turns = {}
    key = jax.random.key(0)

    def act(streams, batched):
        final, rollout = unroll.unroll(policy, batched, (), streams, key, 64)
        return final, jnp.sum(rollout.timestep.reward)

    for reset_batch in (None, 4, 16):
        batched = unroll.BatchedEnvironment(environment, reset_batch)
        streams = unroll.init(policy, batched, jnp.arange(256), 256, key)
        label = "every lane" if reset_batch is None else f"{reset_batch} at a time"
        turns[label] = measure.seconds(jax.jit(functools.partial(act, batched=batched)), streams)
    return measure.take_turns(turns, repeats)
