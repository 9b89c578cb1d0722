"""Which devices act and which learn."""

import jax
import pytest

from podracers import errors
from podracers.sebulba import placement

DEVICES = tuple(range(8))  # what is planned with is looked at by nobody


def _split(count, num_envs=96, rows=2, actors=None, learners=None):
    plan = placement.plan([DEVICES[:count]], 0, num_envs, rows, actors, learners)
    return plan.actors, plan.learners


@pytest.mark.parametrize(
    ("count", "actors", "learners"),
    [
        (1, (0,), (0,)),
        (2, (0,), (1,)),
        (4, (0,), (1, 2, 3)),
        (8, (0, 1), (2, 3, 4, 5, 6, 7)),
    ],
)
def test_where_nobody_names_devices_one_in_four_acts(count, actors, learners):
    assert _split(count) == (actors, learners)


def test_the_streams_decide_where_one_in_four_would_not_divide():
    assert _split(4, num_envs=8) == ((0, 1), (2, 3))
    assert _split(3, num_envs=8) == ((0,), (1, 2))


def test_what_is_named_is_taken():
    assert _split(8, actors=(0, 1)) == ((0, 1), (2, 3, 4, 5, 6, 7))
    assert _split(8, learners=(4, 5, 6)) == ((0,), (4, 5, 6))
    assert _split(1, actors=(0, 0)) == ((0, 0), (0,))
    assert _split(4, actors=(0, 1, 2, 3)) == ((0, 1, 2, 3), (0, 1, 2, 3))
    assert _split(4, actors=(3,), learners=(3,)) == ((3,), (3,))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"actors": (0, 4)}, r"actor_devices = \(0, 4\): this machine has 4 devices.*device 4"),
        ({"actors": ()}, "actor_devices is empty"),
        ({"learners": (1, 1)}, "names a device twice"),
        ({"actors": (0, 1, 2), "learners": (0, 3)}, "3 actors cannot feed 2 learner devices"),
        ({"actors": (0,), "num_envs": 32}, "32 does not divide over 1 actors.*use 30 or 36"),
        ({"actors": (0,), "learners": (1,), "num_envs": 1}, "use 2$"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(arguments, message):
    with pytest.raises(errors.UserError, match=message):
        _split(4, **arguments)


def test_slices_and_pieces():
    few = placement.Placement((0, 1), (2, 3, 4, 5), ())
    assert (few.learners_per_actor, few.actors_per_learner) == (2, 1)
    many = placement.Placement((0, 0, 1, 1), (2,), ())
    assert (many.learners_per_actor, many.actors_per_learner) == (1, 4)


def test_the_plan_is_said_in_words():
    one, two, three, _ = jax.devices()
    assert placement.Placement((one,), (two, three), ()).describe() == (
        "actors on cpu 0, learner on cpu 1, 2"
    )
    assert "0 shared by 2 actor threads" in placement.Placement((one, one), (one,), ()).describe()
    assert "(1 shared)" in placement.Placement((two,), (two, three), ()).describe()
