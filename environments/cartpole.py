"""CartPole: balance a pole on a cart by pushing the cart left or right."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from environments import rendering
from podracers import environment, errors, types

TIME_STEP = 0.02  # s
POSITION_LIMIT = 2.4  # m
ANGLE_LIMIT = math.radians(12.0)
START_RANGE = 0.05  # each of the four numbers starts within +- this


class State(NamedTuple):
    """The cart, the pole, and the time."""

    position: jax.Array  # float32, m
    velocity: jax.Array  # float32, m / s
    angle: jax.Array  # float32, rad from upright, clockwise
    angular_velocity: jax.Array  # float32, rad / s
    time: jax.Array  # int32, steps since the reset


@dataclasses.dataclass(frozen=True, eq=False)
class CartPole:
    """The dynamics and limits of Gymnasium's `CartPole-v1`, in float32.

    The observation is `[4]`: position, velocity, angle and angular velocity. Action 1 pushes the
    cart to the right, 0 to the left. Every step pays 1. The episode terminates when the cart leaves
    the track or the pole leans by more than 12 degrees, and is truncated at the step limit.

    Source: Barto, Sutton and Anderson, "Neuronlike adaptive elements that can solve difficult
    learning control problems" (1983); https://gymnasium.farama.org/environments/classic_control/.

    Attributes:
      max_episode_steps: time limit, in steps; reaching it is a truncation.
      velocities: whether they are observed. Without them the observation is `[2]`, position and
        angle, and balancing takes memory.
      gravity: m / s^2.
      cart_mass: kg.
      pole_mass: kg.
      half_length: half of the pole, in m.
      force: of a push, in N.
    """

    max_episode_steps: int = 500
    velocities: bool = True
    gravity: float = 9.8
    cart_mass: float = 1.0
    pole_mass: float = 0.1
    half_length: float = 0.5
    force: float = 10.0

    def __post_init__(self):
        errors.require_count(self, "max_episode_steps")

    @property
    def spec(self) -> environment.EnvironmentSpec:
        return environment.EnvironmentSpec(
            name="CartPole",
            observation=specs.Array((4 if self.velocities else 2,), np.float32),
            action=specs.DiscreteArray(2),
            max_episode_steps=self.max_episode_steps,
        )

    def reset(self, key: jax.Array) -> tuple[State, types.TimeStep]:
        """Starts near the upright position at rest, in the middle."""
        # Two words of the generator give four 16-bit numbers: random bits cost most of a reset.
        words = jax.random.bits(key, (2,), jnp.uint32)
        numbers = jnp.concatenate([words >> 16, words & 0xFFFF]).astype(jnp.float32)
        start = numbers * (2 * START_RANGE / 0xFFFF) - START_RANGE
        state = State(start[0], start[1], start[2], start[3], time=jnp.zeros((), jnp.int32))
        return state, types.restart(self._observe(state))

    def step(self, state: State, action: jax.Array) -> tuple[State, types.TimeStep]:
        """Pushes the cart for one time step (explicit Euler)."""
        pole_mass, half_length = self.pole_mass, self.half_length
        total_mass = self.cart_mass + pole_mass
        force = jnp.where(action == 1, self.force, -self.force)
        sine, cosine = jnp.sin(state.angle), jnp.cos(state.angle)
        spin = state.angular_velocity
        pole_moment = pole_mass * half_length
        push = (force + pole_moment * spin * spin * sine) * (1.0 / total_mass)
        inertia = half_length * (4.0 / 3.0 - (pole_mass / total_mass) * cosine * cosine)
        angular_acceleration = (self.gravity * sine - cosine * push) / inertia
        acceleration = push - (pole_moment / total_mass) * angular_acceleration * cosine
        state = State(
            position=state.position + TIME_STEP * state.velocity,
            velocity=state.velocity + TIME_STEP * acceleration,
            angle=state.angle + TIME_STEP * spin,
            angular_velocity=spin + TIME_STEP * angular_acceleration,
            time=state.time + 1,
        )
        fallen = (jnp.abs(state.position) > POSITION_LIMIT) | (jnp.abs(state.angle) > ANGLE_LIMIT)
        truncated = state.time >= self.max_episode_steps
        observation = self._observe(state)
        return state, types.transition(observation, 1.0, terminated=fallen, truncated=truncated)

    def _observe(self, state: State) -> jax.Array:
        """Returns the observation of a state, `[4]` or `[2]`."""
        numbers = state[:4] if self.velocities else (state.position, state.angle)
        return jnp.stack(numbers)

    def render(self, state: State) -> np.ndarray:
        """Draws cart, pole and track, uint8 `[height, width, 3]`."""
        height, width, scale = 240, 400, 72.0  # pixels, pixels, pixels per metre
        image = rendering.Canvas(height, width)
        ground = 190.0
        x = width / 2 + scale * float(state.position)
        angle = float(state.angle)
        joint, pole = (x, ground - 14), 2 * scale * self.half_length
        tip = (joint[0] + pole * math.sin(angle), joint[1] - pole * math.cos(angle))
        image.capsule((0, ground + 10), (width, ground + 10), 1.5, rendering.INK)
        image.box((x, ground - 6), (64, 26), rendering.BLUE, corner=6)
        for wheel in (x - 20, x + 20):
            image.disc((wheel, ground + 5), 5.5, rendering.INK)
        image.capsule(joint, tip, 5.0, rendering.ORANGE)
        image.disc(joint, 3.0, rendering.INK)
        return image.finish()
