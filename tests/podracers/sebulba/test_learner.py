"""Where one device acts and learns, and runs in order what it is given."""

import dataclasses
import threading
import time

import jax
import pytest

from podracers import errors, sebulba
from tests import contract

_ACTING, _LEARNING = "acting", "learning"


class _InOrder:
    """One lock around a device: who asked first is first, and nobody else runs meanwhile."""

    def __init__(self):
        self._changed = threading.Condition()
        self._asked = self._served = 0
        self.log = []  # what ran, in order

    def run(self, what, program, *args):
        with self._changed:
            ticket, self._asked = self._asked, self._asked + 1
            self._changed.wait_for(lambda: self._served == ticket)
        results = jax.block_until_ready(program(*args))
        if what == _LEARNING:
            time.sleep(0.01)  # long enough for an actor to ask
        with self._changed:
            self._served += 1
            self.log.append(what)
            self._changed.notify_all()
        return results


def _acts_within_updates(max_block_ms):
    """Returns how many calls of acting ran between the first and the last slice of each update."""
    agent, environment = contract.AGENTS["impala"]()
    agent = dataclasses.replace(agent, num_minibatches=contract.NUM_ENVS)
    runner = sebulba.Sebulba(
        agent,
        environment,
        contract.NUM_ENVS,
        contract.ROLLOUT_LENGTH,
        actor_devices=(0,),
        learner_devices=(0,),
        max_block_ms=max_block_ms,
    )
    device, learner = _InOrder(), runner._learner
    programs = runner._programs.on(jax.devices()[0])
    act = lambda *args: device.run(_ACTING, programs.act, *args)  # noqa: E731
    runner._programs._programs[jax.devices()[0]] = programs._replace(act=act)
    learn = learner.learn
    if max_block_ms is None:
        vars(learner)["learn"] = lambda *args: device.run(_LEARNING, learn, *args)
    else:
        learn.run = lambda program, *args: device.run(_LEARNING, program, *args)
    state, counts = runner.init(0), []
    for _ in range(3):
        device.log.clear()
        state, _ = runner.step(state, 1)
        log = list(device.log)
        first, last = log.index(_LEARNING), len(log) - log[::-1].index(_LEARNING)
        counts.append(log[first:last].count(_ACTING))
    runner.close()
    return counts


def test_acting_slips_in_between_slices_of_learning():
    # An actor that is one rollout ahead waits for parameters.
    assert max(_acts_within_updates(1e-6)[1:]) >= contract.ROLLOUT_LENGTH // 2


@pytest.mark.slow
def test_acting_waits_for_a_whole_update_in_one_dispatch():
    assert _acts_within_updates(None) == [0, 0, 0]


def test_a_bound_that_is_no_time_is_the_users_mistake():
    agent, environment = contract.AGENTS["ppo"]()
    with pytest.raises(errors.UserError, match=r"^Sebulba.max_block_ms: expected milliseconds"):
        sebulba.Sebulba(agent, environment, 8, 6, max_block_ms=0)
