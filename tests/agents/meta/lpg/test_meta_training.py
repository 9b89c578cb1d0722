"""Meta-training: an agent like any other to a runner, whose streams are lifetimes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents.meta import lpg
from agents.meta.lpg import bandit
from environments import catch
from podracers import anakin, errors, evaluation, parallel, sebulba, types
from tests import documented
from tests.agents.meta.lpg import lifetimes

NUM_LIFETIMES = 8


def _runner(num_devices=1, **options):
    return anakin.Anakin(
        lifetimes.agent(**options),
        lifetimes.candidate(),
        NUM_LIFETIMES,
        lifetimes.PERIOD,
        num_devices=num_devices,
    )


def _numbers(tree):
    """Returns the leaves in NumPy; of typed keys their data."""
    leaves = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in jax.tree.leaves(tree)
    ]
    return jax.device_get(leaves)


@pytest.fixture(scope="module", name="runner")
def _two_devices():
    return _runner(2)


@pytest.fixture(scope="module", name="history")
def _history(runner):
    """The states before and after six updates on two devices, and their report."""
    states, state = [], runner.init(0)
    for _ in range(6):
        states.append(_numbers(state))
        state, report = runner.step(state, 1)
    return states, state, jax.device_get(report)


def test_a_rule_is_learnt_and_lives_end(runner, history):
    _, state, report = history
    assert documented.undocumented(report.means) == set()
    assert all(np.isfinite(mean.total) for mean in report.means.values())
    fresh = runner.init(0).learner.train_state.params
    for x, y in zip(_numbers(fresh), _numbers(state.learner.train_state.params)):
        assert np.any(x != y)
    # Lifetimes of one to three rollouts, six rollouts: each has ended twice at least.
    assert state.learner.bandit.trials.sum() >= 2 * NUM_LIFETIMES
    age = np.asarray(state.streams.actor_state.time)
    assert len(set(age)) > 1 and set(age % lifetimes.PERIOD) == {0}
    born = np.asarray(state.streams.timestep.first())
    steps = np.asarray(state.memory.steps)
    np.testing.assert_array_equal(steps[~born], age[~born])


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 4])
def test_the_number_of_devices_changes_nothing(history, num_devices):
    _, expected, _ = history
    runner = _runner(num_devices)
    state, _ = runner.step(runner.init(0), 6)
    for x, y in zip(_numbers(expected.learner), _numbers(state.learner)):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)
    for x, y in zip(_numbers(expected.streams.timestep), _numbers(state.streams.timestep)):
        np.testing.assert_array_equal(x, y)


def test_a_saved_state_goes_on_bit_for_bit(runner, history):
    states, expected, _ = history
    template = runner.init(1)
    leaves = [
        jax.random.wrap_key_data(y) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else y
        for x, y in zip(jax.tree.leaves(template), states[3])
    ]
    state = jax.tree.unflatten(jax.tree.structure(template), leaves)
    state, _ = runner.step(jax.device_put(state, jax.tree.map(lambda x: x.sharding, template)), 3)
    for x, y in zip(_numbers(expected), _numbers(state)):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_sebulba_learns_the_same_rule():
    state, _ = (runner := _runner()).step(runner.init(0), 3)
    host = sebulba.Sebulba(
        lifetimes.agent(),
        lifetimes.candidate(),
        NUM_LIFETIMES,
        lifetimes.PERIOD,
        actor_devices=(0,),
        learner_devices=(0,),
        lag=0,
    )
    try:
        other, _ = host.step(host.init(0), 3)
        expected = _numbers(runner.actor_params(state))
        for x, y in zip(expected, _numbers(host.actor_params(other))):
            np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)
    finally:
        host.close()


def _lived(evaluation=False, rollouts=2):
    """Acts for some rollouts; returns actor states before and after each step, and time steps."""
    agent, candidate = lifetimes.agent(), lifetimes.candidate(min_periods=3)
    learner = agent.init_learner(jax.random.key(0))
    rule = lifetimes.rule_params()
    params = agent.actor_params(learner._replace(train_state=agent._optimizer.init(rule)))
    state, timestep = jax.jit(jax.vmap(candidate.reset))(jax.random.split(jax.random.key(1), 2))
    actor_state = agent.init_actor(jnp.arange(2), 2)
    act = jax.jit(functools.partial(agent.act, evaluation=evaluation))
    step, history = jax.jit(jax.vmap(candidate.step)), []
    for time in range(rollouts * agent.rollout_length + 1):
        before = actor_state
        key = jax.random.split(jax.random.key(time), 2)
        action, actor_state, extras = act(params, actor_state, timestep, key)
        history.append((timestep, action, before, actor_state, extras))
        state, timestep = step(state, action)
    return agent, functools.partial(act, params), history


@pytest.fixture(scope="module", name="lived")
def _two_rollouts():
    """The agent, `act` without its parameters, and what came of two rollouts."""
    return _lived()


def _updates(history):
    """Returns the steps that changed an agent."""
    changed = [bool(jnp.any(x[3].agent.policy != x[2].agent.policy)) for x in history]
    return set(np.flatnonzero(changed).tolist())


def test_agents_learn_after_each_chunk_but_the_last(lived):
    agent, _, history = lived
    length = agent.chunk_length
    assert _updates(history) == {length, 2 * length, 4 * length, 5 * length}


@pytest.mark.slow
def test_in_evaluations_agents_learn_after_each_chunk():
    agent, _, history = _lived(evaluation=True, rollouts=1)
    length = agent.chunk_length
    assert _updates(history) == {length, 2 * length, 3 * length}


def test_the_meta_gradient_sees_the_agents_that_acted(lived):
    agent, act, history = lived
    length = agent.rollout_length
    chunks_of, learn = jax.jit(agent._chunks), jax.jit(agent._learn)
    rule = act.args[0].rule
    for begin in (0, length):
        part = history[begin : begin + length + 1]
        stack = lambda *xs: jnp.stack(xs)  # noqa: E731
        rollout = types.Rollout(
            timestep=jax.tree.map(stack, *(x[0] for x in part)),
            action=jnp.stack([x[1] for x in part[:-1]]),
            extras=jax.tree.map(stack, *(x[4] for x in part[:-1])),
            actor_state=part[0][2],
        )
        chunks = chunks_of(rollout)
        for lifetime in range(2):
            current = jax.tree.map(lambda x, n=lifetime: x[n], rollout.actor_state.agent)
            for update in range(agent.updates):
                chunk = jax.tree.map(lambda x, n=lifetime, k=update: x[n, k], chunks)
                arm = rollout.extras[0, lifetime]
                current, _ = learn(rule, current, chunk, arm)
            acted = part[-2][3].agent
            np.testing.assert_allclose(current.policy, acted.policy[lifetime], atol=1e-5)
            np.testing.assert_allclose(current.prediction, acted.prediction[lifetime], atol=1e-5)


def test_agents_are_reborn_where_lifetimes_begin(lived):
    _, act, history = lived
    timestep, _, _, actor_state, _ = history[lifetimes.PERIOD]
    born = timestep._replace(step_type=jnp.array([types.FIRST, types.MID], jnp.int8))
    _, state, _ = act(actor_state, born, jax.random.split(jax.random.key(0), 2))
    assert not state.agent.policy[0].any() and state.agent.policy[1].any()
    assert state.time.tolist() == [1, lifetimes.PERIOD + 2]


def test_an_evaluation_plays_lifetimes():
    agent = lifetimes.agent()
    evaluator = evaluation.Evaluator(agent, lifetimes.candidate(), num_episodes=4)
    params = agent.actor_params(agent.init_learner(jax.random.key(0)))
    episodes = evaluator.run(params, jax.random.key(0))
    assert episodes.finished.all()
    assert set((episodes.lengths + 1) % lifetimes.PERIOD) == {0}


def test_the_bandit_prefers_what_earns_more():
    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=parallel.make_mesh(jax.devices()[:2]),
        in_specs=(jax.P(), jax.P(parallel.AXIS)),
        out_specs=jax.P(),
        check_vma=False,
    )
    def add(state, lives):
        return state.add(*lives)

    state = bandit.Bandit.init(2, 3)
    assert jnp.ptp(state.logits()) == 0.0
    # Task 0 pays a hundredth of task 1; the last lifetime has not ended.
    task, arm = jnp.array([0, 0, 0, 1, 1, 1, 0, 0]), jnp.array([0, 1, 2, 0, 1, 2, 1, 0])
    value = jnp.array([0.01, 0.02, 0.0, 2.0, 1.0, -1.0, 0.02, 9.0])
    ended = jnp.arange(8) < 7
    state = add(state, (task, arm, value, ended))
    np.testing.assert_allclose(state.mean, [[0.01, 0.02, 0.0], [2.0, 1.0, -1.0]])
    np.testing.assert_array_equal(state.trials, [[1, 2, 1], [1, 1, 1]])
    prob = np.asarray(jax.nn.softmax(state.logits()))
    assert prob[0].argmax() == 1 and prob[1].argmax() == 0
    assert prob.max(1).min() > 0.9
    for _ in range(40):  # old lifetimes are forgotten
        state = add(state, (task, arm, -value, ended))
    np.testing.assert_allclose(state.mean[0, 1], -0.02, rtol=1e-2)
    # What was not tried counts as best.
    untried = bandit.Bandit(jnp.array([[1.0, 0.0]]), jnp.array([[3.0, 0.0]]))
    assert untried.logits()[0, 1] > untried.logits()[0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"updates": 0}, r"LPG\.updates"),
        ({"agent_learning_rates": ()}, r"LPG\.agent_learning_rates"),
        ({"chunk_length": 5}, r"bind Lifetimes\.period"),
        ({"spec": catch.Catch().spec}, "got Catch"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(options, message):
    with pytest.raises(errors.UserError, match=message) as error:
        lpg.LPG(**({"spec": lifetimes.candidate().spec, "chunk_length": 4, "updates": 2} | options))
    assert "\n" not in str(error.value)


def test_rollouts_of_another_length_are_refused():
    runner = anakin.Anakin(lifetimes.agent(), lifetimes.candidate(), 4, 6, num_devices=1)
    with pytest.raises(errors.UserError, match="ROLLOUT_LENGTH"):
        runner.trace(0)
