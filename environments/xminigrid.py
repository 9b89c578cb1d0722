"""Adaptor of XLand-MiniGrid, an optional package: grid worlds of MiniGrid and XLand.

Nikulin et al., "XLand-MiniGrid: Scalable Meta-Reinforcement Learning Environments in JAX",
https://arxiv.org/abs/2312.12044. The package is imported lazily: its import initialises a backend.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from dm_env import specs

from environments import adaptors
from podracers import environment, errors, types


@dataclasses.dataclass(frozen=True, eq=False)
class XMiniGrid(adaptors.Adaptor):
    """A registered XLand-MiniGrid environment under the contract.

    Observations are the kind of tile and the colour of each cell in front of the agent, uint8
    `[V, V, 2]`, which networks read as an image of one-hot codes. Neither the direction of the
    agent nor the object that it carries is part of them. The goal terminates an episode, with
    reward `1 - 0.9 * steps / max_steps`; `max_steps` truncates it, and by default follows from the
    size of the grid. `success` is reported: whether the episode ended at the goal. The state of a
    stream is the package's time step.

    Attributes:
      name: registered id, such as `MiniGrid-DoorKey-8x8`.
      options: environment parameters (`height`, `width`, `view_size`, `max_steps`, ...) by name. An
        `XLand-MiniGrid-...` id needs a `ruleset`, which has its goal, rules and objects: the name
        of a benchmark, which is downloaded at first use, and a number, such as
        `('trivial-21k', 7)`; or an `xminigrid.types.RuleSet`.
    """

    @functools.cached_property
    def spec(self) -> environment.EnvironmentSpec:
        inner, params = self._built
        constants = adaptors.optional_import("xminigrid.core.constants", self.name)
        highest = [constants.NUM_TILES - 1, constants.NUM_COLORS - 1]
        shape = inner.observation_shape(params)
        return environment.EnvironmentSpec(
            name=self.name,
            observation=environment.MultiDiscreteArray(shape, np.uint8, 0, highest, "observation"),
            action=specs.DiscreteArray(inner.num_actions(params), name="action"),
            max_episode_steps=params.max_steps,
            metrics=("success",),
        )

    def reset(self, key: jax.Array) -> tuple[Any, types.TimeStep]:
        inner, params = self._built
        state = adaptors.strong(inner.reset(params, key))
        return state, types.restart(state.observation, {"success": 0.0})

    def step(self, state: Any, action: jax.Array) -> tuple[Any, types.TimeStep]:
        inner, params = self._built
        state = adaptors.strong(inner.step(params, state, action))
        metrics = {"success": state.reward > 0.0}
        last, terminated = state.step_type == types.LAST, state.discount == 0.0
        return state, types.transition(state.observation, state.reward, terminated, last, metrics)

    def render(self, state: Any) -> np.ndarray:
        """Returns a picture of one state, uint8 `[height, width, 3]`."""
        inner, params = self._built
        return inner.render(params, state)

    def _make(self) -> tuple[Any, Any]:
        name, options = self.name, dict(self.options)
        registration = adaptors.optional_import("xminigrid.registration", f"environment '{name}'")
        known = registration.registered_environments()
        errors.require_known("XLand-MiniGrid has no environment", name, known)
        inner, params = registration.make(name)
        # `render` returns pictures only.
        fields = {field.name for field in dataclasses.fields(params)} - {"render_mode"}
        fixed = registration._REGISTRY[name].kwargs
        if "ruleset" in fields:
            fixed = fixed | {"ruleset": _ruleset(name, options.pop("ruleset", None))}
        with adaptors.options_of(f"XLand-MiniGrid's {name}", options, fields):
            # `make` replaces the size after the limit was derived from it.
            params = inner.default_params(**(fixed | options))
            errors.require_count(params, "height", "width", "view_size", "max_steps")
            jax.eval_shape(lambda key: inner.reset(params, key), jax.random.key(0))
        return inner, params


def _ruleset(name: str, chosen: Any) -> Any:
    """Returns the option `ruleset` of an environment: a ruleset, or a benchmark and a number."""
    from xminigrid import benchmarks  # noqa: PLC0415  (creates arrays)

    known = benchmarks.registered_benchmarks()
    if isinstance(chosen, benchmarks.RuleSet):
        return chosen
    if not isinstance(chosen, tuple | list) or len(chosen) != 2:
        raise errors.UserError(
            f"{name} has no goal without rules: expected the option {{'ruleset': (BENCHMARK, "
            f"NUMBER)}} with a benchmark of {', '.join(known)}"
        )
    benchmark, number = chosen
    errors.require_known("XLand-MiniGrid has no benchmark", benchmark, known)
    with adaptors.options_of(f"XLand-MiniGrid's {name}", {"ruleset": chosen}):
        loaded = benchmarks.load_benchmark(benchmark)  # prints a line before it downloads the file
    if number not in range(loaded.num_rulesets()):
        raise errors.UserError(
            f"{benchmark} has the rulesets 0 to {loaded.num_rulesets() - 1}, got {number!r}"
        )
    return loaded.get_ruleset(number)
