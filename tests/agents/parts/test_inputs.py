"""What networks see beside the observation: every kind of action, and nothing at a start."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from agents.networks import heads
from agents.parts import inputs
from podracers import types
from tests import streams

# Previous actions of three time steps of one stream, and the features of them.
ACTIONS = {
    "discrete": ([[2], [1], [2]], [[0, 0, 1], [0, 1, 0], [0, 0, 1]]),
    "multi_discrete": (
        [[[1, 2]], [[0, 1]], [[1, 0]]],
        [[0, 1, 0, 0, 1], [1, 0, 0, 1, 0], [0, 1, 1, 0, 0]],
    ),
    "continuous": ([[[0.5, -1.0]], [[0.1, 0.2]], [[-0.3, 0.4]]], None),
}


class _Agent(inputs.NetworkAgent):
    previous_action_and_reward = True


@pytest.mark.parametrize("actions", ACTIONS)
def test_the_previous_action_and_reward_are_zero_at_the_start_of_an_episode(actions):
    """Actions of a rollout are seen one step later."""
    spec = streams.RandomEpisodes(actions=actions).spec
    action, features = ACTIONS[actions]
    dtype = np.float32 if actions == "continuous" else np.int32
    action = np.asarray(action, dtype)  # [T, B, ...]
    features = np.asarray(features if features else action[:, 0], np.float32)
    step_type = np.array([[types.FIRST], [types.MID], [types.LAST]], np.int8)
    reward = np.float32([[7.0], [2.0], [3.0]])  # the reward at FIRST is ignored
    ones = np.ones((3, 1, 3), np.float32)
    timestep = types.TimeStep(ones, reward, ones[..., 0], step_type)
    rollout = types.Rollout(timestep, action[1:], (), inputs.ActorState((), action[0]))
    seen = streams.evaluate(_Agent(spec)._rollout_inputs, rollout)
    np.testing.assert_array_equal(seen.reward, reward)
    expected = np.array([[0], [1], [1]]) * features
    np.testing.assert_array_equal(seen.observation["previous_action"][:, 0], expected)
    np.testing.assert_array_equal(seen.observation["previous_reward"], [[0.0], [2.0], [3.0]])
    np.testing.assert_array_equal(seen.observation["observation"], 1.0)


@pytest.mark.parametrize(
    ("actions", "masked"), [("discrete", True), ("multi_discrete", True), ("continuous", False)]
)
def test_the_spec_fits_the_inputs_and_masks_stay_outermost(actions, masked):
    environment = streams.RandomEpisodes(actions=actions, masked=masked)
    spec = _Agent(environment.spec)._network_spec
    zero = inputs.zero_action(environment.spec.action, 5)
    head = heads.from_spec(environment.spec.action)
    outputs = np.zeros((5, head.num_outputs), np.float32)
    chosen = jax.eval_shape(lambda: head.to_action(head.mode(outputs, None)))
    assert (zero.shape, zero.dtype) == (chosen.shape, chosen.dtype)
    _, timestep = jax.vmap(environment.reset)(jax.random.split(jax.random.key(0), 5))
    seen = inputs.extended(timestep, zero, environment.spec.action).observation
    jax.tree.map(lambda leaf, x: leaf.validate(np.asarray(x[0])), spec.observation, seen)
    if masked:
        assert seen["action_mask"] is timestep.observation["action_mask"]
        assert list(seen["observation"]) == ["features"]


def test_the_previous_continuous_action_is_in_units_of_the_bounds():
    spec = specs.BoundedArray((2,), np.float32, [10.0, -4.0], [20.0, 4.0])
    timestep = streams.RandomEpisodes(actions="continuous").reset(jax.random.key(0))[1]
    timestep = jax.tree.map(lambda x: x[None], timestep._replace(step_type=jnp.int8(types.MID)))
    seen = inputs.extended(timestep, jnp.array([[10.0, 2.0]]), spec)
    np.testing.assert_allclose(seen.observation["previous_action"], [[-1.0, 0.5]], rtol=1e-6)
