"""Gymnasium's environments keep the contract, in this process and in workers."""

import contextlib
import os
import resource
import signal
import sys
import threading
import time

import gymnasium as gym
import jax
import numpy as np
import pytest
from dm_env import specs
from gymnasium import spaces

from environments import envpool, gymnasium
from environments.gymnasium import async_vector
from environments.gymnasium import spaces as gymnasium_spaces
from podracers import environment, errors, types
from podracers import host_contract as host_contract_lib
from tests import processes, streams
from tests.environments import host_contract

KEY = jax.random.key(3)
OWN = "tests.environments.own_games:Own/"
METRICS = {"highest": "max", "total": "sum", "average": "mean", "goal": "last"}
SUBJECTS = {
    "cartpole": gymnasium.Gymnasium("CartPole-v1", {"max_episode_steps": 25}),
    "continuous": gymnasium.Gymnasium("Pendulum-v1", {"max_episode_steps": 30}),
    "tuple": gymnasium.Gymnasium("Blackjack-v1"),
    "discrete": gymnasium.Gymnasium("FrozenLake-v1"),
    "own": gymnasium.Gymnasium(f"{OWN}Walk-v0", metrics=METRICS),
    "picture": gymnasium.Gymnasium(f"{OWN}Picture-v0"),
    "own in workers": gymnasium.Gymnasium(f"{OWN}Walk-v0", vectorization="async", metrics=METRICS),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("cartpole", "own")))
        for name in SUBJECTS
    ],
)
def test_keeps_the_contract(name):
    recording = host_contract.check_contract(SUBJECTS[name])
    assert np.all(np.any(recording.timestep.last(), axis=0))


def _record(factory, num_steps=60, num_threads=1):
    with contextlib.closing(factory.make(KEY, np.arange(5, dtype=np.int32), num_threads)) as host:
        return host_contract_lib.record(host, factory.spec, num_steps)


def test_workers_play_the_same_episodes():
    recordings = [_record(SUBJECTS[name], num_threads=2) for name in ("own", "own in workers")]
    streams.assert_same(*recordings, strict=True)


@pytest.mark.parametrize("vectorization", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_images_with_channels_first_are_transposed(vectorization):
    wrappers = ("tests.environments.own_games:ChannelsFirst",)
    factory = gymnasium.Gymnasium(f"{OWN}Picture-v0", {}, vectorization, wrappers)
    recordings = [_record(factory, 12), _record(SUBJECTS["picture"], 12)]
    assert factory.spec.observation.shape == (12, 20, 3)
    streams.assert_same(*recordings, strict=True)
    assert recordings[0].timestep.observation.any()


def test_equals_gymnasium_step_by_step():
    factory = SUBJECTS["cartpole"]
    env_id = np.array([7, 2], np.int32)
    host = factory.make(KEY, env_id, 1)
    seed = int(environment.stream_seeds(KEY, env_id)[1])
    theirs = gym.make("CartPole-v1", max_episode_steps=25)
    timestep, ends = host.reset(), []
    observation, _ = theirs.reset(seed=seed)
    for t in range(300):
        np.testing.assert_array_equal(timestep.observation[1], observation)
        # Some episodes balance up to the limit.
        action = np.array([0, observation[2] > 0 if t % 100 < 60 else 1], np.int32)
        last = timestep.last()[1]
        host.send(action)
        timestep = host.recv()
        if last:
            observation, _ = theirs.reset()
            expected = (0.0, 1.0, types.FIRST)
        else:
            observation, reward, terminated, truncated, _ = theirs.step(int(action[1]))
            end = terminated or truncated
            expected = (reward, float(not terminated), types.LAST if end else types.MID)
            ends += [terminated] if end else []
        got = (timestep.reward[1], timestep.discount[1], timestep.step_type[1])
        assert got == expected
    host.close()
    assert set(ends) == {False, True}


def test_termination_wins_over_truncation_by_the_environment():
    timestep = _record(SUBJECTS["own"], 400).timestep
    room = timestep.observation["room"]
    at_goal = (room == 0) | (room == 6)
    steps = timestep.observation["steps"]
    np.testing.assert_array_equal(timestep.last(), at_goal | (steps == 9))
    np.testing.assert_array_equal(timestep.discount == 0.0, at_goal)
    assert np.any(timestep.truncated()) and np.any(at_goal & (steps == 9))
    np.testing.assert_array_equal(timestep.observation["place"][..., 0], room - 3)


def test_entries_of_info_are_reported_for_each_episode():
    """`goal` is absent in most steps, and in episodes that are cut."""
    timestep, goals = _record(SUBJECTS["own"], 100).timestep, set()
    x = timestep.observation["room"] - 3
    for stream in range(x.shape[1]):
        places = []  # of the episode so far
        for t in range(x.shape[0]):
            row = t, stream
            places = [] if timestep.first()[row] else [*places, x[row]]
            goal = x[row] if timestep.terminated()[row] else 0
            expected = {"highest": max(places, default=0), "total": sum(places), "goal": goal}
            expected["average"] = expected["total"] / max(len(places), 1)
            reported = {name: values[row] for name, values in timestep.metrics.items()}
            assert reported == pytest.approx(expected)
            goals |= {int(goal)}
    assert goals == {-3, 0, 3}


def test_options_and_wrappers_reach_the_environment(caplog):
    wrappers = ("tests.environments.own_games:Half", lambda env: gym.wrappers.TimeLimit(env, 4))
    factory = gymnasium.Gymnasium(f"{OWN}Walk-v0", {"goal": 2}, "async", wrappers)
    spec = factory.spec
    assert (spec.observation["room"].num_values, spec.max_episode_steps) == (5, 4)
    assert "own_games.Half changes rewards" in caplog.text
    recording = _record(factory)
    assert set(np.unique(recording.timestep.reward)) == {-0.5, 0.0, 0.5}
    assert recording.timestep.observation["steps"].max() == 4


def test_observation_specs():
    observation = SUBJECTS["own"].spec.observation
    assert (observation["place"].dtype, observation["steps"].dtype) == (np.float32, np.int32)
    assert (observation["action_mask"].dtype, observation["action_mask"].shape) == (bool, (3,))
    kinds = [environment.num_values(leaf) for leaf in jax.tree.leaves(observation)]
    assert [None if sizes is None else sizes.tolist() for sizes in kinds] == [
        *(None, None, [10, 3], None, [7], None)  # the mask, `pair`, `place`, `room`, `steps`
    ]
    assert gymnasium_spaces.ACTION_MASK == environment.ACTION_MASK


_TREE = spaces.Dict(
    {
        "move": spaces.Discrete(3, start=5),
        "keys": spaces.MultiBinary((2, 1)),
        "tools": spaces.Tuple([spaces.MultiDiscrete([4, 2], start=[1, 1])]),
    }
)
_ARMS = spaces.Tuple(
    [
        spaces.Box(np.array([[-1.0, 0.1]]), np.array([[1.0, 0.3]]), dtype=np.float64),
        spaces.Box(0.0, 2.0, (1,), np.float32),
    ]
)


def test_trees_of_discrete_actions_become_multi_discrete():
    spec = gymnasium_spaces.action_spec(_TREE, "tree")
    most = {"move": [2], "keys": [1, 1], "tools": [3, 1]}  # the space sorts its keys
    assert spec.maximum.tolist() == [part for name in _TREE.spaces for part in most[name]]
    decoded = gymnasium_spaces.decode(_TREE, np.stack([np.zeros(5, np.int32), spec.maximum]))
    batch = gym.vector.utils.batch_space(_TREE, 2)
    assert all(_TREE.contains(one) for one in gym.vector.utils.iterate(batch, decoded))
    assert decoded["move"].tolist() == [5, 7]
    assert decoded["keys"][1].tolist() == [[1], [1]]
    assert decoded["tools"][0].tolist() == [[1, 1], [4, 2]]


@pytest.mark.parametrize(
    ("space", "shape"), [(_ARMS, (3,)), (spaces.Box(-1.0, 1.0, (2, 3)), (2, 3))]
)
def test_trees_of_continuous_actions_become_vectors(space, shape):
    spec = gymnasium_spaces.action_spec(space, "arms")
    assert isinstance(spec, specs.BoundedArray) and spec.shape == shape
    # In 32 bits, 0.1 is a little more and 0.3 a little less, or the other way round.
    decoded = gymnasium_spaces.decode(space, np.stack([spec.minimum, spec.maximum]))
    batch = gym.vector.utils.batch_space(space, 2)
    assert all(space.contains(one) for one in gym.vector.utils.iterate(batch, decoded))


@pytest.mark.parametrize(
    ("space", "value", "dtype"),
    [
        (spaces.Box(0, 2**40, (), np.int64), 7, np.int32),
        (spaces.Box(0, 255, (2,), np.uint8), np.array([0, 255]), np.uint8),
        (spaces.Box(-1, 1, (2,)), [0.5, np.inf], np.float32),
        (spaces.Box(-1, 1, ()), np.array(True), np.float32),
        (spaces.MultiBinary(1), [1], np.bool_),
    ],
)
def test_numbers_that_fit_are_converted(space, value, dtype):
    batch = gymnasium_spaces.read(space, [value] * 2, "box")
    assert batch.dtype == dtype
    np.testing.assert_array_equal(batch, [value] * 2)


@pytest.mark.parametrize(
    ("vectorization", "pause"),
    [("sync", 0.0), ("async", 0.0), pytest.param("async", 2.5, marks=pytest.mark.slow)],
)
def test_all_environments_are_closed_and_the_first_failure_is_raised(
    vectorization, pause, capfd, monkeypatch
):
    wrappers = ("tests.environments.own_games:Unclosable",)
    factory = gymnasium.Gymnasium(f"{OWN}Walk-v0", {}, vectorization, wrappers)
    host = factory.make(KEY, np.arange(6, 10, dtype=np.int32), 2)
    host.reset()
    running = list(host._vector._processes) if vectorization == "async" else []
    if pause:  # seconds in which a busy machine does not run a worker
        running[0].send_signal(signal.SIGSTOP)
        threading.Timer(pause, running[0].send_signal, (signal.SIGCONT,)).start()
    else:
        monkeypatch.setattr(async_vector, "_CLOSING", processes.PATIENCE)
    message = "Own/Walk-v0: closing stream 6: ArithmeticError: not today"
    with pytest.raises(errors.RunFailure, match=f"^{message}$"):
        host.close()
    assert [process.returncode for process in running] == [0] * len(running)
    host.close()  # a second call does nothing
    assert capfd.readouterr() == ("", "")


def test_only_images_are_drawn():
    assert not hasattr(SUBJECTS["cartpole"], "render")
    grey = spaces.Box(0, 255, (240, 300), np.uint8)
    factory = gymnasium.Gymnasium(f"{OWN}Spaces-v0", {"observation": grey})
    image = np.arange(72_000, dtype=np.uint8).reshape(240, 300)
    drawn = factory.render(types.TimeStep(image, 0.0, 1.0, types.MID))
    np.testing.assert_array_equal(drawn, np.stack([image] * 3, -1))
    small = SUBJECTS["picture"]
    drawn = small.render(types.restart(small.spec.zero_observation()))
    assert (drawn.dtype, drawn.shape) == (np.uint8, (240, 400, 3))
    assert hasattr(envpool.EnvPool("Pong-v5"), "render")
    assert not hasattr(envpool.EnvPool("Hopper-v4"), "render")


def test_filmed_environments_play_the_same_episodes():
    factory = gymnasium.Gymnasium(f"{OWN}Drawn-v0", vectorization="async")
    hosts = [maker.make(KEY, np.arange(3), 1) for maker in (factory, factory.filmed())]
    timesteps = [host.reset() for host in hosts]
    for _ in range(12):
        np.testing.assert_array_equal(*(timestep.observation for timestep in timesteps))
        for picture, (x,) in zip(hosts[1].render(), timesteps[1].observation):
            assert picture[:, int(x)].min() == 255 and picture.sum() == 12 * 3 * 255
        for host in hosts:
            host.send(np.zeros(3, np.int32))
        timesteps = [host.recv() for host in hosts]
    for host in hosts:
        host.close()


def _third_step(fault, num_threads=1):
    """Returns environments after `send` of the step that fails."""
    factory = gymnasium.Gymnasium(f"{OWN}Faulty-v0", {"fault": fault}, "async")
    host = factory.make(KEY, np.arange(4, dtype=np.int32), num_threads)
    host.reset()
    action = np.zeros(4, np.int32)
    for _ in range(2):
        host.send(action)
        host.recv()
    host.send(action)
    return host


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("raise", "ArithmeticError: the third step is a fault"),
        pytest.param("quit", "SystemExit: no license", marks=pytest.mark.slow),
    ],
)
def test_an_error_in_a_worker_is_one_line_with_its_traceback(fault, cause):
    host = _third_step(fault)
    place = r"\S*own_games\.py:\d+ in step"
    message = f"^Own/Faulty-v0 failed in a worker process: {place}: {cause}$"
    with pytest.raises(RuntimeError, match=message) as caught:
        host.recv()
    assert 'own_games.py", line' in caught.value.__cause__.__notes__[0]
    host.close()


@pytest.mark.slow
def test_a_wrong_result_in_a_worker_is_one_line():
    host = _third_step("shape")
    words = r"^Own/Faulty-v0: observation: expected float32\[1\], got float32\[2\]$"
    with pytest.raises(errors.UserError, match=words):
        host.recv()
    host.close()


def test_more_workers_than_open_files_are_one_line():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    factory = gymnasium.Gymnasium(f"{OWN}Wrong-v0", vectorization="async")
    _ = factory.spec
    first_free = os.open(os.devnull, os.O_RDONLY)
    os.close(first_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free + 1, limits[1]))
    try:
        with pytest.raises(
            errors.UserError, match="Own/Wrong-v0: cannot start worker process 1 of 9: Too"
        ):
            factory.make(KEY, np.arange(9, dtype=np.int32), 9)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_worker_that_dies_fails_the_step():
    host = _third_step("exit")
    processes = list(host._vector._processes)
    with pytest.raises(errors.RunFailure, match="worker process 0 ended with exit code 7"):
        host.recv()
    host.close()
    assert all(process.returncode is not None for process in processes)
    host = _third_step("hang")
    host._vector._processes[0].kill()
    with pytest.raises(errors.RunFailure, match="ended by signal 9"):
        host.recv()
    host.close()


def test_closing_ends_a_step_that_hangs_and_a_thread_that_waits_for_it():
    host = _third_step("hang")
    running, caught = list(host._vector._processes), []

    def wait():
        with pytest.raises(errors.RunFailure) as failure:
            host.recv()
        caught.append(failure)

    thread = threading.Thread(target=wait)
    thread.start()
    processes.wait_for(host._vector._receiving.locked)
    began = time.monotonic()
    host.close()
    thread.join(processes.PATIENCE)
    assert len(caught) == 1
    assert time.monotonic() - began < processes.PATIENCE  # the step takes 1,000 s
    assert all(process.poll() is not None for process in running)


def test_workers_end_with_their_parent_even_if_it_is_killed():
    program = (
        "import os, signal\n"
        "from tests.environments.gymnasium import test_gymnasium\n"
        "host = test_gymnasium._third_step('hang')\n"
        "print(*(p.pid for p in host._vector._processes), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with processes.spawn([sys.executable, "-c", program]) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 1
    processes.wait_for(lambda: not any(map(processes.is_alive, pids)))
