"""Two players in turn: the targets of each agent are those of one player's view of the game.

In that view rewards and values of the other player change their sign, and discounts are positive.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents import ppo
from agents.networks import cores, heads
from agents.parts import categorical, inputs
from agents.search import planning
from environments import opponents, pgx
from podracers import types
from tests import contract, streams
from tests.agents import experience

LENGTH, BATCH = 20, 6


def _game(seed: int = 3):
    """Returns time steps of a game in which players may move twice, `[T + 1, B]`, and the signs.

    The sign is 1 where the first player is to move, and -1 where the other one is.
    """
    rng = np.random.default_rng(seed)
    timestep = experience.random_episodes(seed, (LENGTH + 1, BATCH))
    passes = (rng.random(timestep.reward.shape) < 0.7) & (timestep.step_type != types.FIRST)
    sign = np.cumprod(np.where(passes, -1.0, 1.0), axis=0).astype(np.float32)
    return timestep._replace(discount=np.where(passes, -1, 1) * timestep.discount), sign


def _view(timestep, sign):
    """Returns the time steps as the first player sees them."""
    mover = np.concatenate([sign[:1], sign[:-1]])  # who moved before each time step
    return timestep._replace(reward=mover * timestep.reward, discount=np.abs(timestep.discount))


def _dqn(agent, timestep, values, _):
    """Returns the targets `[T - n + 1, B]` of all sequences of `n` transitions."""
    length, targets = agent.buffer.burn_in + agent.n_step + 1, []
    for begin in range(LENGTH + 2 - length):
        part = jax.tree.map(lambda x: x[begin : begin + length], timestep)  # noqa: B023
        reward, discount, time = agent.targets(part)
        value = jnp.take_along_axis(values[begin : begin + length], time[None], axis=0)[0]
        targets.append(reward + discount * value)
    # The first time steps of a sequence fill the stack of frames.
    return jnp.concatenate([jnp.zeros((agent.buffer.burn_in, BATCH)), jnp.stack(targets)])


def _sac(agent, timestep, values, _):
    both = jax.tree.map(lambda x: jnp.stack([x[:-1], x[1:]]).reshape(2, -1), timestep)
    return agent.targets(both, values[1:].ravel()).reshape(LENGTH, BATCH)


def _search(agent, timestep, values, _):
    targets = agent.targets(timestep, planning.Extras(jnp.zeros((*values.shape, 2)), values))
    return jnp.stack([targets.value[:-1], targets.reward])


TARGETS = {
    "ppo": lambda agent, timestep, values, _: jnp.stack(agent.targets(timestep, values)),
    "vmpo": lambda agent, timestep, values, _: jnp.stack(agent.targets(timestep, values)),
    "impala": lambda agent, *arguments: jnp.stack(agent.targets(*arguments)),
    "pqn": lambda agent, timestep, values, _: agent.targets(timestep, values),
    "dqn": _dqn,
    "rainbow": _dqn,
    "r2d2": lambda agent, timestep, values, _: agent.targets(timestep, values),
    "sac_discrete": _sac,
    "muzero": _search,
}


@pytest.mark.parametrize("name", TARGETS)
def test_targets_are_those_of_one_players_view(name):
    agent, _ = contract.AGENTS[name]()
    timestep, sign = _game()
    rng = np.random.default_rng(1)
    values = rng.normal(size=sign.shape).astype(np.float32)
    log_ratio = 0.3 * rng.normal(size=(LENGTH, BATCH)).astype(np.float32)
    targets = jax.jit(lambda *arguments: TARGETS[name](agent, *arguments))
    actual = np.array(targets(timestep, values, log_ratio))
    expected = np.array(targets(_view(timestep, sign), sign * values, log_ratio))
    steps, begin = actual.shape[-2], agent.buffer.burn_in if TARGETS[name] is _dqn else 0
    kept = (timestep.step_type[:steps] != types.LAST) & (np.arange(steps)[:, None] >= begin)
    expected = sign[:steps] * expected
    np.testing.assert_allclose(actual[..., kept], expected[..., kept], atol=2e-6)
    assert np.abs(actual - np.array(targets(timestep, sign * values, log_ratio))).max() > 0.01


def test_atoms_are_mirrored_where_the_turn_passes():
    """The distribution of minus a return is that of the return, reversed."""
    atoms = heads.CategoricalReturn(-5.0, 5.0, 11)
    rng = np.random.default_rng(0)
    online, target = rng.normal(size=(2, 4, 3, 11)).astype(np.float32)
    action, reward = np.zeros(4, np.int32), rng.normal(size=4).astype(np.float32)
    discount = np.full(4, 0.9, np.float32)
    selector = np.tile(np.array([0.0, 1.0, 0.0], np.float32), (4, 1))
    loss = jax.jit(atoms.loss)
    expected = loss(online, action, reward, discount, target[..., ::-1], selector)
    actual = loss(online, action, reward, -discount, target, selector)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_the_previous_reward_is_that_of_the_player_to_move():
    timestep, _ = _game()
    timestep = jax.tree.map(lambda x: x[:, None], timestep._replace(observation=timestep.reward))
    spec = streams.RandomEpisodes().spec
    action = jnp.zeros(timestep.reward.shape, jnp.int32)
    seen = inputs.extended(timestep, action, spec.action).observation["previous_reward"]
    np.testing.assert_array_equal(np.abs(seen), np.abs(timestep.reward))
    passes = timestep.discount < 0.0
    np.testing.assert_array_equal(seen[passes], -timestep.reward[passes])
    np.testing.assert_array_equal(seen[~passes], timestep.reward[~passes])


def test_a_player_against_an_opponent_may_have_a_memory():
    pytest.importorskip("pgx")
    spec = opponents.Against(pgx.Pgx("kuhn_poker")).spec
    assert ppo.PPO(spec, network=contract.tiny_network(cores.GRU(8))).net.is_recurrent


def test_a_learnt_model_passes_the_turn():
    """Always where players alternate, and else by the logit that learns whether it passed."""
    tic_tac_toe = dataclasses.replace(streams.RandomEpisodes(masked=True).spec, players=2)
    agents = {
        alternates: dataclasses.replace(
            contract.AGENTS["muzero"]()[0],
            spec=dataclasses.replace(tic_tac_toe, alternates=alternates),
        )
        for alternates in (True, False)
    }
    gamma = agents[True].gamma
    np.testing.assert_allclose(agents[True]._discount(None), -gamma)
    logits = jnp.array([-20.0, 0.0, 20.0])
    expected = [gamma, 0.0, -gamma]
    np.testing.assert_allclose(agents[False]._discount(logits), expected, atol=1e-6)


def test_the_model_of_turns_learns_signs_before_an_end():
    """Cross-entropy of the steps whose discount is not 0, the first of two unrolled ones here."""
    support, steps, batch = categorical.Support(5.0, 11), 2, 3
    discount = jnp.array([[-1.0, 1.0, -1.0], [0.0, 0.0, 0.0]])
    logits = jnp.array([[2.0, 2.0, -1.0], [5.0, 5.0, 5.0]])
    zeros = jnp.zeros((steps + 1, batch, 11))
    predicted = planning.Unrolled(zeros[..., :3], zeros, zeros[1:], logits)
    ones = jnp.ones((steps + 1, batch))
    target = planning.Targets(*(zeros[..., :3], ones, ones[1:], discount, ones, ones, ones[1:]))
    loss = planning.loss(predicted, target, jnp.ones(batch), support, 0.25).metrics["loss/turn"]
    passes = np.array([1.0, 0.0, 1.0])
    probability = 1.0 / (1.0 + np.exp(-np.array([2.0, 2.0, -1.0])))
    entropy = -passes * np.log(probability) - (1.0 - passes) * np.log(1.0 - probability)
    np.testing.assert_allclose(loss.result(), np.mean(entropy) / steps, rtol=1e-5)
