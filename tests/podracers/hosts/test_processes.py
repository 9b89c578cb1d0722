"""Tests of processes with JAX that start, agree and end together."""

import http.server
import socket
import threading

import jax
import pytest

from podracers import errors
from podracers.hosts import processes
from tests import groups

_BEGIN = """
import os, pathlib, signal, sys
import jax, numpy as np
from podracers.commands import command_line
from podracers import errors, parallel
from podracers.hosts import processes as distributed
process = int(sys.argv[1])

def begin():
    distributed.initialize(distributed.Group(sys.argv[2], {count}, process), {timeout})

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def main():
"""
_END = """
command_line.run(main)
"""


def _run(body: str, count: int = 2, num_devices: int = 1):
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    begin = _BEGIN.replace("{count}", str(count)).replace("{timeout}", str(groups.PEER_TIMEOUT))
    code = begin + lines + _END
    return groups.python(code, count, num_devices)


# Addresses at which this process listens, in hexadecimal.
_LISTENING = """
folder = pathlib.Path("/proc/self/fd")
sockets = {os.readlink(link) for link in folder.iterdir() if link.is_socket()}
lines = [line.split() for table in ("tcp", "tcp6")
         for line in pathlib.Path("/proc/net", table).read_text().splitlines()[1:]]
listening = {line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets}
"""


_PROXY = dict.fromkeys(("http_proxy", "HTTPS_PROXY", "grpc_proxy"), "http://127.0.0.1:9")


def test_processes_agree_listen_only_at_the_coordinator_and_end_with_a_user_error_of_process_0():
    """Proxies that the environment names do not stand between them."""
    results = _run(
        f"os.environ |= (proxy := {_PROXY})\nbegin()\n{_LISTENING}"
        """
loopback = ("0100007F:", "0000000000000000FFFF00000100007F:")
assert all(address.startswith(loopback) for address in listening), listening
assert bool(listening) == (process == 0)
assert proxy.items() <= os.environ.items()

assert distributed.is_several() and distributed.is_lead() == (process == 0)
assert len(jax.devices()) == 4 and not distributed.any_process(False)
assert distributed.any_process(process == 1)
assert distributed.on_lead(lambda: ["from", process]) == ["from", 0]
assert distributed.all_gather(process) == [0, 1]
distributed.require_equal("the text", "same")
try:
    distributed.require_equal("the text", f"of process {process}")
    assert process == 0
except errors.UserError as error:
    assert process == 1 and "the text of process 1 differs" in str(error)
print("done", flush=True)
distributed.all_gather("done")
distributed.on_lead(lambda: (_ for _ in ()).throw(errors.UserError("no such option")))
""",
        num_devices=2,
    )
    for result in results:
        assert result.stdout.splitlines()[-1:] == ["done"], result.stderr
        assert result.returncode == 2, result.stderr
        assert result.stderr.startswith("error: ")
        assert result.stderr.endswith("no such option\n") and result.stderr.count("\n") == 1


@pytest.fixture(name="own_address")
def _own_address():
    """An address of this machine other than loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # for documentation; nothing is sent
        except OSError:
            pytest.skip("this machine has no network")
        return probe.getsockname()[0]


def test_process_0_of_a_cluster_listens_at_the_address_of_its_name(own_address, monkeypatch):
    assert processes._own_address(own_address) == own_address
    for everywhere in ("127.0.0.1", "localhost", "192.0.2.77", "no-such-host.invalid"):
        assert processes._own_address(everywhere) == ""
    two = [own_address, "192.0.2.77"]
    monkeypatch.setattr(socket, "gethostbyname_ex", lambda host: (host, [], two))
    assert processes._own_address("node") == ""


@pytest.mark.slow
def test_tasks_of_slurm_find_each_other_and_listen_only_there(own_address):
    results = _run(
        f"""
os.environ |= {{"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0",
               "SLURM_STEP_NODELIST": "{own_address}", "SLURM_PROCID": sys.argv[1],
               "JAX_COORDINATOR_PORT": sys.argv[2].rpartition(":")[2]}}
distributed.initialize(distributed.Group(), 30.0)
{_LISTENING}
address = bytes(map(int, "{own_address}".split(".")))[::-1].hex().upper()
assert all(f"{{address}}:" in local for local in listening), listening
assert bool(listening) == (process == 0)
assert distributed.all_gather(process) == [0, 1]
"""
    )
    for result in results:
        assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.slow
def test_process_0_that_is_lost_while_jax_starts_ends_the_others():
    """The others are in a call of JAX that waits for all processes for minutes."""
    _, result = _run("if process == 0:\n    jax.distributed.initialize = die\nbegin()")
    assert result.returncode == 1, result.stderr
    assert result.stderr == "failed: process 0 was lost: it closed its connection\n"


@pytest.mark.slow
def test_a_stopped_evaluation_is_discarded_and_a_process_with_a_stuck_thread_waits_for_others():
    results = _run(
        """
begin()
import time
from podracers import evaluation
from podracers.supervision import pipeline

def play(share):
    if share[0] == 1:
        raise evaluation.Stopped
    return [evaluation.Episodes(*np.zeros((3, 2)))]

assert evaluation.play_together(play) is None
if process == 0:
    pipeline.Supervisor(60.0).start("stuck", lambda _: time.sleep(60))
else:
    time.sleep(5)
"""
    )
    for result in results:
        assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"SLURM_STEP_NUM_TASKS": ""}, False),
        ({"SLURM_STEP_NUM_TASKS": "2"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2"}, True),
    ],
)
def test_a_cluster_is_detected_by_its_environment(monkeypatch, variables, expected):
    for name in ("SLURM_STEP_NUM_TASKS", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert processes.is_cluster() == expected


def test_a_tpu_pod_is_detected_without_a_proxy(monkeypatch):
    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"10.0.0.1,10.0.0.2")

        def log_message(self, *_):
            pass

    for name in ("SLURM_STEP_NUM_TASKS", "TPU_WORKER_HOSTNAMES", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with http.server.HTTPServer(("127.0.0.1", 0), Metadata) as server:
        monkeypatch.setattr(processes, "_METADATA", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(processes.pathlib.Path, "exists", lambda path: True)
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert processes.is_cluster()


@pytest.mark.parametrize("change", [{}, {"SLURM_PROCID": ""}, {"SLURM_NTASKS": None}])
def test_variables_of_slurm_in_part_are_a_user_error(monkeypatch, change):
    """Such as in a container that gets some of them."""
    job = dict.fromkeys(processes._SLURM, "1") | {"SLURM_STEP_NUM_TASKS": "2", **change}
    for name, value in (job if change else dict.fromkeys(processes._SLURM)).items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert processes.is_cluster() == bool(change)
    preemption = jax.config.jax_enable_preemption_service
    (name,) = change or ("SLURM_JOB_ID",)
    with pytest.raises(errors.UserError, match=rf"{name} is not set.*name them with --coordinator"):
        processes.initialize(processes.Group(), 30.0)
    jax.config.update("jax_enable_preemption_service", preemption)


@pytest.mark.parametrize(
    ("tasks", "visible", "expected"),
    [
        ("1(x2)", "0,1,2,3", [0, 1, 2, 3]),
        ("4(x2)", "0,1,2,3", None),  # all see all four: JAX gives each its own
        ("4(x2)", "0", [0]),  # each is bound to one, and calls it 0
        ("1", None, None),
    ],
)
def test_tasks_of_slurm_use_the_gpus_that_they_see(tasks, visible, expected):
    variables = {"SLURM_STEP_TASKS_PER_NODE": tasks}
    if visible:
        variables["CUDA_VISIBLE_DEVICES"] = visible
    assert processes.slurm_devices(variables) == expected
