"""The contract of factories of host environments, as an assertion."""

import numpy as np

from podracers import environment, host_contract


def check_contract(
    factory: environment.HostEnvironmentFactory, num_steps: int = 200, *, random: bool = True
) -> host_contract.Recording:
    """Asserts the whole contract, and returns the recording of a random policy.

    Args:
      factory: the factory to check.
      num_steps: `T`.
      random: whether episodes differ under the same actions; false for a deterministic simulator.
    """
    assert host_contract.environment_faults(factory, num_steps) == []
    if not random:
        env_id = np.arange(host_contract.NUM_STREAMS, dtype=np.int32)
        with host_contract.simulators(factory, env_id) as host:
            return host_contract.record(host, factory.spec, num_steps)
    recordings = host_contract.equal_actions(factory, num_steps)
    assert host_contract.num_different(recordings) == 2 * host_contract.NUM_STREAMS
    return recordings[0]
