"""Adaptor of MuJoCo Playground, an optional package: the dm_control suite in MJX.

Zakka et al., "MuJoCo Playground", https://arxiv.org/abs/2502.08844. The package is imported lazily,
also because its import is slow.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from environments import adaptors, brax
from podracers import errors

# Of the configuration: options of the package's training, of GPUs, and those of `Playground`.
_OTHERS = ("action_repeat", "episode_length", "impl", "vision", "vision_config")


@dataclasses.dataclass(frozen=True, eq=False)
class Playground(brax.Brax):
    """An environment of the dm_control suite of MuJoCo Playground under the contract.

    Its states have the fields of brax's, and its episodes end by the same rules (`brax.Brax`). The
    physics is MJX in JAX (`impl = 'jax'`). Locomotion and manipulation, whose models the package
    downloads, are refused: EnvPool has them (`environments.envpool`).

    Attributes:
      name: registered name, such as `CartpoleSwingup`.
      options: overrides of the environment's configuration, such as `ctrl_dt` in seconds.
      episode_length: time limit, in agent steps.
      metrics: as in `brax.Brax`, such as `{'reward/upright': 'mean'}`.
      action_repeat: number of steps of the environment in an agent step; rewards are summed.
    """

    action_repeat: int = 1

    _MODEL = "_mjx_model"

    def __post_init__(self):
        super().__post_init__()
        errors.require_count(self, "action_repeat")

    def _advance(self, inner: Any, action: jax.Array) -> Any:
        def once(inner: Any, _: None) -> tuple[Any, jax.Array]:
            inner = self._built.step(inner, action)
            return inner, inner.reward

        inner, rewards = jax.lax.scan(once, inner, None, self.action_repeat)
        return inner.replace(reward=jnp.sum(rewards))

    @property
    def render(self) -> Callable[[adaptors.CountedState], np.ndarray]:
        """Draws a state, uint8 `[240, 320, 3]`; absent unless the variable `MUJOCO_GL` is set.

        MuJoCo draws by OpenGL, and fails where the variable does not name a platform that works:
        `egl` needs no display.
        """
        if "MUJOCO_GL" not in os.environ:
            raise AttributeError("the variable MUJOCO_GL is not set")
        return lambda state: self._built.render(state.inner)

    @property
    def parameters(self) -> dict[str, jax.Array]:
        """Float arrays of MuJoCo's model by path: `body_mass`, `dof_damping`, `opt.gravity`, ...

        Constants that MuJoCo derives from them when it loads the model keep their nominal values.
        """
        return adaptors.parameters_of(self._built.mjx_model)

    def _make(self) -> Any:
        user = f"environment '{self.name}'"
        package = adaptors.optional_import("mujoco_playground", user, "playground")
        suite, name = package.dm_control_suite, f"MuJoCo Playground's {self.name}"
        others = (*package.locomotion.ALL_ENVS, *package.manipulation.ALL_ENVS)
        errors.require_known(
            "MuJoCo Playground has no environment", self.name, (*suite.ALL_ENVS, *others)
        )
        if self.name in others:
            raise errors.UserError(
                f"{name} would download its models: use environments.envpool with "
                f"envpool.EnvPool.task_id = '{self.name}-v1'"
            )
        config = suite.get_default_config(self.name)
        known = set(config) - set(_OTHERS)
        with adaptors.options_of(name, self.options, known):
            inner = suite.load(self.name, config, {**self.options, "impl": "jax"})
            if inner.n_substeps < 1:
                raise ValueError("expected 0 < sim_dt <= ctrl_dt")
        return inner
