"""EnvPool: every family under the contract, ends of episodes above all, and users' mistakes.

Axis legend: `T` time, `B` streams.
"""

import os
import pathlib

import envpool as library
import jax
import numpy as np
import pytest
from dm_env import specs

from environments import envpool
from environments.envpool import families
from podracers import environment, types
from podracers.training import experiment
from tests import streams
from tests.environments import host_contract

ROOT = pathlib.Path(__file__).resolve().parents[3]
KEY = jax.random.key(0)
BREAKOUT = {"full_action_space": False, "noop_max": 1, "use_fire_reset": False}
DROP = [1, 0, 0, 0, 0] * 60  # actions of Breakout: fire, and let every ball drop
LIMIT = 12  # agent steps; random play ends some of CartPole's episodes before, some not


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow, id=values[0])


def start(factory, num_envs=1, num_threads=1):
    host = factory.make(KEY, np.arange(num_envs, dtype=np.int32), num_threads)
    return host, host.reset()


def play(factory, actions, num_envs=1):
    """Returns the time steps `[T + 1, B]` of given actions `[T]`, the same for every row."""
    host, timestep = start(factory, num_envs)
    timesteps = [timestep]
    for action in actions:
        shape = (num_envs, *factory.spec.action.shape)
        host.send(np.full(shape, action, factory.spec.action.dtype))
        timesteps.append(host.recv())
    host.close()
    return jax.tree.map(lambda *leaves: np.stack(leaves), *timesteps)


@pytest.mark.parametrize(
    ("task_id", "kinds"),
    [
        ("FrozenLake-v1", [16]),
        ("MiniGrid-Empty-5x5-v0", [4, None, None]),  # the direction, the image, the mission
        ("Jumanji/Snake-v1", [None] * 3),  # a step count has bounds, and exceeds them
    ],
)
def test_observations_that_stand_for_kinds_are_discrete(task_id, kinds):
    leaves = jax.tree.leaves(envpool.EnvPool(task_id).spec.observation)
    assert [getattr(leaf, "num_values", None) for leaf in leaves] == kinds


def first_end(timestep):
    """Returns the index of the first LAST of row 0, and whether the rules ended that episode."""
    end = int(np.argmax(timestep.last()[:, 0]))
    assert end > 0, "no episode ended"
    return end, bool(timestep.terminated()[end, 0])


@pytest.mark.parametrize(
    "task_id, num_steps, settings, random",
    [
        ("CartPole-v1", 100, {}, True),
        ("CartPole-v1", 60, {"action_repeat": 3, "max_episode_steps": 4}, True),
        ("Pendulum-v1", 40, {}, True),
        slow("LunarLander-v3", 40, {}, True),
        slow("HalfCheetah-v4", 40, {}, True),
        ("Hopper-v4", 60, {}, True),
        slow("CartpoleBalance-v1", 30, {}, True),
        ("MiniGrid-LavaGapS5-v0", 40, {}, False),
        ("Jumanji/Snake-v1", 60, {}, True),
        slow("Jumanji/TSP-v1", 60, {}, True),
        slow("Jumanji/Maze-v0", 60, {}, True),
        slow("FrozenLake-v1", 40, {}, False),
        ("highway-v0", 30, {}, True),
        slow("FetchReach-v4", 20, {}, True),
        slow("Pong-v5", 40, {}, False),
        slow("Breakout-v5", 200, {"options": {"repeat_action_probability": 0.25}}, True),
        slow("CartpoleSwingup-v1", 14, {"options": {"from_pixels": True}}, True),
        slow("MetaWorld/Basketball-v3", 30, {}, True),
        slow("gfootball/academy_empty_goal_close-v1", 60, {}, True),
    ],
)
def test_contract_and_truncation(task_id, num_steps, settings, random):
    drivers = pathlib.Path("/usr/share/glvnd/egl_vendor.d")
    if "from_pixels" in settings.get("options", {}) and not any(drivers.glob("*.json")):
        pytest.skip("EGL is not installed")
    factory = envpool.EnvPool(task_id, **{"max_episode_steps": LIMIT} | settings)
    recording = host_contract.check_contract(factory, num_steps, random=random)
    assert recording.timestep.truncated().any()


@pytest.mark.parametrize(
    "task_id, actions, at_limit",
    [
        ("CartPole-v1", [1] * 12, True),
        ("LunarLander-v3", [0] * 120, True),
        ("Hopper-v4", [-1.0] * 120, True),
        ("Jumanji/Snake-v1", [1] * 30, True),
        ("Jumanji/TSP-v1", [3, 3], False),  # a limit of one step cannot be lowered
        ("Jumanji/TSP-v1", list(range(20)), True),
        ("FrozenLake-v1", [1] * 60, True),
        ("highway-v0", [3] * 40, True),
        ("MiniGrid-LavaGapS5-v0", [2, 1] * 20, False),  # lava gives no reward
        ("MiniGrid-Empty-5x5-v0", [2, 2, 1, 2, 2], True),  # into the goal, which gives one
        slow("Breakout-v5", DROP, True),
        slow("gfootball/academy_empty_goal_close-v1", [12] * 200, False),
    ],
)
def test_the_rules_terminate_and_win_over_a_time_limit_on_the_same_step(task_id, actions, at_limit):
    def limited(steps):
        options = BREAKOUT if task_id == "Breakout-v5" else {}
        return first_end(play(envpool.EnvPool(task_id, options, steps), actions))

    end, terminated = limited(None)
    assert terminated
    if at_limit:
        assert limited(end) == (end, True)
        assert limited(end - 1) == (end - 1, False)


@pytest.mark.parametrize(
    ("task_id", "limit", "evidence"),
    [("highway-v0", 40, "info:crashed"), ("Jumanji/Sokoban-v0", 120, "info:solved")],
)
def test_an_end_by_the_rules_on_the_last_step_of_a_fixed_clock_terminates(task_id, limit, evidence):
    task = families.load(task_id, {}, None)
    state = {
        "done": np.array([True, True, True, False]),
        "trunc": np.array([True, True, False, False]),
        "elapsed_step": np.array([limit, limit, 7, 7]),
        evidence: np.array([1, 0, 1, 0]),
    }
    np.testing.assert_array_equal(task.terminated(state), [True, False, True, False])


def test_a_fixed_clock_truncates():
    factory = envpool.EnvPool("Jumanji/RubiksCube-v0")
    assert factory.spec.max_episode_steps == 200
    assert first_end(play(factory, [0] * 200)) == (200, False)
    factory = envpool.EnvPool("Jumanji/Snake-v1", action_repeat=3)
    assert factory.spec.max_episode_steps == 1334  # 4,000 of EnvPool's


def test_with_episodic_life_a_lost_life_terminates():
    options = BREAKOUT | {"episodic_life": True}
    timestep = play(envpool.EnvPool("Breakout-v5", options), DROP)
    assert timestep.terminated()[:, 0].sum() >= 5


def raw(task_id, num_envs, **options):
    seeds = environment.stream_seeds(KEY, np.arange(num_envs)).tolist()
    return library.make_gymnasium(task_id, num_envs=num_envs, seed=seeds, num_threads=1, **options)


@pytest.mark.parametrize(
    "options, channels", [({}, 1), ({"stack_num": 3}, 3), ({"gray_scale": False}, 3)]
)
def test_frames_have_channels_last_and_are_not_stacked(options, channels):
    host, timestep = start(envpool.EnvPool("Pong-v5", options), 2)
    host.close()
    expected = raw("Pong-v5", 2, **{"stack_num": 1} | options).reset()[0]
    assert timestep.observation.shape == (2, 84, 84, channels)
    assert timestep.observation.flags.c_contiguous
    np.testing.assert_array_equal(timestep.observation, np.moveaxis(expected, 1, -1))


def test_rewards_are_not_clipped():
    timestep = play(envpool.EnvPool("MsPacman-v5"), [2] * 80)  # past the tune, to the first pills
    assert timestep.reward.max() >= 10.0


def test_a_joint_mask_makes_the_action_flat():
    factory = envpool.EnvPool("Jumanji/Tetris-v0")
    assert isinstance(factory.spec.action, specs.DiscreteArray)
    assert factory.spec.action.num_values == 40
    host, timestep = start(factory)
    pool = raw("Jumanji/Tetris-v0", 1)
    expected, _ = pool.reset()
    for turn, column in ((1, 3), (0, 7), (2, 0)):
        mask = timestep.observation["action_mask"]
        np.testing.assert_array_equal(mask, expected["action_mask"].reshape(1, 40))
        host.send(np.array([turn * 10 + column], np.int32))
        timestep = host.recv()
        expected, *_ = pool.step(np.array([[turn, column]]))
        np.testing.assert_array_equal(timestep.observation["grid"], expected["grid"])
    host.close()


def test_observation_keys_keep_the_mask():
    factory = envpool.EnvPool("Jumanji/Snake-v1", observation_keys=("grid",))
    _, timestep = start(factory)
    assert set(timestep.observation) == set(factory.spec.observation) == {"grid", "action_mask"}


def test_a_task_with_one_problem_is_reported(caplog):
    for task_id in ("Jumanji/Knapsack-v1", "Jumanji/CVRP-v1"):  # EnvPool 1.2.7 mended the latter
        factory = envpool.EnvPool(task_id)
        for _ in range(2):  # training and evaluation
            envs = factory.make(jax.random.key(0), np.arange(8), 1)
            first = jax.tree.leaves(envs.reset().observation)
            is_one = all(np.all(leaf == leaf[:1]) for leaf in first)
            envs.close()
        assert caplog.text.count("has one problem in all episodes") == is_one


def test_close_ends_the_threads_and_keeps_arrays():
    def threads():
        return len(os.listdir("/proc/self/task"))

    play(envpool.EnvPool("CartPole-v1"), [0])  # starts the threads of libraries
    before = threads()
    host, timestep = start(envpool.EnvPool("CartPole-v1"), 8, num_threads=3)
    assert threads() >= before + 3
    host.send(np.zeros(8, np.int32))  # and is never received
    host.close()
    assert threads() == before
    assert np.isfinite(timestep.observation).all()


@pytest.mark.parametrize(
    "task_id, action_repeat, own_limit, limit, actions",
    [
        ("CartpoleSwingup-v1", 2, 15, 15, [0.3, -0.8, 1.0] * 5),
        ("CartpoleSwingup-v1", 3, None, 334, [0.3, -0.8, 1.0] * 112),  # 1,000 = 333 * 3 + 1
        ("CartPole-v1", 4, None, 125, [1] * 12),  # the pole falls among repeated steps
    ],
)
def test_agent_steps_of_repeated_actions(task_id, action_repeat, own_limit, limit, actions):
    """Rewards add up, and the end of the episode ends the agent step."""
    once = play(envpool.EnvPool(task_id), np.repeat(actions, action_repeat))
    factory = envpool.EnvPool(task_id, {}, own_limit, action_repeat)
    assert factory.spec.max_episode_steps == limit
    repeated = play(factory, actions, num_envs=2)
    final, by_rules = (limit * action_repeat, False) if own_limit else first_end(once)
    end = -(-final // action_repeat)
    assert first_end(repeated) == (end, by_rules)
    arrivals = np.minimum(np.arange(1, end + 1) * action_repeat, final)
    total = np.cumsum(once.reward[: final + 1, 0], dtype=np.float64)[[0, *arrivals]]
    np.testing.assert_allclose(repeated.reward[1 : end + 1, 0], np.diff(total), rtol=1e-4)
    seen, expected = (timestep.observation for timestep in (repeated, once))
    seen = jax.tree.map(lambda leaf: leaf[1 : end + 1, 0], seen)
    expected = jax.tree.map(lambda leaf: leaf[arrivals, 0], expected)
    streams.assert_same(seen, expected, strict=True)
    if end < len(actions):
        assert repeated.first()[end + 1, 0] and repeated.reward[end + 1, 0] == 0.0


@pytest.mark.slow
def test_atari_presets_start_as_their_sources_say():
    """Machado et al. start every game alike, and leave chance to the sticky actions."""

    def first_frames(*files):
        parts = [f"environments/{name}.gin" for name in files]
        loaded = experiment.load(
            [str(ROOT / "gin" / part) for part in ("runners.gin", "agents/ppo.gin", *parts)],
            ["TOTAL_STEPS = 64", "NUM_ENVS = 2", "ROLLOUT_LENGTH = 4"],
        )
        return play(loaded.environment(), [1, 3, 3, 4, 4] * 4, num_envs=8).observation

    new, old = first_frames("breakout"), first_frames("breakout", "atari_classic")
    assert len({frame.tobytes() for frame in new[0]}) == 1
    assert len({frame.tobytes() for frame in new[-1]}) > 1  # where the paddle is
    assert len({frame.tobytes() for frame in old[0]}) > 1


def test_entries_of_info_are_reduced_over_every_step_of_the_simulator():
    """Two episodes of three agent steps, of two of EnvPool's steps each, cut by the adaptor."""
    entry, task_id = "obj_to_target", "MetaWorld/Reach-v3"
    factory = envpool.EnvPool(task_id, {}, 3, 2, metrics={entry: "sum"})
    assert factory.spec.metrics == ("success", entry)
    timestep = play(factory, [0.5] * 7)
    assert timestep.step_type[:, 0].tolist() == [0, 1, 1, 2, 0, 1, 1, 2]
    seeds = environment.stream_seeds(KEY, np.arange(1)).tolist()
    theirs = library.make_gymnasium(task_id, num_envs=1, seed=seeds)
    for end in (3, 7):
        theirs.reset()
        infos = [theirs.step(np.full((1, 4), 0.5))[-1] for _ in range(6)]
        total = sum(info[entry][0] for info in infos)
        np.testing.assert_allclose(timestep.metrics[entry][end], total, rtol=1e-5)
        success = max(info["success"][0] for info in infos)
        np.testing.assert_array_equal(timestep.metrics["success"][end], success)
        assert len({info[entry][0] for info in infos}) == 6


def test_success_belongs_to_the_episode_that_reached_the_goal():
    """The hand of stream 0 moves to its goal in the first of two episodes, that of 1 does not."""
    host, timestep = start(envpool.EnvPool("FetchReach-v4", max_episode_steps=12), 2)
    reported = []
    for time in range(26):
        seen = timestep.observation
        action = np.zeros((2, 4), np.float32)
        if time < 12:
            action[0, :3] = np.clip(10 * (seen["desired_goal"] - seen["achieved_goal"])[0], -1, 1)
        host.send(action)
        timestep = host.recv()
        if not np.all(timestep.step_type == types.MID):
            reported.append((timestep.step_type[0], *timestep.metrics["is_success"]))
    host.close()
    first, last = types.FIRST, types.LAST
    assert reported == [(last, 1, 0), (first, 0, 0), (last, 0, 0), (first, 0, 0)]


@pytest.mark.parametrize(
    ("task_id", "metrics"),
    [
        ("FetchReach-v4", ("is_success",)),
        ("AdroitHandDoor-v1", ("success",)),
        ("MyoSuite/MyoHandAirplaneFixed-v0", ("solved",)),
        ("Jumanji/Sokoban-v0", ("solved",)),
        ("Parking-v0", ("is_success", "crashed")),
        ("Hopper-v4", ()),
    ],
)
def test_families_report_whether_a_task_was_solved(task_id, metrics):
    assert set(envpool.EnvPool(task_id).spec.metrics) == set(metrics)
