"""Randomised dynamics: each episode is played with other parameters of the simulator.

A policy that copes with all of them may cope with a robot, whose parameters are not known: Tobin et
al., "Domain Randomization for Transferring Deep Neural Networks from Simulation to the Real World",
2017, https://arxiv.org/abs/1703.06907; Peng et al., "Sim-to-Real Transfer of Robotic Control with
Dynamics Randomization", 2018, https://arxiv.org/abs/1710.06537.

Axis legend: `K` randomised parameters.
"""

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from environments import wrappers
from podracers import environment, errors, types

FACTORS = "factors"  # the observation's part if `Randomized.observe`
_FLOAT32_MAX = float(np.finfo(np.float32).max)


class State(NamedTuple):
    """State of one stream."""

    inner: Any  # state of the inner environment
    factors: dict[str, jax.Array]  # [] float32 of each parameter, constant in an episode


@dataclasses.dataclass(frozen=True, eq=False)
class Randomized(wrappers.Wrapper):
    """Multiplies parameters of an environment by factors that are drawn for each episode.

    A factor is uniform between its bounds, independent of the others, and multiplies the nominal
    value; all elements of an array have the same factor. Parameters are the float options of an
    environment that is a dataclass, whose `__post_init__` must accept traced values, or the entries
    of its member `parameters` (see `environment.Environment`). Evaluations play the nominal
    environment. Other wrappers, such as a time limit, go around `Randomized`.

    Attributes:
      environment: inner environment.
      ranges: lowest and highest factor of each parameter, such as `{"gravity": (0.8, 1.2)}`. Equal
        bounds are a constant.
      observe: whether the factors are observed, as the part `factors` `[K]` of a dict, in the order
        of `ranges`; an observation that is one array becomes the part `observation`. A critic may
        read factors that the policy of a robot cannot measure.
    """

    ranges: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    observe: bool = False
    has_state = True

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.inner, wrappers.Wrapper):
            raise errors.UserError(
                "Randomized.environment: expected an environment without wrappers, which go around "
                f"Randomized, got {errors.path_of(self.inner)}"
            )
        name, known = environment.name_of(self.inner), _parameters(self.inner)
        if not known:
            raise errors.UserError(f"Randomized.environment: {name} has no parameters to randomise")
        if not self.ranges:
            raise errors.UserError("Randomized.ranges: expected one parameter or more, got none")
        for parameter, bounds in self.ranges.items():
            errors.require_known(
                f"Randomized.ranges: {name} has no float parameter", parameter, known
            )
            if not 0.0 <= bounds[0] <= bounds[1] <= _FLOAT32_MAX:
                raise errors.UserError(
                    f"Randomized.ranges['{parameter}']: expected factors (lowest, highest), finite "
                    f"and from 0, got {bounds}"
                )

    @property
    def spec(self) -> environment.EnvironmentSpec:
        """The inner spec, with the factors if they are observed."""
        spec = self.inner.spec
        low, high = np.array([*self.ranges.values()], np.float32).T
        low, high = np.minimum(low, 1.0), np.maximum(high, 1.0)  # evaluations are nominal
        factors = specs.BoundedArray(low.shape, np.float32, low, high)
        observation = self._with_factors(spec.observation, factors)
        return dataclasses.replace(spec, observation=observation)

    @property
    def evaluation_environment(self) -> "Randomized":
        """The environment with nominal parameters, and with states of the same structure."""
        return dataclasses.replace(self, ranges=dict.fromkeys(self.ranges, (1.0, 1.0)))

    def reset(self, key: jax.Array) -> tuple[State, types.TimeStep]:
        """Draws the factors, and starts an episode with the key itself."""
        factors = {}
        for name, bounds in self.ranges.items():
            # By its name, so that other parameters and the start do not depend on this one.
            factor_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
            factors[name] = jax.random.uniform(factor_key, (), jnp.float32, *bounds)
        inner, timestep = self._with_parameters(factors).reset(key)
        state = State(inner, factors)
        return state, self._convert(state, timestep)

    def step(self, state: State, action: jax.Array) -> tuple[State, types.TimeStep]:
        inner, timestep = self._with_parameters(state.factors).step(state.inner, action)
        state = State(inner, state.factors)
        return state, self._convert(state, timestep)

    def _with_parameters(self, factors: dict[str, jax.Array]) -> environment.Environment:
        """Returns the inner environment with the parameters of an episode."""
        nominal, values = _parameters(self.inner), {}
        for name, (low, high) in self.ranges.items():
            # A constant is a Python number, so that 1 leaves every bit as it is.
            values[name] = nominal[name] * (low if low == high else factors[name])
        if hasattr(self.inner, "with_parameters"):
            return self.inner.with_parameters(values)
        inner: Any = self.inner
        return dataclasses.replace(inner, **values)

    def _convert(self, state: State, timestep: types.TimeStep) -> types.TimeStep:
        factors = jnp.stack([state.factors[name] for name in self.ranges])
        factors = jnp.broadcast_to(factors, (*self.spec.agent_axis, *factors.shape))
        return timestep._replace(observation=self._with_factors(timestep.observation, factors))

    def _with_factors(self, observation: types.PyTree, factors: Any) -> types.PyTree:
        """Returns an observation, or its spec, with the factors if they are observed."""
        if not self.observe:
            return observation
        return wrappers.with_part(observation, FACTORS, factors)


def _parameters(inner: Any) -> dict[str, Any]:
    """Returns the nominal values of the parameters of an environment, by name."""
    if hasattr(inner, "parameters"):
        return inner.parameters
    fields = dataclasses.fields(inner) if dataclasses.is_dataclass(inner) else ()
    return {
        field.name: getattr(inner, field.name) for field in fields if field.type in (float, "float")
    }
