"""Networks with the outputs that a rule asks for."""

import jax
import numpy as np

from agents import networks
from agents.meta import rules
from agents.meta.rules import interface
from agents.networks import encoders
from environments import catch

SPEC = catch.Catch().spec
OUTPUTS = interface.OutputSpec({"policy": 3, "y": 7}, {"z": 7, "q": 5})


def test_outputs_are_those_of_the_specification():
    network = rules.rule_network(
        SPEC, OUTPUTS, encoder=encoders.MLP((8,)), model_size=4, model_hidden_sizes=(6,)
    )
    timestep = networks.zero_timestep(SPEC)
    params = network.init(jax.random.key(0), timestep)
    outputs, core = network.step(params, network.initial_core(1), timestep)
    assert {name: x.shape[1:] for name, x in outputs.items()} == OUTPUTS.shapes(3)
    assert OUTPUTS.shapes(3) == {"policy": (3,), "y": (7,), "z": (3, 7), "q": (3, 5)}
    assert core == ()
    z = np.asarray(outputs["z"][0])  # each action has its own
    assert not np.allclose(z[0], z[1]) and not np.allclose(z[1], z[2])
