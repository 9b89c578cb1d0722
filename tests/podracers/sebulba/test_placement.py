"""Tests of the choice of devices that act and learn."""

import jax
import pytest

from podracers.sebulba import placement

DEVICES = tuple(range(8))  # `plan` uses no attribute of a device


def _split(count, num_envs=96, rows=2, actors=None, learners=None):
    plan = placement.plan([DEVICES[:count]], 0, num_envs, rows, actors, learners)
    return plan.actors, plan.learners


@pytest.mark.parametrize(
    ("count", "options", "actors", "learners"),
    [
        # By default about one device in four acts, and the streams divide.
        (1, {}, (0,), (0,)),
        (2, {}, (0,), (1,)),
        (4, {}, (0,), (1, 2, 3)),
        (8, {}, (0, 1), (2, 3, 4, 5, 6, 7)),
        (4, {"num_envs": 8}, (0, 1), (2, 3)),
        (3, {"num_envs": 8}, (0,), (1, 2)),
        # Given devices are used.
        (8, {"actors": (0, 1)}, (0, 1), (2, 3, 4, 5, 6, 7)),
        (8, {"learners": (4, 5, 6)}, (0,), (4, 5, 6)),
        (1, {"actors": (0, 0)}, (0, 0), (0,)),
        (4, {"actors": (0, 1, 2, 3)}, (0, 1, 2, 3), (0, 1, 2, 3)),
        (4, {"actors": (3,), "learners": (3,)}, (3,), (3,)),
    ],
)
def test_split(count, options, actors, learners):
    assert _split(count, **options) == (actors, learners)


@pytest.mark.parametrize(
    ("actors", "learners", "counts", "text"),
    [
        ((0,), (1, 2), (2, 1), "actors on cpu 0, learner on cpu 1, 2"),
        ((0, 0), (0,), (1, 2), "cpu 0, 0 shared by 2 actor threads and the learner"),
    ],
)
def test_learners_of_actors_and_description(actors, learners, counts, text):
    devices = jax.devices()
    actors, learners = ([devices[index] for index in part] for part in (actors, learners))
    plan = placement.Placement(tuple(actors), tuple(learners), ())
    assert (plan.learners_per_actor, plan.actors_per_learner) == counts
    assert plan.describe() == text
