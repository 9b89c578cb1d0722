"""User mistakes in the options of environments: errors of one line that name the option."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from dm_env import specs
from gymnasium import spaces
from gymnasium import wrappers as gymnasium_wrappers
from jumanji.environments.routing.sokoban import generator as sokoban

from environments import (
    adaptors,
    brax,
    cartpole,
    catch,
    craftax,
    envpool,
    gymnasium,
    gymnax,
    jaxmarl,
    jumanji,
    opponents,
    pgx,
    playground,
    probes,
    randomized,
    wrappers,
    xminigrid,
)
from environments.meta import delayed_chains, lifetimes, tabular_grids
from podracers import environment, errors

XLAND = "XLand-MiniGrid-R1-9x9"
OWN = "tests.environments.own_games:Own/"
_BOX, _LARGE = spaces.Box(-1, 1), spaces.Discrete(2**40)
_jumanji, _gymnasium, _envpool = jumanji.Jumanji, gymnasium.Gymnasium, envpool.EnvPool
_playground, _xminigrid = playground.Playground, xminigrid.XMiniGrid
_craftax = craftax.Craftax
_chains, _grids = delayed_chains.DelayedChains, tabular_grids.TabularGrids
_randomized = functools.partial(randomized.Randomized, cartpole.CartPole)
_lifetimes = functools.partial(lifetimes.Lifetimes, _grids(("small",)))


def _against(make, name):
    pytest.importorskip("pgx")
    return opponents.Against(make(name))


def _limited(name):
    return wrappers.TimeLimit(pgx.Pgx(name), max_episode_steps=5)


class _Parts(catch.Catch):
    """An action of 33 parts of two values each."""

    @property
    def spec(self):
        action = specs.BoundedArray((33,), np.int32, 0, 1)
        return dataclasses.replace(super().spec, name="Parts", action=action)


MISTAKES = [
    # A maker, its arguments, and words of the message.
    (wrappers.StickyActions, (probes.TwoAgents,), "is for one agent, and TwoAgents has 2"),
    (wrappers.Searchable, (probes.TwoAgents,), "Searchable is for one agent"),
    (_jumanji, ("Snake-v1", {}, True), "Jumanji.agents: expected False for Snake-v1"),
    (jaxmarl.JaxMARL, ("MPE_simple_v3",), "no environment of several agents 'MPE_simple_v3'"),
    (jaxmarl.JaxMARL, ("overcooked", {"layout": "cramped"}), "did you mean 'cramped_room'"),
    (jaxmarl.JaxMARL, ("MPE_simple_tag_v3", {}, False, False, 1.0), "JaxMARL.shaping: expected 0"),
    (gymnax.Gymnax, ("Breakout-MinAtr",), "no environment 'Breakout-MinAtr'; did you mean"),
    (gymnax.Gymnax, ("CartPole-v1", {1: 3}), "Gymnax.options: expected"),
    (gymnax.Gymnax, ("CartPole-v1", {"max_step_in_episode": 3}), "'max_steps_in_episode'"),
    (gymnax.Gymnax, ("CartPole-v1", {"gravity": "x"}), "gravity: expected float, got 'x'"),
    (gymnax.Gymnax, ("CartPole-v1", {"max_steps_in_episode": 2**40}), "beyond int32"),
    (gymnax.Gymnax, ("DeepSea-bsuite", {"size": 0}), "options {'size': 0}: ZeroDivisionError"),
    (gymnax.Gymnax, ("SimpleBandit-bsuite", {"num_actions": 2**40}), "SimpleBandit-bsuite"),
    (brax.Brax, ("inverted_pendulm",), "no environment 'inverted_pendulm'; did you mean 'inverted"),
    (brax.Brax, ("inverted_pendulum", {"backend": "sprung"}), "cannot be made with options {'b"),
    (_playground, ("CartpolSwingup",), "no environment 'CartpolSwingup'; did you mean 'Cartpole"),
    (_playground, ("Go1Getup-v1",), "no environment 'Go1Getup-v1'; did you mean 'Go1Getup'"),
    (_playground, ("Go1Getup",), "with envpool.EnvPool.task_id = 'Go1Getup-v1'"),
    (_playground, ("PointMass", {"ctrl_d": 0.1}), "no option 'ctrl_d'; did you mean 'ctrl_dt'?"),
    (_playground, ("PointMass", {"impl": "warp"}), "no option 'impl'; known: ctrl_dt, naconmax"),
    (_playground, ("PointMass", {"ctrl_dt": "x"}), "cannot be made with options {'ctrl_dt': 'x'}"),
    (_playground, ("PointMass", {"ctrl_dt": 0.001}), "expected 0 < sim_dt <= ctrl_dt"),
    (_playground, ("PointMass", {}, 0), "Playground.episode_length"),
    (_playground, ("PointMass", {}, 9, 0), "Playground.action_repeat"),
    (_xminigrid, ("MiniGrid-DorKey-5x5",), "'MiniGrid-DorKey-5x5'; did you mean 'MiniGrid-Door"),
    (_xminigrid, ("MiniGrid-Empty-5x5", {"max_step": 3}), "no option 'max_step'; did you m"),
    (_xminigrid, ("MiniGrid-Empty-5x5", {"max_steps": 0}), "max_steps: expected a positive int"),
    (_xminigrid, ("MiniGrid-Empty-5x5", {"height": "x"}), "cannot be made with options {'height'"),
    (_xminigrid, ("MiniGrid-Empty-5x5", {"ruleset": 3}), "no option 'ruleset'"),
    (_xminigrid, (XLAND,), "has no goal without rules: expected the option {'ruleset': (BENCHMARK"),
    (_xminigrid, (XLAND, {"ruleset": ("trivial", 0)}), "no benchmark 'trivial'; did you mean 'tri"),
    (_craftax, ("Craftax-Symbolc-v1",), "no environment 'Craftax-Symbolc-v1'; did you mean 'Craf"),
    (_craftax, ("Craftax-Symbolic-v1", {"max_timestep": 3}), "'max_timesteps'"),
    (_craftax, ("Craftax-Symbolic-v1", {"max_timesteps": 0}), "max_timesteps: expected a positive"),
    (_craftax, ("Craftax-Symbolic-v1", {"day_length": "x"}), "day_length: expected int, got 'x'"),
    (_jumanji, ("Snak-v1",), "'Snake-v1'"),
    (_jumanji, ("Snake-v1", {"time_limt": 3}), "'time_limit'"),
    (_jumanji, ("Snake-v1", {"num_rows": -3}), "num_rows"),
    (_jumanji, ("Sokoban-v0",), "no network"),
    (_jumanji, ("CVRP-v1", {"generator": 1}), "{'generator': 1}: AttributeError: 'int' object has"),
    (_jumanji, ("Cleaner-v0", {"generator": {"RandmGenerator": {}}}), "'RandomGenerator'"),
    (_jumanji, ("Snake-v1", {"num_rows": 0}), "Jumanji's Snake-v1 cannot be made with options"),
    (_jumanji, ("TSP-v1", {"reward_fn": 3}), "TypeError: 'int' object is not callable"),
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
    (_gymnasium, (f"{OWN}Normalized-v0",), "normalize_rewards of the agent"),
    *(
        (_gymnasium, ("CartPole-v1", {}, "sync", (wrapper,)), option)
        for wrapper, option in (
            ("gymnasium.wrappers:NormalizeReward", "normalize_rewards"),
            ("gymnasium.wrappers.vector:NormalizeReward", "normalize_rewards"),
            (type("Scaled", (gymnasium_wrappers.NormalizeObservation,), {}), "normalize_obs"),
        )
    ),
    *(
        (_gymnasium, (f"{OWN}Spaces-v0", {kind: space}), message)
        for kind, space, message in (
            ("observation", spaces.Dict({"a": spaces.Text(5)}), "['a']"),
            ("action", spaces.Tuple([_BOX, spaces.Discrete(2)]), "Box (float32) and gymnasium"),
            ("action", spaces.Box(0, 5, (2,), np.int64), "Box (int64)"),
            ("action", spaces.OneOf([spaces.Discrete(2)]), "got gymnasium.spaces.oneof.OneOf"),
            ("action", _LARGE, "Own/Spaces-v0: number of values of its action: "),
            ("action", spaces.MultiDiscrete([2, 2**33]), "expected at most 2147483647, got 8589"),
            ("observation", _LARGE, "number of values of its observation: "),
            (
                "observation",
                spaces.Tuple([spaces.MultiDiscrete([2, 2**40])]),
                "its observation['0']",
            ),
            ("observation", spaces.Graph(_BOX, None), "graph.Graph"),
        )
    ),
    (_gymnasium, ("CartPole-v1", {}, "sync", (), {"x": "min"}), "metrics['x']: got 'min'"),
    (_gymnasium, (f"{OWN}Wrong-v0", {"step": "no seed"}), "expected reset(*, seed=None"),
    (_envpool, ("Pong-v6",), "'Pong-v5'"),
    (_envpool, ("Reach-v3",), "did you mean 'MetaWorld/Reach-v3' or 'HandReach-v3' or 'Reacher"),
    (_envpool, ("HalfCheetah",), "'HalfCheetah-v5' or 'HalfCheetah-v4'"),
    (_envpool, ("ElbowPose",), "ElbowPose1D6MExoFixed-v0' or "),
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
    *(
        (_envpool, ("MetaWorld/Reach-v3", {}, None, 1, None, metrics), message)
        for metrics, message in (
            ({"sucess": "max"}, "'success'"),
            ({"success": "maximum"}, "metrics['success']: got 'maximum'; did you mean 'max'"),
            ({"success": 1}, "EnvPool.metrics"),
        )
    ),
    (_envpool, ("Ant-v4", {}, None, 1, None, {"state": "max"}), "has no number 'state'"),
    (
        _envpool,
        ("SparrowMahjong-v1",),
        "EnvPool's SparrowMahjong-v1 has 3 players: expected a task for one, or for two that",
    ),
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
    (wrappers.SelectObservation, (probes.MaskedAction, ("feature",)), "has action_mask, features"),
    (wrappers.SelectObservation, (catch.Catch, ("image",)), "one array"),
    *(
        (wrapper, (host,), "environment: expected a JAX environment, got a host environment: env")
        for wrapper, host in (
            (wrappers.Searchable, envpool.EnvPool),
            (wrappers.StickyActions, envpool.EnvPool("CartPole-v1")),
            (wrappers.TimeLimit, lambda: gymnasium.Gymnasium("CartPole-v1")),
        )
    ),
    (wrappers.TimeLimit, (wrappers.Searchable(catch.Catch), 9), "outermost wrapper"),
    (wrappers.FlattenAction, (catch.Catch,), "multi-discrete"),
    (wrappers.FlattenAction, (_Parts,), "Parts: number of joint actions: expected at most 21474"),
    *(
        (_randomized, (ranges,), words)
        for ranges, words in (
            ({}, "Randomized.ranges: expected one parameter or more, got none"),
            ({"gravty": (0.5, 2.0)}, "has no float parameter 'gravty'; did you mean 'gravity'?"),
            ({"max_episode_steps": (0.5, 2.0)}, "'max_episode_steps'; known: cart_mass, force, gr"),
            ({"gravity": (2.0, 0.5)}, "['gravity']: expected factors (lowest, highest), finite"),
            ({"gravity": (0.5, float("nan"))}, "got (0.5, nan)"),
            ({"gravity": (0.5, 1e39)}, "got (0.5, 1e+39)"),
            ({"gravity": (-1.0, 1.0)}, "got (-1.0, 1.0)"),
            ({"gravity": 1.1}, "Randomized.ranges: expected"),
        )
    ),
    *(
        (randomized.Randomized, (other, {"body_mass": (0.5, 2.0)}), words)
        for other, words in (
            (gymnax.Gymnax("CartPole-v1"), "CartPole-v1 (environments.gymnax.Gymnax) has no para"),
            (catch.Catch, "Catch (environments.catch.Catch) has no parameters"),
            (envpool.EnvPool("CartPole-v1"), "expected a JAX environment, got a host environment"),
            (wrappers.TimeLimit(cartpole.CartPole, 9), "without wrappers, which go around"),
            (wrappers.StickyActions(cartpole.CartPole), "got environments.wrappers.StickyActions"),
            (brax.Brax("inverted_pendulum", {"backend": "spring"}), "parameter 'body_mass'"),
        )
    ),
    (pgx.Pgx, ("tictactoe",), "did you mean 'tic_tac_toe'"),
    (pgx.Pgx, ("sparrow_mahjong",), "sparrow_mahjong has 3 players, supported are 1 and 2"),
    (pgx.Pgx, ("hex", {"sise": 5}), "has no option"),
    (_against, (pgx.Pgx, "2048"), "expected a game of two players"),
    (_against, (_limited, "tic_tac_toe"), "put wrappers.TimeLimit around Against"),
    (_envpool, ("Hex-v1", {}, 9), "expected no max_episode_steps"),
    *(
        (adaptors.action_codec, ("Game", shape, np.int64, 0, highest, mask), "Game: number of val")
        for shape, highest, mask in (
            ((), 2**31 - 1, None),
            ((2,), [1, 2**40], None),
            ((2,), 2**16, (2**16 + 1,) * 2),
        )
    ),
    (wrappers.StickyActions, (catch.Catch, 1.0), "repeat_probability"),
    (wrappers.StickyActions, (probes.MaskedAction, 0.1), "has an action mask"),
]


OPTIONAL = {
    brax.Brax: "brax",
    _craftax: "craftax",
    gymnax.Gymnax: "gymnax",
    _playground: "mujoco_playground",
    _xminigrid: "xminigrid",
    jaxmarl.JaxMARL: "jaxmarl",
    pgx.Pgx: "pgx",
}


@pytest.mark.parametrize(("make", "arguments", "words"), MISTAKES)
def test_a_mistake_is_one_line(make, arguments, words, monkeypatch):
    def refuse(**_):
        raise OSError("no network\nin tests")

    monkeypatch.setattr(sokoban, "hf_hub_download", refuse)
    for kind in {make, *map(type, arguments)} & {*OPTIONAL}:
        pytest.importorskip(OPTIONAL[kind])
    with pytest.raises(errors.UserError, match=re.escape(words)) as caught:
        _ = make(*arguments).spec
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("candidate", "name"),
    [
        (wrappers.TimeLimit(jumanji.Jumanji("Snake-v1")), r"Snake-v1 \(.*\.Jumanji\)"),
        (gymnasium.Gymnasium(f"{OWN}Walk-v0"), r"Own/Walk-v0 \(.*\.Gymnasium\)"),
        (envpool.EnvPool("Pong-v5"), r"Pong-v5 \(.*\.EnvPool\)"),
    ],
)
def test_broken_contracts_name_the_id(candidate, name):
    with pytest.raises(errors.UserError, match=f"^environment {name}: a fault$"):
        environment.refuse(candidate, ["a fault"])


def test_a_module_of_a_wrapper_that_fails_is_one_line(monkeypatch, tmp_path):
    (tmp_path / "outdated_wrapper.py").write_text("raise AttributeError('an old name')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(errors.UserError, match=r"got 'outdated_wrapper:Wrap' .an old name"):
        _ = gymnasium.Gymnasium("CartPole-v1", {}, "sync", ("outdated_wrapper:Wrap",)).spec


_ZEROS = np.zeros(3, np.float32)
_PAIR = spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Discrete(3, start=1)])
_DICT = spaces.Dict({"a": spaces.Box(-1, 1, ()), "b": spaces.MultiBinary(2)})


def _step(observation=_ZEROS, reward=0.0, terminated=False, truncated=False, **info):
    return {"step": (observation, reward, terminated, truncated, info)}


def _seen(observation, space=None):
    return {"observation": observation} | ({"space": space} if space else {})


WRONG_RESULTS = [
    # Options of `own_games.Wrong`, and the message after its name.
    ({"reset": _ZEROS}, "reset returned ndarray, as Gym's did; expected 2 (observation, in"),
    ({"step": (_ZEROS, 0.0, False, {})}, "step returned 4 values, as Gym's did; expected 5 (obs"),
    ({"step": (_ZEROS, 0.0)}, "step returned 2 values; expected 5 (observation, reward, term"),
    (_step(reward=None), "reward: expected float32[], got NoneType"),
    (_step(reward=np.zeros(1)), "reward: expected float32[], got float64[1]"),
    (_step(reward=-1e39), "reward: the value -1e+39 lies outside of float"),
    (_step(terminated=np.zeros(1)), "terminated: expected bool[], got bool[1]"),
    (_step(x=[1.0]), "info['x'], which Gymnasium.metrics names: expected a number, got list"),
    (_step(np.zeros(4)), "observation: expected float32[3], got float64[4"),
    (_seen(np.array(["a", "b", "c"])), "observation: expected float32[3], got <U1[3]"),
    (_seen(np.array([1e300, 0, 0])), "observation: the value 1e+300 lies outside of float"),
    (_seen(np.zeros(3), spaces.Box(0, 9, (3,), np.int32)), "expected int32[3], got float64[3]"),
    (_seen([0, 256, 0], spaces.Box(0, 255, (3,), np.uint8)), "value 256 lies outside of uint8"),
    (_seen(4, spaces.Discrete(3, start=1)), "the value 4 lies outside of its Discrete"),
    (_seen([1, 3], spaces.MultiDiscrete([2, 3])), "the value 3 lies outside of its Multi"),
    (_seen([1, 2], spaces.MultiBinary(2)), "observation: the value 2 lies outside of bool"),
    (_seen(([0.0, 0.0],), _PAIR), "observation: expected a Tuple of [0, 1], got tuple[1]"),
    (_seen(([0.0, 0.0], 0), _PAIR), "observation['1']: the value 0 lies"),
    (_seen({"a": 0.0}, _DICT), "observation: expected a Dict of ['a', 'b'], got dict['a']"),
    (_seen(_ZEROS, _DICT), "observation: expected a Dict of ['a', 'b'], got float32[3]"),
    (_seen({"a": [0.0], "b": [0, 1]}, _DICT), "observation['a']: expected float32[], got list[1]"),
]


@pytest.mark.parametrize(("options", "words"), WRONG_RESULTS)
def test_a_wrong_result_of_a_gymnasium_environment_is_one_line(options, words):
    factory = gymnasium.Gymnasium(f"{OWN}Wrong-v0", options, metrics={"x": "max"})
    host = factory.make(jax.random.key(0), np.arange(2), 1)
    with pytest.raises(errors.UserError, match=f"^Own/Wrong-v0: .*{re.escape(words)}") as caught:
        host.reset()
        host.send(np.zeros(2, np.int32))
        host.recv()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("env_id", "options", "words"),
    [
        ("Drawn-v0", {"fault": "missing"}, "no_such_package"),
        ("Drawn-v0", {"fault": "none"}, "render: expected uint8"),
        ("Walk-v0", {}, "'rgb_array'"),
    ],
)
def test_an_environment_that_cannot_be_filmed_is_one_line(env_id, options, words):
    with pytest.raises(errors.UserError, match=re.escape(words)) as caught:
        gymnasium.Gymnasium(f"{OWN}{env_id}", options).filmed()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", OPTIONAL)
def test_a_missing_package_is_named(make, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(errors.UserError, match=rf"pip install.*{make.__name__.lower()}"):
        _ = make("ant").spec
