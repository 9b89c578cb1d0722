"""The contract between agents and runners, for the agents and runners of `tests/contract.py`."""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracers import agent as agent_lib
from podracers import environment, metrics, parallel, types
from podracers import runner as runner_lib
from tests import contract, documented, golden, streams
from tests.agents import experience


class Subject(NamedTuple):
    """An agent under a runner on four devices, and its history."""

    pair: tuple[str, str]  # names of the agent and the runner
    case: contract.RunnerCase
    recorder: contract.Recorder
    runner: runner_lib.Runner
    history: contract.History


# Each runner once, and each kind of memory: none, a ring of transitions, one of sequences.
FAST = {"anakin": ("ppo", "dqn"), "sebulba": ("r2d2",)}
# The other agents under one runner, because `test_parity` compares the runners.
SLOW = {
    "anakin": ("ppo_scaled", "impala", "vmpo_continuous", "rainbow", "pqn_gru", "r2d2", "sac_gru"),
    "sebulba": ("ppo_gru_frames", "impala_lstm", "vmpo", "pqn", "sac_discrete", "ppo_asymmetric"),
}
SLOW["anakin"] += ("sac", "muzero", "muzero_sampled")
SLOW["sebulba"] += ("ppo_lstm", "sac_discrete_lstm")
# Numbers of devices besides four. `test_parity` compares Sebulba on one with Anakin on four.
NUM_DEVICES = {
    ("ppo_scaled", "anakin"): (1,),
    ("r2d2", "anakin"): (1,),
    ("sac_discrete_lstm", "sebulba"): (2,),
    ("muzero", "anakin"): (1,),
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((name, runner), id=f"{name}-{runner}", marks=marks)
        for names, marks in ((FAST, ()), (SLOW, pytest.mark.slow))
        for runner in contract.RUNNERS
        for name in names[runner]
    ],
    name="subject",
)
def _subject(request):
    agent_name, runner_name = request.param
    agent, candidate = contract.AGENTS[agent_name]()
    case = contract.RUNNERS[runner_name]
    recorder = contract.Recorder(agent)
    runner = case.make(recorder, candidate, 4)
    runner.trace(0)  # as at the start of a run
    history = contract.run(runner)
    yield Subject(request.param, case, recorder, runner, history)
    runner.close()


def test_protocols_and_names_of_metrics(subject):
    assert isinstance(subject.recorder.agent, agent_lib.Agent)
    assert isinstance(subject.runner.environment, environment.Environment)
    assert isinstance(subject.runner, runner_lib.Runner)
    assert subject.runner.steps_per_update == contract.NUM_ENVS * contract.ROLLOUT_LENGTH
    assert subject.runner.describe()
    diagnostics = subject.runner.diagnostics().values
    names = {*subject.history.reports[-1].means, *diagnostics}
    assert documented.undocumented(names) == set()


def test_updates_are_finite_and_change_parameters(subject):
    states = subject.history.states
    for before, after in itertools.pairwise(states):
        changed = jax.tree.map(lambda x, y: np.any(x != y), before.learner, after.learner)
        assert any(jax.tree.leaves(changed.inner))
        for leaf in jax.tree.leaves(after.learner):
            assert np.all(np.isfinite(leaf))
    for report in subject.history.reports:
        assert all(np.isfinite(mean.total) for mean in report.means.values())
        assert all(first == metrics.NEVER for first in report.first_nonfinite.values())
    assert parallel.unequal_replicas(subject.history.final.learner) is None


@pytest.mark.exact
def test_parameters_are_those_of_the_golden_file(subject, request):
    params = subject.runner.actor_params(subject.history.final)
    golden.check(request.node.callspec.id, params)


# Whether evaluations sample actions, as training does.
SAMPLES = {"ppo_gru_frames": True, "impala": True, "vmpo": True, "sac_discrete": True, "sac": False}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=[pytest.mark.slow] * (x not in ("ppo_gru_frames", "sac")))
        for x in SAMPLES
    ],
)
def test_evaluations_sample_as_training_does_unless_they_are_greedy(name):
    agent, candidate = contract.AGENTS[name]()
    if name.startswith("sac"):
        agent = dataclasses.replace(agent, random_steps=0)
    learner, count = experience.zeros(agent), 100
    start = types.restart(candidate.reset(jax.random.key(1))[1].observation)
    timestep = jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *jnp.shape(x))), start)
    keys = jax.random.split(jax.random.key(2), count)

    def actions_of(agent, evaluation):
        state = agent.init_actor(jnp.arange(count), count, evaluation)
        act = jax.jit(agent.act, static_argnums=4)
        return act(agent.actor_params(learner), state, timestep, keys, evaluation)[0]

    trained, greedy = actions_of(agent, False), agent_lib.greedy(agent)
    assert len(np.unique(trained, axis=0)) > 1
    assert (greedy is not None) == SAMPLES[name]
    if greedy is not None:
        np.testing.assert_array_equal(actions_of(agent, True), trained)
        np.testing.assert_array_equal(actions_of(greedy, False), trained)
    assert np.all(np.ptp(actions_of(greedy or agent, True), axis=0) == 0)


def test_streams_keep_s1_and_s3(subject):
    rollouts = [rollout.timestep for rollout in subject.history.rollouts]
    for before, after in itertools.pairwise(rollouts):
        streams.assert_same(
            jax.tree.map(lambda x: x[0], after), jax.tree.map(lambda x: x[-1], before)
        )
    parts = [jax.tree.map(lambda x: x[:-1], part) for part in rollouts]
    timestep = jax.tree.map(lambda *xs: np.concatenate(xs), *parts)  # [U * T, B, ...]
    first, last = timestep.first(), timestep.last()
    assert np.all(first[0])
    assert np.sum(last) > 20
    np.testing.assert_array_equal(first[1:], last[:-1])
    np.testing.assert_array_equal(timestep.reward[first], 0.0)
    np.testing.assert_array_equal(timestep.discount[~last], 1.0)
    assert timestep.terminated().any()
    assert timestep.truncated().any()
    # Rows are different streams.
    observation = jax.tree.leaves(timestep.observation)[-1]
    assert len({row.tobytes() for row in observation.swapaxes(0, 1)}) == contract.NUM_ENVS


def test_act_resets_its_state_at_first_s4(subject):
    """At FIRST, `act` ignores the actor state of the previous episode."""
    rollout = subject.history.rollouts[-1]
    params = subject.runner.actor_params(subject.history.final)
    params = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), params)
    timestep = jax.tree.map(lambda x: jnp.asarray(x[0]), rollout.timestep)
    key = jax.random.split(jax.random.key(0), contract.NUM_ENVS)
    env_id = jnp.arange(contract.NUM_ENVS, dtype=jnp.int32)
    fresh = subject.recorder.init_actor(env_id, contract.NUM_ENVS)
    act = jax.jit(subject.recorder.act)

    def outcome(actor_state, step_type):
        forced = timestep._replace(step_type=jnp.full_like(timestep.step_type, step_type))
        return act(params, actor_state, forced, key)

    used = jax.tree.map(jnp.asarray, rollout.actor_state)
    streams.assert_same(outcome(used, types.FIRST), outcome(fresh, types.FIRST))
    if jax.tree.leaves(used):
        differs = jax.tree.map(
            lambda x, y: np.any(x != y), outcome(used, types.MID)[1], outcome(fresh, types.MID)[1]
        )
        assert any(jax.tree.leaves(differs))


def test_one_version_of_the_parameters_acts_a_rollout_s5(subject):
    for update, rollout in enumerate(subject.history.rollouts):
        version = max(update - subject.case.lag, 0)
        np.testing.assert_array_equal(rollout.extras.version, version)
        np.testing.assert_array_equal(rollout.age, update - version if subject.case.lag else ())


@pytest.mark.slow
def test_results_do_not_depend_on_the_number_of_devices(subject):
    for num_devices in NUM_DEVICES.get(subject.pair, ()):
        recorder = contract.Recorder(subject.recorder.agent)
        runner = subject.case.make(recorder, subject.runner.environment, num_devices)
        actual, expected = contract.run(runner), subject.history
        runner.close()
        # States include memories: a checkpoint resumes with another number of devices.
        for name in ("rollouts", "states"):
            for ours, theirs in zip(getattr(actual, name), getattr(expected, name), strict=True):
                streams.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
        for ours, theirs in zip(actual.reports, expected.reports, strict=True):
            assert ours.means.keys() == theirs.means.keys()
            # A replicated value is counted once on each device, which leaves its mean unchanged.
            for name, mean in ours.means.items():
                other = theirs.means[name].result()
                streams.assert_close(mean.result(), other, rtol=1e-3, atol=1e-4)


@pytest.mark.exact
def test_a_seed_repeats_in_any_number_of_dispatches_without_another_trace(subject):
    traces = list(subject.recorder.traces)
    assert (traces.count("init_learner"), traces.count("update")) == (1, 1)
    state, report = subject.runner.step(subject.runner.init(0), contract.NUM_UPDATES)
    assert subject.recorder.traces == traces
    streams.assert_same(state, subject.history.states[-1])
    merged = functools.reduce(metrics.merge, subject.history.reports)
    streams.assert_close(report, merged)
    other = subject.runner.init(1)
    with pytest.raises(AssertionError):
        streams.assert_same(other.learner, subject.history.states[0].learner)
    other, _ = subject.runner.step(other, 1)
    with pytest.raises(AssertionError):
        streams.assert_same(contract.rollout(other).timestep, subject.history.rollouts[0].timestep)


def test_a_restored_state_continues_the_run(subject):
    state = contract.restore(subject.runner, subject.history.states[2])
    if subject.case.saves_streams:
        state, _ = subject.runner.step(state, contract.NUM_UPDATES - 2)
        streams.assert_same(state, subject.history.states[-1])
        return
    # The learner continues; the simulators start new episodes.
    state, _ = subject.runner.step(state, 1)
    assert int(state.update) == 3
    rollout = contract.rollout(state)
    np.testing.assert_array_equal(rollout.extras.version, 2)
    assert np.all(rollout.timestep.first()[0])
    before = jax.tree.leaves(subject.history.rollouts[0].timestep.observation)[-1]
    after = jax.tree.leaves(rollout.timestep.observation)[-1]
    assert not {row.tobytes() for row in before[0]} & {row.tobytes() for row in after[0]}


@pytest.mark.slow
@pytest.mark.parametrize("name", contract.RUNNERS)
def test_no_runner_copies_the_memory_of_the_agent(name):
    """The ring is written in place: the compiled update allocates no second one."""
    agent, candidate = contract.AGENTS["dqn"]()
    agent = dataclasses.replace(agent, replay_capacity=200_000)
    runner = contract.RUNNERS[name].make(agent, candidate, 2)
    size = parallel.num_bytes(jax.eval_shape(lambda: runner.init(0)).memory) // 2
    assert size > 2**20
    analysis = runner.trace(0).lower().compile().memory_analysis()
    assert analysis.alias_size_in_bytes >= size
    assert analysis.output_size_in_bytes - analysis.alias_size_in_bytes < size / 16
    assert analysis.temp_size_in_bytes < size / 4
