"""The meta-gradient, against finite differences and by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents.meta.lpg import meta_training, tabular
from podracers import types
from tests import streams
from tests.agents.meta.lpg import lifetimes

NO_COSTS = {
    "policy_entropy_cost": 0.0,
    "prediction_entropy_cost": 0.0,
    "policy_target_cost": 0.0,
    "prediction_target_cost": 0.0,
}


def _total(agent, params, batch):
    rows = jax.tree.map(lambda x: x[None], batch)
    return agent._loss(params, rows).loss.result()


def _case(**options):
    agent = lifetimes.agent(**options)
    return agent, lifetimes.rule_params(), lifetimes.batch(agent, seed=1)


def _gradient(agent, params, batch):
    """Returns the meta-gradient."""
    return streams.evaluate(jax.grad(lambda params: _total(agent, params, batch)), params)


@pytest.fixture(scope="module", name="exact")
def _exact():
    """The exact meta-gradient of agents that learn fast."""
    return _gradient(*_case(agent_learning_rates=(20.0,)))


def test_it_equals_finite_differences_of_recorded_actions(exact):
    """Each leaf is compared with a central difference along its own direction, in float32."""
    agent, params, batch = _case(agent_learning_rates=(20.0,))
    total = jax.jit(lambda params: _total(agent, params, batch))
    leaves, structure = jax.tree.flatten(params)
    for index, slope in enumerate(jax.tree.leaves(exact)):
        norm, step = np.linalg.norm(slope), 3e-3
        assert norm > 0.0
        ends = []
        for distance in (step, -step):
            moved = [*leaves]
            moved[index] = leaves[index] + distance / norm * slope
            ends.append(float(total(jax.tree.unflatten(structure, moved))))
        np.testing.assert_allclose((ends[0] - ends[1]) / (2.0 * step), norm, rtol=0.03, atol=1e-3)


def test_constant_inputs_have_another_gradient(exact):
    stopped = _gradient(*_case(exact_meta_gradient=False, agent_learning_rates=(20.0,)))
    norms = jax.tree.map(lambda x, y: np.linalg.norm(x - y) / np.linalg.norm(x), exact, stopped)
    assert 0.02 < max(jax.tree.leaves(norms)) < 10.0


def test_a_two_armed_bandit_by_hand():
    """One state, two actions, one update by a policy target that is `bias` at every transition."""
    bias = 0.3
    agent = lifetimes.agent(updates=1, chunk_length=6, agent_learning_rates=(3.0,), **NO_COSTS)
    batch = lifetimes.batch(agent, seed=2, num_states=1)
    observation = batch.chunk.timestep.observation
    mask = jnp.arange(observation["action_mask"].shape[-1]) < 2
    observation["action_mask"] = jnp.broadcast_to(mask, observation["action_mask"].shape)
    timestep = batch.chunk.timestep._replace(
        step_type=jnp.full_like(batch.chunk.timestep.step_type, types.MID)
    )
    chunk = tabular.Chunk(timestep, (batch.chunk.action > 0).astype(jnp.int32))
    newborn = jax.tree.map(jnp.zeros_like, batch.agent)
    batch = meta_training._Batch(newborn, chunk, batch.arm, batch.advantage)
    params = lifetimes.rule_params()
    zeros = {name: jax.tree.map(jnp.zeros_like, params[name]) for name in ("policy", "prediction")}
    params = params | zeros
    params["policy"]["bias"] = jnp.array([bias])
    gradient = _gradient(agent, params, batch)["policy"]["bias"]

    first = np.mean(np.asarray(chunk.action[0]) == 0)  # how often action 0 was learnt from
    slope = 3.0 * (2.0 * first - 1.0)  # of the difference of the logits by the bias
    prob = 1.0 / (1.0 + np.exp(-slope * bias))  # of action 0 after the update
    by_difference = np.where(np.asarray(chunk.action[1]) == 0, 1.0 - prob, -prob)
    expected = -slope * np.mean(by_difference * np.asarray(batch.advantage))
    assert abs(slope) > 0.1
    np.testing.assert_allclose(gradient, [expected], rtol=1e-4)


def test_an_update_is_gradient_descent_on_logits():
    agent, params, batch = _case(updates=1, chunk_length=6)
    chunk = jax.tree.map(lambda x: x[0], jax.device_get(batch.chunk))
    learn = jax.jit(functools.partial(tabular.learn, agent.rule))
    after, update = learn(params, batch.agent, chunk, 2.0, 0.5)
    policy, prediction = (np.array(x) for x in batch.agent)
    weight = np.asarray(chunk.timestep.step_type[:-1] != types.LAST)
    for t, e in np.argwhere(weight):
        row = int(chunk.timestep.observation["rows"][t, e, 0])
        pi = np.exp(np.asarray(update.outputs.log_policy[t, e]))
        y = np.exp(np.asarray(update.outputs.log_prediction[t, e]))
        log_ratio = np.log(y) - np.asarray(update.targets.log_prediction[t, e])
        one_hot = np.arange(len(pi)) == int(chunk.action[t, e])
        scale = 2.0 / weight.sum()
        policy[row] += scale * float(update.targets.policy[t, e]) * (one_hot - pi)
        prediction[row] -= scale * 0.5 * y * (log_ratio - np.sum(y * log_ratio))
    np.testing.assert_allclose(after.policy, policy, atol=1e-5)
    np.testing.assert_allclose(after.prediction, prediction, atol=1e-5)


def test_values_converge_to_those_of_a_chain():
    """Four states in a row, a reward of 1 at the end; `LAST` and `FIRST` in the same chunk."""
    step_type = np.array([0, 1, 1, 2] * 3 + [0], np.int8)[:, None]
    rows = np.array([0, 1, 2, 3] * 3 + [0])[:, None, None]
    reward = (step_type == types.LAST).astype(np.float32)
    timestep = types.TimeStep({"rows": rows}, reward, 1.0 - reward, step_type)
    timestep = jax.tree.map(jnp.asarray, timestep)
    critic, learn_values = jnp.zeros((5,)), jax.jit(tabular.learn_values)
    for _ in range(40):
        critic, advantage = learn_values(critic, timestep, 0.9, 0.5, 0.5)
    np.testing.assert_allclose(critic, [0.81, 0.9, 1.0, 0.0, 0.0], atol=1e-4)
    assert advantage.shape == (12, 1)
    learnt = step_type[:-1] != types.LAST
    np.testing.assert_allclose(np.asarray(advantage)[learnt], 0.0, atol=1e-3)
