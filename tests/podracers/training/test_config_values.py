"""Tests of reading a configuration without importing what it names."""

import sys

import pytest

from podracers import errors
from podracers.training import config_values

_TEXT = """
from __gin__ import dynamic_registration
import nowhere.to_be_found
from nowhere import agents

SIZE = 64
SIZES = (%SIZE, 32)

agents.Agent.learning_rate = 1e-3
agents.Agent.encoder = @agents.Encoder()
agents.Agent.options = {'sizes': %SIZES, 'head': @critic/agents.Head}
critic/agents.Head.size = %SIZE
found.Env.name = 'Snake-v1'
"""


def test_reads_values_without_importing():
    values = config_values.read(_TEXT, "x.gin")
    assert values["SIZE"] == 64
    assert values["critic/agents.Head.size"] == config_values.Macro("SIZE")
    assert "nowhere" not in sys.modules
    parameters = config_values.parameters(values)
    assert parameters.keys() == {
        "agents.Agent.learning_rate",
        "agents.Agent.encoder",
        "agents.Agent.options",
        "critic/agents.Head.size",
        "found.Env.name",
    }
    assert parameters["agents.Agent.encoder"] == ("agents.Encoder", True)
    assert str(parameters["agents.Agent.encoder"]) == "Encoder()"
    head = config_values.Reference("critic/agents.Head", False)
    assert parameters["agents.Agent.options"] == {"sizes": (64, 32), "head": head}
    assert str(parameters["agents.Agent.options"]) == "{'sizes': (64, 32), 'head': Head}"
    assert parameters["critic/agents.Head.size"] == 64


@pytest.mark.parametrize("text", ["A = %A\nx.X.y = %A", "A = %B\nB = %A\nx.X.y = %B", "x.X.y = %C"])
def test_a_macro_that_stands_for_nothing_comes_to_an_end(text):
    parameters = config_values.parameters(config_values.read(text, "x.gin"))
    assert isinstance(parameters["x.X.y"], config_values.Macro)


@pytest.mark.parametrize("text", ["x.X.y =", "\x00\x01", "x.X.y = (1,"])
def test_says_which_file_is_no_configuration(text):
    with pytest.raises(errors.UserError, match=r"^runs/a/config\.gin") as caught:
        config_values.read(text, "runs/a/config.gin")
    assert "\n" not in str(caught.value)


def test_hyperparameters_are_numbers_and_strings_by_class():
    text = """
LENGTH = 32
a.A.rate = 1e-3
a.A.limit = None
a.A.is_on = True
a.A.length = %LENGTH
a.A.encoder = @encoders.MLP()
encoders.MLP.sizes = (64, %LENGTH)
b.B.size = 1
c.B.size = 2
"""
    assert config_values.hyperparameters(text) == {
        "A.rate": 1e-3,
        "A.is_on": True,
        "A.length": 32,
        "A.encoder": "MLP()",
        "MLP.sizes": "(64, 32)",
        "b.B.size": 1,
        "c.B.size": 2,
    }
