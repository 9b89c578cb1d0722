"""Tests of which operations are traced with the precision, and which stay float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents import networks, ppo
from agents.networks import cores, encoders, heads
from agents.networks import network as network_lib
from environments import catch
from podracers import anakin, evaluation, precision, sebulba
from tests import contract, streams

BFLOAT16 = precision.Precision(compute_dtype="bfloat16")
SPEC = catch.Catch().spec


def _dtypes(jaxpr, primitive: str) -> list[tuple[str, ...]]:
    """Returns the dtypes of the operands of each use of a primitive, in inner programs as well."""
    dtypes = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == primitive:
            dtypes.append(tuple(str(v.aval.dtype) for v in eqn.invars))
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            dtypes += _dtypes(inner, primitive) if hasattr(inner, "eqns") else []
    return dtypes


@pytest.mark.parametrize(
    ("encoder", "core"),
    [
        (encoders.MLP((8, 8), layer_norm=True), None),
        (encoders.CNN((4,), hidden_sizes=(8,)), cores.LSTM(8, layer_norm=True)),
        (encoders.MLP((8,)), cores.Stack(cores.Attention(8, 2, 3), hidden_size=8)),
    ],
    ids=["mlp", "cnn_lstm", "stack"],
)
def test_bodies_compute_in_bfloat16_and_states_are_float32(encoder, core):
    network = networks.actor_critic(SPEC, heads.Categorical(3), encoder=encoder, core=core)
    timestep = network_lib.zero_timestep(SPEC)

    def gradient():  # only traced
        params = network.init(jax.random.key(0), timestep)

        def loss(params):
            output, core = network.step(params, network.initial_core(1), timestep)
            return jnp.sum(output.policy) + jnp.sum(output.value), (output, core)

        return params, jax.grad(loss, has_aux=True)(params)

    with BFLOAT16.tracing():
        traced, kept = jax.make_jaxpr(gradient, return_shape=True)()
    products = _dtypes(traced.jaxpr, "dot_general")
    assert ("bfloat16", "bfloat16") in products
    assert ("float32", "float32") in products  # of the heads
    assert all(leaf.dtype != jnp.bfloat16 for leaf in jax.tree.leaves(kept))


def test_runners_and_evaluations_trace_the_agent_with_their_precision():
    environment = streams.RandomEpisodes()
    agent = ppo.PPO(environment.spec, network=contract.tiny_network())
    options = {"precision": precision.Precision("highest", "bfloat16")}
    subject = sebulba.Sebulba(agent, environment, 8, 4, **options)
    evaluator = evaluation.Evaluator(agent, environment, 2, **options)
    params, key = jax.eval_shape(
        lambda key: (agent.actor_params(agent.init_learner(key)), key), jax.random.key(0)
    )
    for program in (
        anakin.Anakin(agent, environment, 8, 4, **options).trace(0),
        subject.trace(0),
        subject.trace_acting(0)["act"],
        evaluator._run.trace(params, key, np.arange(2, dtype=np.int32)),
    ):
        assert ("bfloat16", "bfloat16") in _dtypes(program.jaxpr.jaxpr, "dot_general")
        assert "Precision.HIGHEST" in str(program.jaxpr)
        assert precision.compute_dtype() == jnp.float32  # the context has ended


def test_another_precision_is_another_trace():
    program = jax.jit(lambda x: x.astype(precision.compute_dtype()))
    assert program(1.0).dtype == jnp.float32
    with BFLOAT16.tracing():
        assert program(1.0).dtype == jnp.bfloat16
