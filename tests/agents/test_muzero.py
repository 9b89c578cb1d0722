"""MuZero: its model, its loss and its searches.

Axis legend: `N` sequences, `K` unrolled steps.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from agents import muzero, planning, replay, tree_search
from agents.networks import encoders
from agents.networks import muzero as muzero_networks
from environments import catch
from podracers import environment, types
from tests import streams

K, N_STEPS, SEQUENCES = 2, 3, 6
BEGIN = (0, 1, 3, 4, 5)  # sequences that do not begin at LAST
SPEC = catch.Catch().spec


def _make(**options):
    network = functools.partial(
        muzero_networks.model, encoder=encoders.MLP((8,)), latent_size=8, hidden_sizes=(8,)
    )
    search = functools.partial(tree_search.Search, num_simulations=8, max_depth=4)
    options = {"support": 4.0, "support_atoms": 9, "unroll_steps": K, "n_steps": N_STEPS} | options
    return muzero.MuZero(SPEC, network=network, search=search, **options)


@pytest.fixture(scope="module", name="made")
def _made():
    agent = _make(value_cost=0.5)
    length = K + N_STEPS + 1
    random = np.random.default_rng(0)
    shape = (length + 1, SEQUENCES)
    step_type = np.full(shape, types.MID, np.int8)
    step_type[2, :2], step_type[3, :2] = types.LAST, types.FIRST
    step_type[0, 2] = types.LAST
    discount = np.ones(shape, np.float32)
    discount[2, 0] = 0.0
    timestep = types.TimeStep(
        random.normal(size=(*shape, *SPEC.observation.shape)).astype(np.float32),
        random.normal(size=shape).astype(np.float32),
        discount,
        step_type,
    )
    extras = planning.Extras(
        random.dirichlet(np.ones(3), (length, SEQUENCES)).astype(np.float32),
        random.normal(size=(length, SEQUENCES)).astype(np.float32),
    )
    action = random.integers(0, 3, (length, SEQUENCES))
    rollout = jax.tree.map(jnp.asarray, types.Rollout(timestep, action, extras, ()))
    weight = jnp.linspace(0.5, 1.0, SEQUENCES)
    sample = replay.Sample(rollout, None, weight, None)
    return agent, jax.jit(agent.init_learner)(jax.random.key(0)).params, sample


def test_the_loss_and_its_gradient_are_those_of_the_paper(made):
    """The root in full, imagined steps by their mean; each step halves the gradient of latents."""
    agent, params, sample = made
    rollout, model, support = sample.rollout, agent._network, agent._support
    timestep = jax.tree.map(lambda x: x[:-1], rollout.timestep)
    goal = planning.targets(timestep, rollout.extras, agent.gamma, K, N_STEPS)
    first = jax.tree.map(lambda x: x[0], timestep)

    def slow(params):
        latent, _ = model.representation.step(params["representation"], (), first)
        total = 0.0
        for k in range(K + 1):
            scale = 1.0 / K if k else 1.0
            if k:
                latent, reward = model.imagine(params, latent, rollout.action[k - 1])
                loss = support.cross_entropy(reward, goal.reward[k - 1])
                total += scale * loss * goal.reward_weight[k - 1]
            prediction = model.predict(params, latent)
            loss = -jnp.sum(goal.policy[k] * jax.nn.log_softmax(prediction.policy), axis=-1)
            total += scale * loss * goal.policy_weight[k]
            loss = 0.5 * support.cross_entropy(prediction.value, goal.value[k])
            total += scale * loss * goal.value_weight[k]
            if k:
                latent = 0.5 * latent + jax.lax.stop_gradient(0.5 * latent)
        return jnp.sum((sample.weight * total)[np.array(BEGIN)]) / len(BEGIN)

    def loss(params):
        learnt = agent._loss(params, sample, ())
        return learnt.metrics["loss/total"].result(), learnt.priority

    (actual, priority), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    expected, slow_gradient = jax.jit(jax.value_and_grad(slow))(params)
    np.testing.assert_allclose(actual, expected, rtol=1e-4)
    streams.assert_close(gradient, slow_gradient, rtol=1e-3, atol=1e-5)
    assert priority[2] == -1.0 and np.all(priority[np.array(BEGIN)] > 0.0)


def test_fresh_values_are_those_of_the_target_network(made):
    agent, params, sample = made
    fresh = _make(value_cost=0.5, fresh_values=True)
    target = jax.jit(agent.init_learner)(jax.random.key(1)).params
    # The target network's value of every time step, one at a time.
    model = agent._network

    def value(timestep):
        latent, _ = model.representation.step(target["representation"], (), timestep)
        return agent._support.decode(model.predict(target, latent).value)

    seen = jax.tree.map(lambda x: x[:-1], sample.rollout.timestep)
    extras = sample.rollout.extras._replace(value=jax.lax.map(value, seen))
    known = sample._replace(rollout=sample.rollout._replace(extras=extras))
    loss = jax.jit(agent._loss)
    expected = loss(params, known, ()).metrics
    actual = jax.jit(fresh._loss)(params, sample, target).metrics
    for name, mean in expected.items():
        np.testing.assert_allclose(actual[name].total, mean.total, rtol=1e-4, err_msg=name)
    stale = loss(params, sample, ()).priority
    assert np.max(np.abs(stale - loss(params, known, ()).priority)) > 0.1
    assert agent._target_params(params) == ()
    assert fresh._target_params(params) is params


def test_searches_are_repeated_with_the_latest_parameters(made):
    """One time step and sequence at a time, without noise; where none is due, nothing changes."""
    agent, params, sample = made
    keys = jax.random.split(jax.random.key(2), SEQUENCES)
    sample = sample._replace(key=keys)
    reanalyzed = jax.jit(agent._reanalyzed)
    stream = jax.tree.map(lambda x: x[:, 4:5], sample.rollout.timestep)
    search = jax.jit(agent.act, static_argnames="evaluation")
    found = reanalyzed(params, sample, True).rollout.extras
    for time in (0, K + N_STEPS):
        timestep = jax.tree.map(lambda x: x[time], stream)  # noqa: B023
        acting = planning.ActorParams(params, (), jnp.float32(1.0))
        _, _, expected = search(acting, (), timestep, keys[:1], evaluation=True)
        np.testing.assert_allclose(found.policy[time, 4], expected.policy[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.value[time, 4], expected.value[0], rtol=1e-4, atol=1e-5)
    assert np.max(np.abs(found.policy - sample.rollout.extras.policy)) > 0.1
    kept = reanalyzed(params, sample, False).rollout.extras
    jax.tree.map(np.testing.assert_array_equal, kept, sample.rollout.extras)


def test_images_are_imagined_with_a_plane_for_each_action():
    """The action reaches every place alike."""
    image = specs.Array((6, 5, 4), np.float32)
    spec = environment.EnvironmentSpec("Images", image, specs.DiscreteArray(3))
    model = muzero_networks.image_model(spec, 3, 9, channels=2, strides=(2,), hidden_sizes=(4,))
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    latent = np.random.default_rng(0).uniform(size=(1, 3 * 3 * 2)).astype(np.float32)
    # Without blocks and with a kernel that sees actions alone, the change is the action's number.
    kernel = params["dynamics"]["ResidualTrunk_0"]["Conv_0"]["kernel"]
    assert kernel.shape == (3, 3, 2 + 3, 2)
    change = jnp.arange(3.0)[:, None] * jnp.array([1.0, 2.0])  # [A, channels]
    kernel = kernel.at[1, 1, 2:].set(change)
    params["dynamics"]["ResidualTrunk_0"]["Conv_0"]["kernel"] = kernel
    imagine = jax.jit(model.imagine)
    after, reward = imagine(params, jnp.repeat(latent, 3, axis=0), jnp.arange(3))
    assert reward.shape == (3, 9)
    expected = (latent.reshape(1, -1, 2) + change[:, None]).reshape(3, -1)
    expected = muzero_networks.scale_latent(expected)
    np.testing.assert_allclose(after, expected, rtol=1e-4, atol=1e-5)


def test_latents_span_zero_to_one_and_equal_ones_stay_finite():
    latent = muzero_networks.scale_latent(jnp.array([[3.0, -1.0, 1.0], [2.0, 2.0, 2.0]]))
    np.testing.assert_allclose(latent, [[1.0, 0.0, 0.5], [0.0, 0.0, 0.0]], atol=1e-4)
    slope = jax.grad(lambda x: jnp.sum(muzero_networks.scale_latent(x)))(jnp.zeros(3))
    assert np.all(np.isfinite(slope))


def test_the_temperature_falls_with_agent_steps():
    agent = _make(temperature=1.0, final_temperature=0.5, temperature_steps=100)
    learner = jax.eval_shape(agent.init_learner, jax.random.key(0))
    for steps, expected in ((0, 1.0), (50, 0.75), (1000, 0.5)):
        params = agent.actor_params(learner._replace(agent_steps=jnp.int32(steps)))
        np.testing.assert_allclose(params.temperature, expected)
