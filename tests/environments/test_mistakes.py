"""User mistakes in the options of environments: errors of one line that name the option."""

import functools
import re

import numpy as np
import pytest
from gymnasium import spaces
from jumanji.environments.routing.sokoban import generator as sokoban

from environments import brax, catch, envpool, gymnasium, gymnax, jumanji, probes, wrappers
from environments.meta import delayed_chains, lifetimes, tabular_grids
from podracers import errors
from podracers.training import check

OWN = "tests.environments.own_games:Own/"
_jumanji, _gymnasium, _envpool = jumanji.Jumanji, gymnasium.Gymnasium, envpool.EnvPool
_chains, _grids = delayed_chains.DelayedChains, tabular_grids.TabularGrids
_lifetimes = functools.partial(lifetimes.Lifetimes, _grids(("small",)))

MISTAKES = [
    # A maker, its arguments, and words of the message.
    (gymnax.Gymnax, ("Breakout-MinAtr",), "no environment 'Breakout-MinAtr'; did you mean"),
    (gymnax.Gymnax, ("CartPole-v1", {1: 3}), "Gymnax.options: expected"),
    (gymnax.Gymnax, ("CartPole-v1", {"max_step_in_episode": 3}), "'max_steps_in_episode'"),
    (brax.Brax, ("inverted_pendulm",), "no environment 'inverted_pendulm'; did you mean 'inverted"),
    (brax.Brax, ("inverted_pendulum", {"backend": "sprung"}), "rejects its options "),
    (_jumanji, ("Snak-v1",), "'Snake-v1'"),
    (_jumanji, ("Snake-v1", {"time_limt": 3}), "'time_limit'"),
    (_jumanji, ("Snake-v1", {"num_rows": -3}), "num_rows"),
    (_jumanji, ("Sokoban-v0",), "no network"),
    (_jumanji, ({"Snake-v1": 1},), "Jumanji.name: expected str"),
    (_jumanji, ("Snake-v1", {1: 2}), "Jumanji.options"),
    (_gymnasium, ("CartPol-v1",), "'CartPole-v"),
    (_gymnasium, ("tests.environments.own_games:Own/Wlk-v0",), "'Own/Walk-v0'"),
    (_gymnasium, ("no_such_module:Game-v0",), "'no_such_module'"),
    (_gymnasium, ("CartPole-v1", {"sutton_barto_rewrd": True}), "'sutton_barto_reward'"),
    (_gymnasium, ("CartPole-v1", {1: True}), "Gymnasium.options"),
    (_gymnasium, ("CartPole-v1", {}, "asynch"), "Gymnasium.vectorization"),
    (_gymnasium, ("CartPole-v1", {}, "sync", ("Flatten",)), "Gymnasium.wrappers"),
    (_gymnasium, ("CartPole-v1", {}, "sync", ("gymnasium.wrappers:Flat",)), "Gymnasium.wrappers"),
    (_gymnasium, ("CartPole-v1", {}, "sync", ("gymnasium.wrappers",)), "Gymnasium.wrappers"),
    *(
        (_gymnasium, (f"{OWN}Spaces-v0", options), message)
        for options, message in (
            ({"observation": spaces.Dict({"a": spaces.Text(5)})}, "['a']"),
            (
                {"action": spaces.Tuple([spaces.Box(0, 1), spaces.Discrete(2)])},
                "Box (float32) and Discrete",
            ),
            ({"action": spaces.Box(0, 5, (2,), np.int64)}, "Box (int64)"),
        )
    ),
    (_envpool, ("Pong-v6",), "'Pong-v5'"),
    (_envpool, ("CartPole-v1", {"stack_num": 1}), "stack_num"),
    *(
        (_envpool, ("Pong-v5", options), message)
        for options, message in (
            ({"frameskip": 2}, "'frame_skip'"),
            ({"num_envs": 3}, "num_envs"),
            ({"max_episode_steps": 3}, "EnvPool.max_episode_steps"),
            ({"reward_clip": True}, "reward_clip"),
            ({"noop_max": 0}, "noop_max"),
            ({"frame_skip": "four"}, "Pong-v5"),
            ({1: 2}, "EnvPool.options"),
        )
    ),
    (_envpool, ("Pong-v5", {}, 0), "EnvPool.max_episode_steps"),
    (_envpool, ("Pong-v5", {}, None, 0), "EnvPool.action_repeat"),
    (_envpool, ("Jumanji/Snake-v1", {}, 4001), "at most 4000"),
    (_envpool, ("Jumanji/Snake-v1", {}, 1335, 3), "at most 1334"),
    (_envpool, ("Jumanji/Snake-v1", {}, None, 1, ("gird",)), "'grid'"),
    (_envpool, ("Pong-v5", {}, None, 1, ("grid",)), "EnvPool.observation_keys"),
    (_envpool, ("Go9x9-v1",), "2 agents"),
    (_chains, (("shor",),), "did you mean 'short'"),
    (_chains, (("short",), (1, 3)), "DelayedChains.short"),
    (_chains, (("short",), (5, 30), (9, 3)), "DelayedChains.long"),
    (_grids, (("dens",),), "did you mean 'dense'"),
    (_grids, ((),), "TabularGrids.levels"),
    (_grids, (("small",), (5,)), "TabularGrids.num_actions"),
    (lifetimes.Lifetimes, (catch.Catch,), "expected a family of tasks"),
    (_lifetimes, (64, 120, 3, 2), "max_periods"),
    (_lifetimes, (64, 1), "Lifetimes.period"),
    (wrappers.TimeLimit, ("catch",), "TimeLimit.environment: expected"),
    (wrappers.TimeLimit, (catch.Catch, 0), "max_episode_steps"),
    (
        wrappers.SelectObservation,
        (probes.MaskedAction, ("feature",)),
        "it has action_mask, features",
    ),
    (wrappers.SelectObservation, (catch.Catch, ("image",)), "one array"),
    (wrappers.Searchable, (envpool.EnvPool,), "expected a JAX environment"),
    (wrappers.TimeLimit, (wrappers.Searchable(catch.Catch), 9), "outermost wrapper"),
    (wrappers.FlattenAction, (catch.Catch,), "multi-discrete"),
    (wrappers.StickyActions, (catch.Catch, 1.0), "repeat_probability"),
    (wrappers.StickyActions, (probes.MaskedAction, 0.1), "has an action mask"),
]


@pytest.mark.parametrize(("make", "arguments", "words"), MISTAKES)
def test_a_mistake_is_one_line(make, arguments, words, monkeypatch):
    def refuse(**_):
        raise OSError("no network\nin tests")

    monkeypatch.setattr(sokoban, "hf_hub_download", refuse)
    if make in (brax.Brax, gymnax.Gymnax):
        pytest.importorskip(make.__name__.lower())
    with pytest.raises(errors.UserError, match=re.escape(words)) as caught:
        _ = make(*arguments).spec
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("env_id", "options", "words"),
    [
        ("Drawn-v0", {"fault": "missing"}, "no_such_package"),
        ("Drawn-v0", {"fault": "none"}, "render()"),
        ("Walk-v0", {}, "'rgb_array'"),
    ],
)
def test_an_environment_that_cannot_be_filmed_is_one_line(env_id, options, words):
    with pytest.raises(errors.UserError, match=re.escape(words)) as caught:
        gymnasium.Gymnasium(f"{OWN}{env_id}", options).filmed()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [brax.Brax, gymnax.Gymnax])
def test_a_missing_package_is_named(make, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(errors.UserError, match=rf"pip install.*{make.__name__.lower()}"):
        _ = make("ant").spec


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (_envpool("D1Basic-v1", {"use_combined_action": False}), "from 0 to inf in component [0]"),
        (
            gymnasium.Gymnasium(f"{OWN}Spaces-v0", {"action": spaces.Box(-1.0, np.inf, (2,))}),
            "from -1 to inf in component [0]: expected finite ones",
        ),
    ],
)
def test_continuous_actions_without_bounds_are_refused_before_a_run(factory, words):
    (fault,) = check.spec_faults(factory)
    assert words in fault
