"""Tests of human-normalised scores."""

import envpool
import pytest

from podracers import errors


@pytest.fixture(scope="module")
def atari_scores(tools):
    return tools("results.atari_scores").atari_scores


def test_there_are_57_games_and_envpool_has_each(atari_scores):
    assert len(atari_scores.REFERENCES) == 57
    assert not {f"{game}-v5" for game in atari_scores.REFERENCES} - set(envpool.list_all_envs())


def test_a_random_policy_scores_0_and_a_human_1(atari_scores):
    for game, (random, human) in atari_scores.REFERENCES.items():
        assert human > random
        assert atari_scores.normalized(game, random) == 0.0
        assert atari_scores.normalized(game, human) == 1.0


def test_known_scores(atari_scores):
    assert atari_scores.normalized("Pong", 16.0) == pytest.approx(36.7 / 35.3)
    assert atari_scores.normalized("Breakout", 59.3) == pytest.approx(2.0)
    assert atari_scores.normalized("Skiing", -17098.1 - 12761.2) == pytest.approx(-1.0)


def test_an_unknown_game_gets_the_nearest(atari_scores):
    with pytest.raises(errors.UserError, match="no Atari game 'Pong-v5'; did you mean 'Pong'"):
        atari_scores.normalized("Pong-v5", 0.0)


def test_aggregates_over_games(atari_scores):
    found = atari_scores.summarize(
        {"Pong": [14.6, 14.6], "Boxing": [0.1, 24.1], "Freeway": [0.0, 0.0]}
    )
    assert found["median"].value == pytest.approx(1.0)
    assert found["mean"].value == pytest.approx(2 / 3)
    # Of 0, 0, 0, 1, 1, 2 one is left out at either end.
    assert found["interquartile mean"].value == pytest.approx(0.5)
    assert found["mean"].interval == pytest.approx((1 / 3, 1.0))
