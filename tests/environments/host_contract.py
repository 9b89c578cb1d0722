"""The contract of factories of host environments, as an assertion."""

import numpy as np

from podracers import environment
from podracers.training import host_check


def check_contract(
    factory: environment.HostEnvironmentFactory, num_steps: int = 200, *, random: bool = True
) -> host_check.Recording:
    """Asserts the whole contract, and returns the recording of a random policy.

    Args:
      factory: the factory to check.
      num_steps: `T`.
      random: whether episodes differ under the same actions; false for a deterministic simulator.
    """
    assert host_check.environment_faults(factory, num_steps) == []
    if not random:
        env_id = np.arange(host_check.NUM_STREAMS, dtype=np.int32)
        with host_check.made(factory, env_id) as host:
            return host_check.record(host, factory.spec, num_steps)
    recordings = host_check.equal_actions(factory, num_steps)
    assert host_check.num_different(recordings) == 2 * host_check.NUM_STREAMS
    return recordings[0]
