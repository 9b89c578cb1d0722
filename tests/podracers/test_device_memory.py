"""Tests of the memory that a runner uses on each device."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from podracers import device_memory, errors, parallel


class _State(NamedTuple):
    learner: Any = ()
    memory: Any = ()


class _Chip(NamedTuple):
    """A device with memory of its own."""

    limit: int | None
    platform: str = "tpu"
    process_index: int = 0
    device_kind: str = "TPU v5 lite"

    def memory_stats(self):
        return None if self.limit is None else {"bytes_limit": self.limit}


def _runner(state, observation=(), num_envs=1, update=None):
    """Returns a runner of one step; of the state only shapes are used."""
    return SimpleNamespace(
        init=lambda _: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state),
        trace=lambda _: update,
        environment=SimpleNamespace(spec=SimpleNamespace(observation=observation, num_agents=1)),
        population=1,
        num_envs=num_envs,
        rollout_length=0,
    )


def test_usage_names_sizes_and_devices(monkeypatch):
    matrix = jax.ShapeDtypeStruct((1000, 1000), np.float32)
    # An update of 4 MB in place, with at least 4 MB of temporary memory.
    update = jax.jit(lambda x: jnp.sin(x @ x) @ x, donate_argnums=0).trace(matrix)
    temporary = update.lower().compile().memory_analysis().temp_size_in_bytes
    assert temporary > 3_900_000

    def usage(state, *devices):
        return device_memory.usage(_runner(state, update=update), devices)

    replay = _State(memory=matrix)
    (line,) = usage(replay, *jax.devices()[:2])
    assert "2 MB on each of 2 cpu devices, of " in line
    assert usage(_State(), jax.devices()[0]) == []
    first, second = usage(replay, _Chip(13_000_000))
    assert "4 MB on each of 1 TPU v5 lite device, of 13 MB" in first
    assert f"{parallel.readable_bytes(4_000_000 + temporary)} on each of 1 TPU" in second
    assert "of 13 MB" not in usage(replay, _Chip(None))[1]
    with pytest.raises(errors.UserError, match=r"an update: .*: lower replay_cap"):
        usage(replay, _Chip(5_000_000))
    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", lambda _: None)
    assert len(usage(replay, _Chip(None))) == 1


def test_a_state_that_does_not_fit_is_refused():
    """The learner is on each device, and the rest is split."""
    learner = jax.ShapeDtypeStruct((10**15,), np.uint8)
    observation = specs.Array((10, 5), np.float32)  # 200 bytes
    for state, num_envs, size in (
        (_State(learner), 10**13, "2e\\+03 TB"),
        (_State((), {"ring": learner}), 0, "500 TB"),
    ):
        with pytest.raises(errors.UserError, match=f": {size} on each of 2 cpu devices"):
            device_memory.usage(_runner(state, observation, num_envs), jax.devices()[:2])
