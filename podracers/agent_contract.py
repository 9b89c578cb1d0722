"""The contract of agents on several devices, checked for their authors."""

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracers import agent as agent_lib
from podracers import anakin, contract, environment, errors, leaks, parallel, trees, types

_MAX_UPDATES = 100
_ROUNDING = 1e-6  # relative
_TOLERANCE = 1e-3  # relative change; rounding has led to 2e-6 with the agents of this repository


@dataclasses.dataclass(frozen=True, eq=False)
class _RandomEnds:
    """An environment whose episodes are also truncated at random.

    Devices then learn from different numbers of transitions, so that the mean of their means is not
    the global mean, even where all episodes of the environment have one length.
    """

    environment: environment.Environment

    @property
    def spec(self) -> environment.EnvironmentSpec:
        return self.environment.spec

    def reset(self, key: jax.Array) -> tuple[Any, types.TimeStep]:
        reset_key, key = jax.random.split(key)
        state, timestep = self.environment.reset(reset_key)
        return (state, key), timestep

    def step(self, state: Any, action: jax.Array) -> tuple[Any, types.TimeStep]:
        inner, key = state
        key, cut_key = jax.random.split(key)
        inner, timestep = self.environment.step(inner, action)
        cut = jax.random.bernoulli(cut_key, 0.2)
        step_type = jnp.where(cut, types.LAST, timestep.step_type).astype(jnp.int8)
        return (inner, key), timestep._replace(step_type=step_type)


def check_agent(
    candidate: Any,
    task: environment.Environment,
    num_envs: int = 8,
    rollout_length: int = 16,
    stage: contract.Stage = contextlib.nullcontext,
) -> None:
    """Raises an error if an agent does not learn the same on two devices as on one.

    Takes updates under Anakin, on one device and on two, up to the first that changes the learner's
    parameters. The copies of the learner on two devices must be equal bit for bit, and equal to the
    learner of one device up to rounding: a gradient or a mean covers the GLOBAL batch. An agent
    whose random draws depend on the device fails, too.

    Args:
      candidate: an agent, or its class, which is called with `spec=`.
      task: a JAX environment.
      num_envs: number of environments, divisible by two.
      rollout_length: agent steps of each stream between updates.
      stage: called with the name of each stage, for the context in which it runs.

    Raises:
      errors.UserError: one line with the fault, also of the environment; or there is only one
        device.
    """
    environment.refuse(task, contract.environment_faults(task, num_steps=0, stage=stage))
    agent = candidate(spec=task.spec) if isinstance(candidate, type) else candidate
    name = f"agent {errors.path_of(agent)}"
    if missing := contract.missing_members(agent, agent_lib.Agent):
        raise errors.UserError(f"{name} has no {', '.join(missing)}")
    devices = next((group for group in (jax.devices(), jax.devices("cpu")) if len(group) > 1), None)
    if devices is None:
        raise errors.UserError(
            f"{name}: the check needs two devices; for fake ones set "
            "XLA_FLAGS=--xla_force_host_platform_device_count=2"
        )
    with stage("updates on one device and on two"), parallel.compiling_for(devices[:2]):
        sizes = num_envs, rollout_length
        runners = [
            anakin.Anakin(agent, _RandomEnds(task), *sizes, num_devices=count) for count in (1, 2)
        ]
        with leaks.refused(agent):  # compilation takes minutes; the runner reuses the trace
            runners[0].trace(0)
        states = [runner.init(0) for runner in runners]
        before = one = _floats(states[0].learner)
        size = sum(leaf.size for leaf in before.values())
        for _ in range(_MAX_UPDATES):
            states = [runner.step(state, 1)[0] for runner, state in zip(runners, states)]
            if fault := parallel.unequal_replicas(states[1]):
                raise errors.UserError(f"{name}: {fault}")
            one, two = (_floats(state.learner) for state in states)
            # Statistics of observations change before replay suffices for a gradient step.
            if sum(np.sum(one[path] != before[path]) for path in before) >= size / 5:
                break
        else:
            steps = _MAX_UPDATES * runners[0].steps_per_update
            raise errors.UserError(
                f"{name}: no gradient step within {steps} agent steps: start learning earlier"
            )
    for path, leaf in before.items():
        change = np.linalg.norm(one[path] - leaf) + _ROUNDING * np.linalg.norm(leaf)
        difference = np.linalg.norm(two[path] - one[path])
        if not difference <= _TOLERANCE * change:  # also NaN
            raise errors.UserError(
                f"{name}: an update on two devices changes '{path}' by other amounts than one on "
                f"one device (by {difference / change:.1%}): a mean, a maximum or a random draw is "
                "of one device's streams; see parallel.global_mean"
            )


def _floats(learner: types.PyTree) -> dict[str, np.ndarray]:
    """Returns the floating leaves by path, on the host."""
    return {
        name: np.asarray(leaf, np.float64)
        for name, leaf in trees.leaves(jax.device_get(learner)).items()
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    }
