"""The contract of JAX environments that are stepped on the host; `test_parity.py` tests streams."""

from podracers.sebulba import jax_host
from tests import streams
from tests.environments import host_contract


def test_contract():
    environment = streams.RandomEpisodes(actions="multi_discrete", masked=True)
    host_contract.check_contract(jax_host.JaxHostEnvironment(environment), 60)
