"""Pendulum: swing a pendulum up, and hold it there, with a motor too weak to lift it at once."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from environments import rendering
from podracers import environment, errors, types

TIME_STEP = 0.05  # s
MAX_SPEED = 8.0  # rad / s
MAX_TORQUE = 2.0  # N m


class State(NamedTuple):
    """The pendulum, the torque that moved it last, and the time."""

    angle: jax.Array  # float32, rad from upright, counter-clockwise; not wrapped
    speed: jax.Array  # float32, rad / s
    torque: jax.Array  # float32, N m; it is drawn, nothing else
    time: jax.Array  # int32, steps since the reset


@dataclasses.dataclass(frozen=True, eq=False)
class Pendulum:
    """The dynamics and limits of Gymnasium's `Pendulum-v1`, in float32.

    The observation is `[3]`: cosine and sine of the angle, and the angular velocity. The action is
    a torque `[1]` within +-2 N m, and is clipped to that. The reward is minus the squared angle
    from upright and, with small weights, minus squared speed and torque. It never terminates.

    Source: https://gymnasium.farama.org/environments/classic_control/pendulum/.

    Attributes:
      max_episode_steps: time limit, in steps; reaching it is a truncation.
      velocities: whether the angular velocity is observed. Without it the observation is `[2]`, and
        swinging up takes memory.
      gravity: m / s^2.
      mass: kg.
      length: m.
    """

    max_episode_steps: int = 200
    velocities: bool = True
    gravity: float = 10.0
    mass: float = 1.0
    length: float = 1.0

    def __post_init__(self):
        errors.require_count(self, "max_episode_steps")

    @property
    def spec(self) -> environment.EnvironmentSpec:
        high = np.array([1.0, 1.0, MAX_SPEED] if self.velocities else [1.0, 1.0], np.float32)
        return environment.EnvironmentSpec(
            name="Pendulum",
            observation=specs.BoundedArray(high.shape, np.float32, -high, high),
            action=specs.BoundedArray((1,), np.float32, -MAX_TORQUE, MAX_TORQUE),
            max_episode_steps=self.max_episode_steps,
        )

    def reset(self, key: jax.Array) -> tuple[State, types.TimeStep]:
        """Starts at any angle, with a speed within +-1 rad / s."""
        angle, speed = jax.random.uniform(key, (2,), jnp.float32, -1.0, 1.0)
        zero = jnp.zeros((), jnp.float32)
        state = State(angle * math.pi, speed, torque=zero, time=jnp.zeros((), jnp.int32))
        return state, types.restart(self._observe(state))

    def step(self, state: State, action: jax.Array) -> tuple[State, types.TimeStep]:
        """Applies the torque for one time step (semi-implicit Euler)."""
        torque = jnp.clip(jnp.asarray(action, jnp.float32)[0], -MAX_TORQUE, MAX_TORQUE)
        from_upright = jnp.mod(state.angle + math.pi, 2 * math.pi) - math.pi
        cost = from_upright**2 + 0.1 * state.speed**2 + 0.001 * torque**2
        pull = (1.5 * self.gravity / self.length) * jnp.sin(state.angle)
        speed = state.speed + (pull + 3.0 / (self.mass * self.length**2) * torque) * TIME_STEP
        speed = jnp.clip(speed, -MAX_SPEED, MAX_SPEED)
        angle = state.angle + speed * TIME_STEP
        state = State(angle, speed, torque, state.time + 1)
        truncated = state.time >= self.max_episode_steps
        return state, types.transition(self._observe(state), -cost, truncated=truncated)

    def _observe(self, state: State) -> jax.Array:
        """Returns the observation of a state, `[3]` or `[2]`."""
        place = jnp.cos(state.angle), jnp.sin(state.angle)
        return jnp.stack((*place, state.speed) if self.velocities else place)

    def render(self, state: State) -> np.ndarray:
        """Draws the rod, and the torque as an arc, uint8 `[height, width, 3]`."""
        side, length = 240, 80.0  # pixels
        image = rendering.Canvas(side, side)
        middle = side / 2
        angle, torque = float(state.angle), float(state.torque)
        image.disc((middle, middle), length + 22, rendering.LINE)
        image.disc((middle, middle), length + 20, rendering.PAPER)
        # The angle grows counter-clockwise, and the picture's y axis points down.
        tip = (middle - length * math.sin(angle), middle - length * math.cos(angle))
        colour = rendering.GREEN if math.cos(angle) > 0.95 else rendering.ORANGE
        image.capsule((middle, middle), tip, 9.0, colour)
        sweep = np.linspace(0.0, torque / MAX_TORQUE * (math.pi / 2), 16)
        for turn in sweep if abs(torque) > 0.05 else ():
            dot = (middle - 34 * math.sin(turn), middle - 34 * math.cos(turn))
            image.disc(dot, 2.5, rendering.BLUE)
        image.disc((middle, middle), 5.0, rendering.INK)
        return image.finish()
