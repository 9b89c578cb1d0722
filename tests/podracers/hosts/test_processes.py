"""Real processes come together, agree, and hear of one another's failures, at the start too."""

import time

import pytest

from podracers import errors
from podracers.hosts import processes
from tests import groups

_BEGIN = """
import os, pathlib, signal, subprocess, sys, threading, time
import jax, jax.numpy as jnp, ml_dtypes, numpy as np
from podracers import command_line, errors, parallel
from podracers.hosts import processes as distributed
from podracers.hosts import global_arrays
from podracers.hosts import peers
process = int(sys.argv[1])

def begin(timeout=30.0, address=sys.argv[2], count={count}):
    distributed.initialize(distributed.Group(address, count, process), timeout)

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def main():
"""
_END = """
command_line.run(main)
"""


def _run(body: str, count: int = 2, num_devices: int = 2):
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    code = _BEGIN.replace("{count}", str(count)) + lines + _END
    return groups.python(code, count, num_devices)


def test_they_agree_and_pass_arrays_on():
    """Every kind of array makes the round trip, in pieces that do not divide it."""
    results = _run("""
begin()
assert distributed.is_several() and distributed.is_lead() == (process == 0)
assert len(jax.devices()) == 4 and not distributed.any_process(False)
assert distributed.any_process(process == 1)
assert distributed.on_lead(lambda: ["from", process]) in (["from", 0], ("from", 0))
distributed.require_equal("the text", "same")
try:
    distributed.on_lead(lambda: (_ for _ in ()).throw(errors.UserError("told to all")))
    raise AssertionError
except errors.UserError as error:
    assert str(error) == "told to all"

global_arrays._PIECE = 96
mesh = parallel.make_mesh()
def put(x, *spec):
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
rng = np.random.default_rng(0)
expected = {
    "whole": np.arange(5.0, dtype=np.float32),
    "number": np.int32(7),
    "rows": rng.normal(size=(28, 3)).astype(np.float32),
    "columns": rng.normal(size=(3, 20, 2)).astype(ml_dtypes.bfloat16),
    "long": rng.integers(0, 9, (8, 100)).astype(np.int16),
    "bits": rng.random((12, 5)) < 0.5,
}
split = {"rows": ("data",), "long": ("data",), "columns": (None, "data"), "bits": ("data",)}
tree = {name: put(np.asarray(x), *split.get(name, ())) for name, x in expected.items()}
keys = put(np.arange(4, dtype=np.uint32), "data")
tree["keys"] = jax.jit(jax.vmap(jax.random.key))(keys)
largest, gather = [], global_arrays._gather
global_arrays._gather = lambda sharding, block: largest.append(block) or gather(sharding, block)
host = global_arrays.to_host(tree)
assert max(np.prod(block) for block in largest) <= 96 // 4, largest  # of each of four shards
assert (1, 12) in largest, largest  # a row was too much
if process == 0:
    for name, x in expected.items():
        np.testing.assert_array_equal(host[name], x)
        assert host[name].dtype == np.asarray(x).dtype
else:
    assert all(leaf is None for leaf in host.values())
back = global_arrays.to_devices(host, tree)
for name, x in tree.items():
    assert back[name].dtype == x.dtype and back[name].sharding == x.sharding, name
    for shard, other in zip(back[name].addressable_shards, x.addressable_shards, strict=True):
        ours, theirs = (global_arrays.plain(s.data) for s in (shard, other))
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs), err_msg=name)
print("done")
""")
    for result in results:
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines()[-1] == "done"


def test_one_that_fails_tells_all_others_why():
    began = time.monotonic()
    first, *others = _run(
        """
begin()
if process == 2:
    raise errors.RunFailure("the disk is full")
distributed.any_process(False)  # waits for process 2, for ever
""",
        count=3,
        num_devices=1,
    )
    assert "failed: process 2: the disk is full" in first.stderr
    assert "failed: process 2: the disk is full" in others[0].stderr
    assert "failed: the disk is full" in others[1].stderr
    assert [result.returncode for result in (first, *others)] == [1, 1, 1]
    assert time.monotonic() - began < 120


def test_what_is_being_saved_is_finished_first():
    first, second = _run(
        """
begin()
if process == 1:
    time.sleep(3.0)  # until the other one has something to finish
    raise errors.RunFailure("the disk is full")
written = []
peers.finish_first(lambda: not written)
threading.Timer(4.0, lambda: (print("written", flush=True), written.append(True))).start()
distributed.any_process(False)  # waits for process 1, for ever
""",
        num_devices=1,
    )
    assert (first.returncode, second.returncode) == (1, 1), first.stderr
    assert "process 1: the disk is full" in first.stderr
    assert "written" in first.stdout


@pytest.mark.parametrize(
    ("number", "words"),
    [
        ("SIGKILL", "it closed its connection"),
        pytest.param("SIGSTOP", "nothing was heard of it for 8 s", marks=pytest.mark.slow),
    ],
)
def test_one_that_is_lost_ends_the_others(number, words):
    code = f"""
begin(timeout=8.0)
distributed.any_process(False)
if process == 1:
    if "{number}" == "SIGSTOP":  # for the test to end: a process that is stopped does not
        subprocess.Popen(["sh", "-c", f"sleep 15; kill -9 {{os.getpid()}}"])
    os.kill(os.getpid(), signal.{number})
distributed.any_process(False)
"""
    first, _, other = _run(code, count=3, num_devices=1)
    for result in (first, other):
        assert result.returncode == 1, result.stderr
        assert f"failed: process 1 was lost: {words}" in result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("stuck", [0, 2])
def test_one_that_loops_ends_all(stuck):
    """It lives, and its thread sends heartbeats."""
    began = time.monotonic()
    results = _run(
        f"""
peers._PATIENCE = 1
begin(timeout=6.0)
for turn in range(4):
    while turn == 3 and process == {stuck}:
        sum(range(10**5))
    distributed.any_process(False)
""",
        count=3,
        num_devices=1,
    )
    for result in results:
        assert result.returncode == 1, result.stderr
        assert f"failed: process {stuck} makes no progress: the others have" in result.stderr
        assert "Traceback" not in result.stderr
    assert time.monotonic() - began < 90


@pytest.mark.slow
def test_one_that_is_slow_or_busy_elsewhere_is_waited_for():
    """What it takes within the limit, and what a supervisor watches over."""
    results = _run(
        """
peers._PATIENCE = 1
begin(timeout=5.0)
for turn in range(3):
    if turn == 0 and process == 1:
        time.sleep(3.0)
    for _ in range(80 if turn == 1 and process == 1 else 0):
        distributed.touch()
        time.sleep(0.1)
    distributed.any_process(False)
print(distributed.gather(bytes([process])))
""",
    )
    for process, result in enumerate(results):
        assert result.returncode == 0, result.stderr
        last = result.stdout.splitlines()[-1]
        assert last == str(None if process else [b"\0", b"\1"])


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_evaluations_are_shared(count):
    """Every process plays its part; a stop that one of them hears counts for all."""
    results = _run(
        """
begin()
from podracers import evaluation
from podracers.training import shared_evaluation

def episodes(share, size):
    index, count = share
    every = np.arange(size * index // count, size * (index + 1) // count)
    print("played", list(map(int, every)), flush=True)
    return evaluation.Episodes(every + 0.1, every.astype(np.int32), every % 2 == 0)

def play(share):
    return [episodes(share, 6), None, episodes(share, 3)]

def stopped(share):
    if share[0] == 1:
        raise evaluation.Stopped
    return play(share)

played = shared_evaluation.play_together(play)
assert (played is None) == (process != 0)
for found, size in zip(played or (), (6, 3), strict=True) if played else ():
    np.testing.assert_array_equal(found.returns, np.arange(size) + 0.1)
    np.testing.assert_array_equal(found.lengths, np.arange(size))
    assert found.finished.dtype == bool and found.lengths.dtype == np.int32
assert shared_evaluation.play_together(stopped) is None
large = os.urandom(20 * 2**20)
gathered = distributed.gather(large)
assert gathered is None or list(map(len, gathered)) == [len(large)] * len(gathered)
""",
        count=count,
        num_devices=1,
    )
    every = []
    for result in results:
        assert result.returncode == 0, result.stderr
        every += eval(result.stdout.splitlines()[0].removeprefix("played "))
    assert every == list(range(6))


def _assert_failed(result, *phrases):
    """Checks that a process said why in one line, and that it is a failure."""
    assert result.returncode == 1, result.stderr
    assert result.stderr.startswith("failed: ") and result.stderr.count("\n") == 1, result.stderr
    for phrase in phrases:
        assert phrase in result.stderr


@pytest.mark.slow
def test_one_that_never_comes_is_named_by_all_others():
    began = time.monotonic()
    first, _, other = _run("begin(8.0) if process != 1 else os._exit(0)", count=3, num_devices=1)
    _assert_failed(first, "within 8 s nothing was heard of process 1: process 0 listens on 127.0.0")
    _assert_failed(other, "failed: process 0: within 8 s nothing was heard of process 1")
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_without_process_0_the_others_end():
    _, other = _run("begin(3.0) if process else os._exit(0)", num_devices=1)
    _assert_failed(other, "within 3 s nothing was heard of process 0 at 127.0.0.1:", "refused")


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_one_that_is_lost_while_jax_starts_ends_the_others_at_once(lost):
    """The others are in a call of JAX's that waits for all, and lasts for minutes."""
    began = time.monotonic()
    results = _run(
        f"""
if process == {lost}:
    jax.distributed.initialize = die
begin()
""",
        count=3,
        num_devices=1,
    )
    del results[lost]
    for result in results:
        _assert_failed(result, f"failed: process {lost} was lost: it closed its connection")
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_one_that_is_lost_before_all_have_come_ends_process_0_at_once():
    first, *_ = _run(
        """
if process == 1:
    peers._Peers.wait_to_begin = die
begin() if process != 2 else time.sleep(0)  # which never comes
""",
        count=3,
        num_devices=1,
    )
    _assert_failed(first, "failed: process 1 was lost: it closed its connection")


@pytest.mark.slow
def test_whoever_else_comes_is_turned_away():
    """A port scanner says nothing, or nonsense; another process belongs to another run."""
    first, *_, wrong = _run(
        """
if process == 0:
    def knock():
        for said in (None, b"GET / HTTP/1.1", b"\\0\\0\\0\\4null", b"\\0\\0\\0\\2[]"):
            with peers._call(*distributed.Group(sys.argv[2], 2, 0).host_and_port, 5.0) as stranger:
                if said:
                    os.write(stranger.fileno(), said)
                time.sleep(0.3)
    threading.Thread(target=knock, daemon=True).start()
    begin(10.0)
elif process == 2:
    begin(count=4)
""",
        count=3,
        num_devices=1,
    )
    assert wrong.returncode == 2, wrong.stderr
    assert wrong.stderr == "error: --num_processes is 4 here, and 3 in process 0\n"
    _assert_failed(first, "within 10 s nothing was heard of process 1, 2")


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_nothing_listens_but_at_the_address_of_the_coordinator(host):
    first, _ = _run(
        f"""
address = sys.argv[2].replace("127.0.0.1", "{host}")
seen = set()

def listening():
    sockets = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            sockets.add(os.readlink(f"/proc/self/fd/{{name}}"))
        except OSError:
            pass
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{{rest[5]}}]" in sockets:
                seen.add(local.rpartition(":")[0])

def watch():
    while True:
        listening()
        time.sleep(0.02)

if process == 0:
    threading.Thread(target=watch, daemon=True).start()
else:
    time.sleep(1.0)
begin(address=address)
listening()
print(sorted(seen))
""",
        num_devices=1,
    )
    assert first.returncode == 0, first.stderr
    loopback = ["0000000000000000FFFF00000100007F", "0100007F"]  # JAX's own, and ours
    assert first.stdout.splitlines()[-1] == str(loopback)


def test_processes_that_were_started_differently_are_refused():
    first, second = _run(
        """
begin()
distributed.require_equal("the configuration", f"of {process}")
distributed.any_process(False)
""",
        num_devices=1,
    )
    assert second.returncode == 2, second.stderr
    assert "the configuration of process 1 differs from that of process 0" in second.stderr
    assert first.returncode == 2, first.stderr
    assert "process 1: the configuration" in first.stderr


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("host:1", None, None), "need all of --coordinator"),
        (("host", 2, 0), "expected HOST:PORT"),
        (("[::1]:1", 2, 0), "IPv4"),
        (("host:99999", 2, 0), "expected HOST:PORT"),
        (("host:1", 2, 2), "expected a number from 0 to 1"),
    ],
)
def test_groups_that_cannot_be(given, words):
    with pytest.raises(errors.UserError, match=words):
        processes.Group(*given)


def test_a_cluster_is_known_by_its_environment(monkeypatch):
    for name in ("SLURM_STEP_NUM_TASKS", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.delenv(name, raising=False)
    assert not processes.is_cluster()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert not processes.is_cluster()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert processes.is_cluster()
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    assert not processes.is_cluster()
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "10.0.0.1,10.0.0.2")
    assert processes.is_cluster()


def test_tasks_of_slurm_use_the_gpus_that_they_see():
    alone = {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert processes.slurm_devices(alone) == [0, 1, 2, 3]
    # Of four tasks that see all four GPUs, JAX gives each its own.
    assert processes.slurm_devices(alone | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}) is None
    # Tasks that are bound to one GPU each call it 0.
    bound = {"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "CUDA_VISIBLE_DEVICES": "0"}
    assert processes.slurm_devices(bound) == [0]
    assert processes.slurm_devices({"SLURM_STEP_TASKS_PER_NODE": "1"}) is None


def test_alone_nothing_has_to_be_agreed_on():
    assert not processes.is_several()
    assert processes.is_lead()
    assert processes.on_lead(lambda: {"any": "thing"}) == {"any": "thing"}
    assert processes.any_process(True) is True
    assert processes.any_process(False) is False


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("inf"), float("nan")])
def test_a_limit_that_cannot_be_is_a_mistake(timeout):
    group = processes.Group("127.0.0.1:1", 2, 0)
    with pytest.raises(errors.UserError, match=r"--peer_timeout: expected seconds, more than 0"):
        processes.initialize(group, timeout)
