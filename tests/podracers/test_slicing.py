"""Programs in slices do what the whole does, in pieces no longer than asked for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracers import parallel, sebulba, slicing
from tests import contract, streams

SPEC = jax.sharding.PartitionSpec
DEVICES = 2


def _learn(state, data):
    """Loops within a loop, one that goes backwards, and one of as many passes as a value says."""
    params, memory, count = state["params"], state["memory"], state["count"]
    before = jnp.cumsum(data, axis=0)  # outside of all loops
    _, untouched = jax.lax.scan(lambda c, x: (c + x, c), 0.0, before[:, 0])  # sums nothing: whole

    def inner(params, x):
        params = 0.9 * params + parallel.global_sum(jnp.sum(x) * before[0, 0])
        return params, {"sum": jnp.sum(params), "item": x}

    def outer(carry, key):
        params, total, _ = carry
        items = data * jax.random.uniform(key)
        params, metrics = jax.lax.scan(inner, params, items, reverse=True)
        return (params, total + 1, memory), metrics  # one is none of its own

    keys = jax.random.split(jax.random.key(3), 3)
    first = params, 0, jnp.zeros_like(memory)
    (params, total, same), metrics = jax.lax.scan(outer, first, keys)
    total += jnp.sum(state["params"])  # which the loop began with

    def step(index, memory):
        return memory + parallel.global_sum(index * jnp.mean(memory))

    memory = jax.lax.fori_loop(0, count, step, memory + same)
    state = {"params": params, "memory": memory, "count": count, "key": state["key"]}
    return state, (metrics["sum"], jnp.sum(metrics["item"]) + untouched[-1], total, jnp.float32(7))


def _arguments(mesh):
    layout = {"params": SPEC(), "memory": SPEC(parallel.AXIS), "count": SPEC(), "key": SPEC()}
    specs = (layout, SPEC(None, parallel.AXIS)), (layout, SPEC())
    state = {
        "params": jnp.arange(3.0),
        "memory": jnp.arange(4.0),
        "count": jnp.int32(5),
        "key": jax.random.key(1),
    }
    # The data is the same on each device, for what is returned is to be replicated.
    data = jnp.tile(jnp.arange(5.0)[:, None], (1, DEVICES))
    placed = [
        jax.tree.map(
            lambda spec, part: jax.device_put(part, jax.sharding.NamedSharding(mesh, spec)),
            spec,
            part,
        )
        for spec, part in zip(specs[0], (state, data))
    ]
    return specs, placed


@pytest.mark.parametrize("seconds", [1e-9, 100.0])
def test_slices_do_what_the_whole_does(seconds):
    mesh = parallel.make_mesh(jax.devices()[:DEVICES])
    (in_specs, out_specs), (state, data) = _arguments(mesh)
    mapped = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    whole = jax.jit(mapped(_learn, in_specs=in_specs, out_specs=out_specs))
    expected = streams.to_numpy(whole(state, data))
    expected = streams.to_numpy((expected, whole(expected[0], data)))
    sliced = slicing.Sliced(_learn, mesh, in_specs, out_specs, seconds)
    programs, run = [], sliced.run
    sliced.run = lambda program, *args: programs.append(program) or run(program, *args)
    first = sliced(state, data)
    kept = streams.to_numpy(first)
    second = sliced(first[0], data)
    jax.tree.map(np.testing.assert_allclose, (kept, streams.to_numpy(second)), expected)
    assert sliced.num_loops == 3
    slices = max(map(programs.count, programs))
    # Three times five passes an update; once one is measured, all of a loop go together.
    assert slices == 2 * 3 * 5 if seconds < 1.0 else slices <= 2 * 3 * 2
    for leaf, spec in ((second[0]["params"], SPEC()), (second[0]["memory"], SPEC(parallel.AXIS))):
        assert leaf.sharding == jax.sharding.NamedSharding(mesh, spec)


@pytest.mark.slow
@pytest.mark.parametrize("name", contract.AGENTS)
def test_every_agent_learns_the_same_in_slices(name):
    agent, environment = contract.AGENTS[name]()
    sizes = contract.NUM_ENVS, contract.ROLLOUT_LENGTH
    places = {"actor_devices": (0,), "learner_devices": (0, 1)}
    found = []
    for block in (None, 1e-6):
        runner = sebulba.Sebulba(agent, environment, *sizes, **places, lag=0, max_block_ms=block)
        state = runner.init(0)
        for _ in range(contract.NUM_UPDATES):
            state, report = runner.step(state, 1)
        runner.close()
        found.append(streams.to_numpy((state, report)))
    assert runner._learner.learn.num_loops > 0
    expected, actual = found
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5)
    jax.tree.map(close, actual, expected)
