"""Environments that show their states."""

import jax
import numpy as np
import pytest

from environments import catch, envpool, searchable
from podracers import environment, errors
from podracers.training import check
from tests import streams


@pytest.mark.parametrize(
    "game", [catch.Catch(), streams.RandomEpisodes(masked=True)], ids=["array", "dict, with keys"]
)
def test_stepping_from_what_is_shown_is_stepping(game):
    candidate = searchable.Searchable(game)
    assert candidate.spec.model is candidate
    state, timestep = candidate.reset(jax.random.key(0))
    inner, plain = game.reset(jax.random.key(0))
    for action in (0, 2, 1):
        shown = timestep.observation[environment.STATE]
        state, timestep = candidate.step(state, action)
        inner, plain = game.step(inner, action)
        stepped, after = candidate.step_from(shown, action)
        streams.assert_same(after, timestep.observation[environment.STATE])
        seen = environment.without_state(timestep.observation)
        streams.assert_same(stepped, timestep._replace(observation=seen))
        expected = plain.observation
        streams.assert_same(
            seen, expected if isinstance(expected, dict) else {"observation": expected}
        )
        streams.assert_same(timestep[1:], plain[1:])


def test_it_keeps_the_contract():
    check.check_environment(searchable.Searchable(catch.Catch(rows=4)), num_steps=50)


def test_states_are_no_part_of_other_observations():
    assert environment.without_state(np.ones(3)).shape == (3,)
    assert environment.without_state({"a": 1, environment.STATE: 2}) == {"a": 1}


@pytest.mark.parametrize("host", [envpool.EnvPool])
def test_what_runs_on_the_host_is_refused(host):
    with pytest.raises(errors.UserError, match=r"needs a JAX environment.*EnvPool is stepped on"):
        searchable.Searchable(host)
