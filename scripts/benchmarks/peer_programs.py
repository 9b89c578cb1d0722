"""Trains with another codebase: python peer_programs.py PEER TASK UPDATES STEPS FOLDER.

It runs in the packages of that codebase, so it imports nothing of this project. For each line on
the standard input it trains for UPDATES updates, of STEPS agent steps each, and prints the agent
steps per second.
"""

# Packages of one peer are missing beside another.
# ruff: noqa: PLC0415

import os
import pathlib
import sys
import textwrap
import time
import types
from collections.abc import Callable
from typing import Any

PPO = {  # task: name in gymnax, environments, minibatches, activation
    "cartpole": ("CartPole-v1", 64, 4, "tanh"),
    "breakout": ("Breakout-MinAtar", 64, 8, "relu"),
    "breakout_8192": ("Breakout-MinAtar", 8192, 8, "relu"),
}
PGX = {  # options of Pgx's example of AlphaZero; an update is one iteration
    **{"env_id": "connect_four", "num_simulations": 32, "selfplay_batch_size": 128},
    **{"max_num_steps": 256, "training_batch_size": 512},
}
LEAD_IN = 2  # updates of Cleanba before each measurement: while it waited, its actors went on


def purejaxrl(task: str, updates: int, folder: pathlib.Path) -> Callable[[], object]:
    """Returns a run of PureJaxRL's `ppo.py`, compiled."""
    sys.path.insert(0, str(folder / "purejaxrl" / "purejaxrl"))
    import jax
    from ppo import make_train  # pyrefly: ignore[missing-import]

    name, num_envs, minibatches, activation = PPO[task]
    config = {
        **{"ENV_NAME": name, "NUM_ENVS": num_envs, "NUM_STEPS": 128, "UPDATE_EPOCHS": 4},
        **{"NUM_MINIBATCHES": minibatches, "ACTIVATION": activation, "LR": 2.5e-4, "GAMMA": 0.99},
        **{"GAE_LAMBDA": 0.95, "CLIP_EPS": 0.2, "ENT_COEF": 0.01, "VF_COEF": 0.5},
        **{"MAX_GRAD_NORM": 0.5, "ANNEAL_LR": True, "TOTAL_TIMESTEPS": updates * num_envs * 128},
    }
    train = jax.jit(make_train(config)).lower(jax.random.key(0)).compile()
    return lambda: jax.block_until_ready(train(jax.random.key(0)))


def rejax(task: str, updates: int, folder: pathlib.Path) -> Callable[[], object]:
    """Returns a run of rejax's PPO, compiled, without evaluations."""
    del folder
    import jax
    import rejax as peer  # pyrefly: ignore[missing-import]

    name, num_envs, minibatches, activation = PPO[task]
    steps = updates * num_envs * 128
    agent = peer.PPO.create(
        **{"env": name, "num_envs": num_envs, "num_steps": 128, "num_epochs": 4},
        **{"num_minibatches": minibatches, "total_timesteps": steps, "eval_freq": steps},
        skip_initial_evaluation=True,
        agent_kwargs={"hidden_layer_sizes": (64, 64), "activation": activation},
    ).replace(eval_callback=lambda *_: ())
    train = jax.jit(agent.train).lower(jax.random.key(0)).compile()
    return lambda: jax.block_until_ready(train(jax.random.key(0)))


def pgx(task: str, updates: int, folder: pathlib.Path) -> Callable[[], object]:
    """Returns iterations of Pgx's example of AlphaZero, with two dense layers as the network."""
    del task
    import haiku as hk  # pyrefly: ignore[missing-import]
    import jax
    import pgx as games

    class Dense(hk.Module):
        def __init__(self, num_actions, **options):
            super().__init__()
            self.num_actions = num_actions

        def __call__(self, x, **options):
            x = hk.Flatten()(x.astype("float32"))
            for _ in range(2):
                x = jax.nn.relu(hk.LayerNorm(-1, True, True)(hk.Linear(256)(x)))
            value = jax.numpy.tanh(hk.Linear(1)(x))
            return hk.Linear(self.num_actions)(x), value[:, 0]

    class Options:
        def __init__(self, **options):
            vars(self).update(options)

        def model_dump(self):
            return vars(self)

    # Loggers, readers of options, and a baseline that would be downloaded.
    modules: dict[str, Any] = {
        "wandb": types.SimpleNamespace(init=lambda **_: None),
        "omegaconf": types.SimpleNamespace(OmegaConf=types.SimpleNamespace(from_cli=lambda: PGX)),
        "pydantic": types.SimpleNamespace(BaseModel=Options),
        "network": types.SimpleNamespace(AZNet=Dense),
    }
    sys.modules.update(modules)
    vars(games)["make_baseline_model"] = lambda name: None
    # Newer versions of JAX have removed it.
    vars(jax)["device_put_replicated"] = lambda tree, _: jax.tree.map(lambda x: x[None], tree)
    file = folder / "pgx" / "examples" / "alphazero" / "train.py"
    definitions, main = file.read_text().split('if __name__ == "__main__":\n')
    here: dict = {"__name__": "example", "frames": 0}
    exec(compile(definitions, str(file), "exec"), here)
    start, _, loop = main.partition("        # Selfplay\n")
    exec(textwrap.dedent(start.partition("    # Prepare checkpoint dir")[0]), here)
    here["rng_key"] = jax.random.PRNGKey(0)
    iteration = compile(textwrap.dedent(loop.partition("        et =")[0]), str(file), "exec")

    def train():
        for _ in range(updates):
            exec(iteration, here)

    return train


def cleanba(task: str, updates: int, folder: pathlib.Path) -> None:
    """Runs Cleanba's IMPALA on Pong, with two changes that suit a CPU.

    Minibatches are a Python loop: in a scan, XLA's convolutions are 15 times slower on CPUs. The
    network is that of Mnih et al. 2015 in place of the residual one, as in the experiment of this
    project. Its update is counted, and waits between measurements.
    """
    del task
    file = folder / "cleanba" / "cleanba" / "cleanba_impala.py"
    definitions, main = file.read_text().split('if __name__ == "__main__":\n')
    here: dict = {"__name__": "cleanba", "__file__": str(file)}
    exec(compile(definitions, str(file), "exec"), here)
    # Cleanba sets the flags at import, to one thread of each operation.
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    class Nature(nn.Module):
        channels: object
        hiddens: object

        @nn.compact
        def __call__(self, x):
            x = jnp.transpose(x, (0, 2, 3, 1)) / 255.0
            for features, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
                layer = nn.Conv(features, (size, size), (stride, stride), padding="VALID")
                x = nn.relu(layer(x))
            return nn.relu(nn.Dense(512)(x.reshape(x.shape[0], -1)))

    def loop(function, carry, inputs):
        outputs = []
        for i in range(len(jax.tree_util.tree_leaves(inputs)[0])):
            carry, output = function(carry, jax.tree_util.tree_map(lambda x, i=i: x[i], inputs))
            outputs.append(output)
        return carry, jax.tree_util.tree_map(lambda *xs: jnp.stack(xs), *outputs)

    def scan(function, carry, inputs=None, *arguments, original=jax.lax.scan, **options):
        if function.__name__ == "update_minibatch":
            return loop(function, carry, inputs)
        return original(function, carry, inputs, *arguments, **options)

    def pmap(function, *arguments, original=jax.pmap, **options):
        update, calls, start = original(function, *arguments, **options), 0, 0.0

        def counted(*arguments):
            nonlocal calls, start
            if calls == 0 and not sys.stdin.readline():
                os._exit(0)  # the actor's thread would go on
            result = update(*arguments)
            calls += 1
            if calls == LEAD_IN:
                jax.block_until_ready(result)
                start = time.perf_counter()
            elif calls == LEAD_IN + updates:
                jax.block_until_ready(result)
                answer(time.perf_counter() - start)
                calls = 0
            return result

        return counted

    here["Network"], jax.lax.scan, jax.pmap = Nature, scan, pmap
    sys.argv = [str(file), "--env-id", "Pong-v5", "--local-num-envs", "32", "--num-steps", "20"]
    sys.argv += ["--num-actor-threads", "1", "--actor-device-ids", "0", "--learner-device-ids", "1"]
    sys.argv += ["--num-minibatches", "4", "--log-frequency", "1000000"]
    here["__name__"] = "__main__"
    exec(compile("if True:\n" + main, str(file), "exec"), here)


def answer(seconds: float) -> None:
    """Prints the rate of a measurement on the original standard output."""
    os.write(_OUT, f"{int(_UPDATES) * int(_STEPS) / seconds}\n".encode())


if __name__ == "__main__":
    _OUT = os.dup(1)
    os.dup2(2, 1)  # other output is no answer
    _PEER, _TASK, _UPDATES, _STEPS, _FOLDER = sys.argv[1:]
    make = {"purejaxrl": purejaxrl, "rejax": rejax, "pgx": pgx, "cleanba": cleanba}[_PEER]
    train = make(_TASK, int(_UPDATES), pathlib.Path(_FOLDER))
    while train and sys.stdin.readline():
        start = time.perf_counter()
        train()
        answer(time.perf_counter() - start)
