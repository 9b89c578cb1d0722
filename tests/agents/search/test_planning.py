"""MuZero and AlphaZero: targets, losses, models and searches.

Axis legend: `T` time, `N` sequences, `K` unrolled steps, `A` actions.
"""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents import alphazero, muzero, networks
from agents.networks import encoders
from agents.networks import muzero as muzero_networks
from agents.parts import optimization, returns
from agents.replay import replay
from agents.search import planning, proposals, tree_search
from environments import catch, wrappers
from podracers import environment, evaluation, types
from tests import contract, streams
from tests.agents import experience

GAMMA, K, N_STEPS, SEQUENCES = 0.9, 2, 3, 16
SPEC = catch.Catch().spec


def _slow_targets(timestep, extras, row, k_steps, n_steps):
    """Returns lists of `(weight, value)` for values, rewards and policies of one sequence."""
    reward, discount, kind = (x[:, row] for x in timestep[1:4])
    active = timestep.observation["active"][:, row]
    ends = (t for t in range(len(kind)) if kind[t] == types.LAST or not active[t])
    end = next(ends, None)
    values, rewards, policies = [], [], []
    for k in range(k_steps + 1):
        over = end is not None and k >= end
        absorbed = over and discount[end] == 0 and end > 0
        policies.append((0.0 if over else 1.0, extras.policy[k, row]))
        if k:  # the reward on arriving at k
            arrived = end is None or (k <= end and end > 0)
            after = not arrived and discount[end] == 0 and end > 0
            rewards.append((float(arrived or after), reward[k] if arrived else 0.0))
        if over:
            values.append((float(absorbed), 0.0))
            continue
        total, factor = 0.0, 1.0
        for t in range(k + 1, k + n_steps + 1):
            total += factor * reward[t]
            factor *= GAMMA * discount[t]
            if t == end:
                break
        values.append((1.0, total + factor * extras.value[t, row]))
    return values, rewards, policies


@pytest.mark.parametrize(("k_steps", "n_steps"), [(5, 3), (2, 8), (0, 4)])
def test_targets_are_those_of_a_slow_loop(k_steps, n_steps):
    shape = (k_steps + n_steps + 1, 64)
    extras = _search_results(np.random.default_rng(k_steps), shape)
    timestep = experience.with_exits(k_steps, experience.random_episodes(k_steps, shape))
    targets = jax.jit(planning.targets, static_argnums=(3, 4))
    results = jax.device_get(targets(timestep, extras, GAMMA, k_steps, n_steps))
    counted = 0
    for row in range(shape[1]):
        slow = _slow_targets(timestep, extras, row, k_steps, n_steps)
        for name, pairs in zip(("value", "reward", "policy"), slow, strict=True):
            for k, (weight, expected) in enumerate(pairs):
                assert getattr(results, f"{name}_weight")[k, row] == weight, (name, row, k)
                if weight:
                    actual = getattr(results, name)[k, row]
                    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
        counted += sum(weight for weight, _ in slow[0])
    assert 0.3 * shape[1] * (k_steps + 1) < counted


def _muzero(frame_stack=1, **options):
    network = functools.partial(
        muzero_networks.model, encoder=encoders.MLP((8,)), latent_size=8, hidden_sizes=(8,)
    )
    network = functools.partial(network, frame_stack=frame_stack)
    search = functools.partial(tree_search.Search, num_simulations=8, max_depth=4)
    options = {"support": 4.0, "support_atoms": 9, "unroll_steps": K, "n_steps": N_STEPS} | options
    return muzero.MuZero(SPEC, network=network, search=search, **options)


def _search_results(rng, shape):
    policy = rng.dirichlet(np.ones(3), shape).astype(np.float32)
    return planning.Extras(policy, rng.normal(size=shape).astype(np.float32))


@pytest.fixture(scope="module", name="case")
def _case():
    agent, rng = _muzero(value_cost=0.5), np.random.default_rng(0)
    shape = (K + N_STEPS + 1, SEQUENCES)
    timestep = experience.random_episodes(0, (shape[0] + 1, SEQUENCES))
    size = (*timestep.reward.shape, *SPEC.observation.shape)
    timestep = timestep._replace(observation=rng.normal(size=size).astype(np.float32))
    extras, action = _search_results(rng, shape), rng.integers(0, 3, shape)
    rollout = types.Rollout(timestep, action.astype(np.int32), extras, ())
    weight = np.linspace(0.5, 1.0, SEQUENCES, dtype=np.float32)
    sample = replay.Sample(rollout, None, weight, None)
    return agent, jax.jit(agent.init_learner)(jax.random.key(0)).params, sample


def _with_draws(agent, sample, count):
    """Returns an agent that draws actions, and a sample that has drawn ones."""
    proposal = functools.partial(proposals.Proposal, num_actions=count)
    rng, rollout = np.random.default_rng(1), sample.rollout
    policy = rng.dirichlet(np.ones(count), rollout.action.shape).astype(np.float32)
    extras = rollout.extras._replace(policy=policy, raw=rng.integers(0, 3, policy.shape))
    sample = sample._replace(rollout=rollout._replace(extras=extras))
    return dataclasses.replace(agent, proposal=proposal), sample


@pytest.mark.parametrize(
    ("consistency", "draws"), [pytest.param(0.0, 0, marks=pytest.mark.slow), (2.0, 0), (0.0, 2)]
)
def test_the_loss_and_its_gradient_are_those_of_the_paper(case, consistency, draws):
    """The root in full, imagined steps by their mean; each step halves the gradient of latents.

    Of drawn actions the log-probabilities are weighted, also of those that were drawn twice.
    """
    agent, params, sample = case
    if consistency:
        network = functools.partial(agent.network, projection_size=8)
        agent = dataclasses.replace(agent, network=network, consistency_cost=consistency)
        params = jax.jit(agent.init_learner)(jax.random.key(0)).params
    agent, sample = _with_draws(agent, sample, draws) if draws else (agent, sample)
    rollout, model, support = sample.rollout, agent.net, agent._support
    timestep = jax.tree.map(lambda x: x[:-1], rollout.timestep)
    targets = jax.jit(planning.targets, static_argnums=(2, 3, 4))
    goal = targets(timestep, rollout.extras, agent.gamma, K, N_STEPS)
    first = jax.tree.map(lambda x: x[0], timestep)
    kept = ~first.last()
    assert 1 < np.sum(~kept) < SEQUENCES / 2

    def slow(params):
        latent, _ = model.representation.step(params["representation"], (), first)
        total = 0.0
        for k in range(K + 1):
            scale = 1.0 / K if k else 1.0
            if k:
                latent, reward, _ = model.imagine(params, latent, rollout.action[k - 1])
                loss = support.cross_entropy(reward, goal.reward[k - 1])
                total += scale * loss * goal.reward_weight[k - 1]
            prediction = model.predict(params, latent)
            log_policy = jax.nn.log_softmax(prediction.policy)
            if draws:
                log_policy = jnp.take_along_axis(log_policy, rollout.extras.raw[k], axis=-1)
            loss = -jnp.sum(goal.policy[k] * log_policy, axis=-1)
            total += scale * loss * goal.policy_weight[k]
            loss = 0.5 * support.cross_entropy(prediction.value, goal.value[k])
            total += scale * loss * goal.value_weight[k]
            if k and consistency:
                at_k = jax.tree.map(lambda x: x[k], timestep)  # noqa: B023
                observed, _ = model.representation.step(params["representation"], (), at_k)
                variables = {"params": params["projector"]}
                goal_k, _ = model.projector.apply(variables, jax.lax.stop_gradient(observed))
                _, x = model.projector.apply(variables, latent)
                y = jax.lax.stop_gradient(goal_k)
                cosine = jnp.sum(x * y, -1) / jnp.linalg.norm(x, axis=-1)
                cosine /= jnp.linalg.norm(y, axis=-1)
                total -= scale * consistency * cosine * goal.policy_weight[k]
            if k:
                latent = 0.5 * latent + jax.lax.stop_gradient(0.5 * latent)
        return jnp.mean((sample.weight * total)[kept])

    def loss(params):
        learnt = agent.loss(params, sample, optimization.Context(0.0))
        return learnt.loss.result(), learnt.priority

    (actual, priority), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    expected, slow_gradient = jax.jit(jax.value_and_grad(slow))(params)
    np.testing.assert_allclose(actual, expected, rtol=1e-4)
    streams.assert_close(gradient, slow_gradient, rtol=1e-3, atol=1e-5)
    np.testing.assert_array_equal(priority > 0.0, kept)
    assert np.all(priority[~kept] == -1.0)


def test_initial_priorities_are_those_of_the_states_after_the_burn_in(case):
    agent, _, sample = case
    timestep, extras = sample.rollout.timestep, sample.rollout.extras  # T + 1 and T steps
    value, target = (
        extras.value[:-1],
        returns.n_step(
            jax.tree.map(lambda x: x[:-1], timestep), extras.value, agent.gamma, N_STEPS
        ),
    )
    error = np.where(timestep.last()[:-2], -1.0, np.abs(value - target))
    count = len(timestep.reward) - agent.buffer.sequence_length
    assert count == 1
    for begin in (0, 2):
        buffer = dataclasses.replace(agent.buffer, burn_in=begin)
        with mock.patch.dict(agent.__dict__, buffer=buffer):
            priorities = agent.initial_priorities((), sample.rollout)
        np.testing.assert_allclose(priorities, error[begin : begin + count], rtol=1e-5)


def test_fresh_values_are_those_of_the_target_network(case):
    agent, params, sample = case
    fresh = _muzero(value_cost=0.5, fresh_values=True)
    target = jax.jit(agent.init_learner)(jax.random.key(1)).params
    # The target network's value of every time step, one at a time.
    model = agent.net

    def value(timestep):
        latent, _ = model.representation.step(target["representation"], (), timestep)
        return agent._support.decode(model.predict(target, latent).value)

    seen = jax.tree.map(lambda x: x[:-1], sample.rollout.timestep)
    extras = sample.rollout.extras._replace(value=jax.lax.map(value, seen))
    known = sample._replace(rollout=sample.rollout._replace(extras=extras))
    loss = jax.jit(agent.loss)
    nothing = optimization.Context(0.0)
    expected = loss(params, known, nothing).metrics
    actual = jax.jit(fresh.loss)(params, sample, optimization.Context(0.0, target)).metrics
    for name, mean in expected.items():
        np.testing.assert_allclose(actual[name].total, mean.total, rtol=1e-4, err_msg=name)
    stale = loss(params, sample, nothing).priority
    assert np.max(np.abs(stale - loss(params, known, nothing).priority)) > 0.1
    assert agent.target_params(params) == ()
    assert fresh.target_params(params) is params


@pytest.mark.slow
def test_searches_are_repeated_with_the_latest_parameters(case):
    """One time step after another, without noise; where none is due, nothing changes.

    The first time step only fills a stack of frames.
    """
    sample = case[2]._replace(key=jax.random.split(jax.random.key(2), SEQUENCES))
    agent = _muzero(frame_stack=2, n_steps=N_STEPS - 1)
    params = jax.jit(agent.init_learner)(jax.random.key(0)).params
    reanalyzed = jax.jit(agent._reanalyzed)
    search = jax.jit(agent.act, static_argnames="evaluation")
    extras = reanalyzed(params, sample, True).rollout.extras
    acting = optimization.ActorParams(params, (), jnp.float32(1.0))
    core = agent.init_actor(jnp.arange(SEQUENCES), SEQUENCES)
    for time in range(K + N_STEPS + 1):
        timestep = jax.tree.map(lambda x: x[time], sample.rollout.timestep)  # noqa: B023
        _, core, expected = search(acting, core, timestep, sample.key, evaluation=True)
        if time == 0:
            expected = jax.tree.map(lambda x: x[0], sample.rollout.extras)
        np.testing.assert_allclose(extras.policy[time], expected.policy, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(extras.value[time], expected.value, rtol=1e-4, atol=1e-5)
    assert np.max(np.abs(extras.policy - sample.rollout.extras.policy)) > 0.1
    kept = reanalyzed(params, sample, False).rollout.extras
    streams.assert_same(kept, sample.rollout.extras)


def test_latents_span_zero_to_one_and_equal_ones_stay_finite():
    latent = muzero_networks.scale_latent(np.float32([[3.0, -1.0, 1.0], [2.0, 2.0, 2.0]]))
    np.testing.assert_allclose(latent, [[1.0, 0.0, 0.5], [0.0, 0.0, 0.0]], atol=1e-4)
    slope = jax.jit(jax.grad(lambda x: jnp.sum(muzero_networks.scale_latent(x))))(np.zeros(3, "f"))
    assert np.all(np.isfinite(slope))


def test_the_temperature_falls_with_agent_steps():
    agent = _muzero(temperature=1.0, final_temperature=0.5, temperature_steps=100)
    learner = jax.eval_shape(agent.init_learner, jax.random.key(0))
    for steps, expected in ((0, 1.0), (50, 0.75), (1000, 0.5)):
        params = agent.actor_params(learner._replace(agent_steps=jnp.float32(steps)))
        np.testing.assert_allclose(params.exploration, expected)


@pytest.mark.parametrize("name", ["alphazero", "muzero"])
def test_actions_are_the_searchs_best_after_the_first_moves_of_an_episode(name):
    """Streams are at moves 0 to 5; the third and the last one begin an episode."""
    agent = _alphazero(streams.RandomEpisodes(masked=True))[0] if name == "alphazero" else _muzero()
    agent = dataclasses.replace(agent, temperature_moves=3)
    core = agent.init_actor(jnp.arange(6), 6)
    core = jax.tree.map(lambda x: jnp.arange(6), core)
    searched = []

    def run(search, model, root, legal, temperature, key):
        searched.append(temperature)
        return tree_search.Plan(jnp.zeros(6, jnp.int32), jnp.zeros((6, 3)), jnp.zeros(6))

    timestep = jax.tree.map(lambda x: jnp.repeat(x, 6, axis=0), networks.zero_timestep(agent.spec))
    begins = jnp.arange(6) % 3 == 2
    timestep = timestep._replace(step_type=jnp.where(begins, types.FIRST, types.MID))
    params = agent.actor_params(experience.zeros(agent))
    key = jax.random.split(jax.random.key(0), 6)
    with mock.patch.object(tree_search.Search, "run", run):
        _, after, _ = agent.act(params, core, timestep, key)
        agent.act(params, core, timestep, key, True)
    np.testing.assert_allclose(searched[0], [1, 1, 1, 0, 0, 1], atol=1e-30)
    assert np.all(searched[0] > 0.0)  # the noise at the root stays
    assert searched[1] == 0.0
    np.testing.assert_array_equal(jax.tree.leaves(after)[0], [1, 2, 1, 4, 5, 1])


def _alphazero(game, **search):
    candidate = wrappers.Searchable(game)
    network = functools.partial(
        muzero_networks.policy_value, encoder=encoders.MLP((8,)), hidden_sizes=(8,)
    )
    search = functools.partial(tree_search.Search, **search)
    options = {"gamma": GAMMA, "batch_size": 16, "min_replay": 48, "replay_capacity": 200}
    return alphazero.AlphaZero(candidate.spec, network=network, search=search, **options), candidate


def test_alphazero_does_not_replay_states():
    agent, candidate = _alphazero(streams.RandomEpisodes(masked=True))
    assert "environment_state" in candidate.spec.observation
    runner = contract.RUNNERS["anakin"].make(agent, candidate, 1)
    memory = jax.eval_shape(lambda: runner.init(0)).memory
    assert set(memory.ring.timestep.observation) == {"features", "action_mask"}


@pytest.mark.slow
def test_alphazero_plays_catch_by_searching_without_learning():
    agent, candidate = _alphazero(catch.Catch(rows=4), num_simulations=32, max_depth=4)
    params = agent.actor_params(jax.jit(agent.init_learner)(jax.random.key(0)))
    evaluator = evaluation.Evaluator(agent, candidate, num_episodes=32)
    returns = evaluator.run(params, jax.random.key(1)).returns
    assert np.mean(returns) > 0.9  # an untrained network; random play reaches -0.4


def test_a_search_does_not_know_the_coming_random_events():
    """Two states that differ in their keys have the same plan, and steps from them differ."""
    agent, candidate = _alphazero(streams.RandomEpisodes(masked=True), num_simulations=4)
    params = agent.actor_params(jax.jit(agent.init_learner)(jax.random.key(0)))
    inner, timestep = candidate.reset(jax.random.key(0))
    states = [inner, inner._replace(key=jax.random.key(7))]
    steps = [candidate.inner.step(state, 0)[1].reward for state in states]
    assert steps[0] != steps[1]
    key = jax.random.split(jax.random.key(1), 1)

    def plan(state):
        shown = wrappers.with_part(timestep.observation, environment.STATE, candidate.pack(state))
        row = jax.tree.map(lambda x: x[None], timestep._replace(observation=shown))
        return agent.act(params, agent.init_actor(jnp.arange(1), 1), row, key)

    streams.assert_same(*map(jax.jit(plan), states))


def test_a_search_steps_the_environment_and_nothing_follows_an_ending():
    """In a game of two players: where the turn passes, the discount is negative."""
    agent, _ = _alphazero(streams.RandomEpisodes(masked=True, players=2))
    params = agent.actor_params(jax.jit(agent.init_learner)(jax.random.key(0)))
    model, size = agent.spec.model, 32
    inner, _ = jax.vmap(streams.RandomEpisodes(players=2).reset)(
        jax.random.split(jax.random.key(0), size)
    )
    ended, value = np.arange(size) % 4 == 0, np.float32(np.arange(size) % 8)
    node = alphazero._Node(jax.vmap(model.pack)(inner), ended, value, jnp.zeros((size, 3)))
    action = jnp.zeros(size, jnp.int32)
    node = jax.device_get(node)
    output, after = streams.evaluate(jax.vmap(agent._model(params)), action, node)
    streams.assert_same(*jax.tree.map(lambda x: x[ended], (after, node)))
    timestep, _ = streams.evaluate(jax.vmap(model.step_from), node.state, action)
    assert timestep.terminated()[~ended].any() and timestep.truncated()[~ended].any()
    assert (timestep.discount < 0.0)[~ended].any()
    streams.assert_same(after.ended, ended | timestep.last())
    streams.assert_close(output.reward, np.where(ended, 0.0, timestep.reward))
    streams.assert_close(output.discount, np.where(ended, 1.0, GAMMA * timestep.discount))
    streams.assert_same(output.value[ended], value[ended])
