"""Several processes as one run: their start, and the decisions that they share.

Each process runs the same program on its own devices, and JAX joins the devices of all processes.
Process 0 leads: it alone writes files and prints. All processes take the same decisions in the same
order, so that each of them enters every program over all devices.

Messages between processes, outside of programs, go through the key-value store of JAX's distributed
runtime: a collective would fail where one process is late.
"""

import atexit
import dataclasses
import http.client
import itertools
import json
import os
import pathlib
import re
import socket
import urllib.request
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax._src import clusters
from jax._src import distributed as jax_distributed
from jax.experimental import multihost_utils

from podracers import errors
from podracers.hosts import peers

# It exists before a backend does, and has no public name (JAX 0.10).
_STATE = jax_distributed.global_state
_MESSAGE_TIMEOUT = 24 * 3600.0  # seconds for a message; the loss of its process is detected sooner
_MESSAGE_TIMEOUT_MS = int(_MESSAGE_TIMEOUT * 1000)
_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/worker-network-endpoints"
# Variables of Slurm that JAX reads.
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")

_messages = itertools.count()  # the same number stands for the same message in every process


@dataclasses.dataclass(frozen=True)
class Group:
    """The processes of a run; None to detect them from the cluster."""

    coordinator: str | None = None  # `HOST:PORT` of process 0
    num_processes: int | None = None
    process_id: int | None = None  # counted from 0

    def __post_init__(self):
        if self.coordinator is None or self.num_processes is None or self.process_id is None:
            if any(value is not None for value in dataclasses.astuple(self)):
                raise errors.UserError(
                    "several processes started by hand need all of --coordinator HOST:PORT, "
                    "--num_processes and --process_id"
                )
            return
        match = re.fullmatch(r"(?a)([\w-]{1,63}\.)*[\w-]{1,63}:(\d{1,5})", self.coordinator)
        if not match or not 0 < int(match[2]) < 2**16:
            raise errors.UserError(
                f"--coordinator {self.coordinator}: expected HOST:PORT, with a name or an IPv4 "
                "address"
            )
        if not 0 <= self.process_id < self.num_processes:
            raise errors.UserError(
                f"--process_id {self.process_id}: expected a number from 0 to "
                f"{self.num_processes - 1}, for --num_processes is {self.num_processes}"
            )


def is_cluster() -> bool:
    """Returns whether Slurm or a TPU pod has started several processes, of which this is one."""
    if os.environ.get("SLURM_STEP_NUM_TASKS", "") not in ("", "0", "1"):
        return True
    hosts = os.environ.get("TPU_WORKER_HOSTNAMES")
    if hosts is None and (
        pathlib.Path("/dev/accel0").exists() or pathlib.Path("/dev/vfio/0").exists()
    ):
        request = urllib.request.Request(_METADATA, headers={"Metadata-Flavor": "Google"})
        no_proxy = urllib.request.ProxyHandler({})  # none reaches the metadata server
        try:
            with urllib.request.build_opener(no_proxy).open(request, timeout=2) as answer:
                hosts = answer.read().decode()
        except (OSError, http.client.HTTPException):
            return False  # not a Cloud TPU VM
    return len((hosts or "").split(",")) > 1


def slurm_devices(environment: Mapping[str, str]) -> list[int] | None:
    """Returns the GPUs of a Slurm task; None for JAX's own choice, one for each task.

    A task that sees a single GPU uses it. Where each task of a node sees as many GPUs as there are
    tasks, each takes one. Else a task uses all GPUs that its environment variables show.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    tasks = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))  # "4(x2)"
    if not visible or not tasks:
        return None
    count = len(visible.split(","))
    return None if count == int(tasks[0]) > 1 else list(range(count))


def initialize(group: Group, timeout: float) -> None:
    """Joins the other processes, before anything touches a device.

    Process 0 listens only at the address that the group names; where a cluster names it, at the
    `_own_address` of that name. The timeout holds for all of them to start, and for silence after
    which a process counts as lost, which ends all others, in seconds.

    Raises:
      errors.UserError: no cluster defines the processes, or process 0 cannot listen.
      errors.RunFailure: not all have started in time.
    """
    if not 0.0 < timeout <= _MESSAGE_TIMEOUT:
        raise errors.UserError(
            "--peer_timeout: expected seconds, more than 0 and at most "
            f"{_MESSAGE_TIMEOUT:.0f}, got {timeout}"
        )
    # It would replace the handler of SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    address, number, process = group.coordinator, group.num_processes, group.process_id
    local_device_ids, is_named = None, address is not None
    if address is None or number is None or process is None:
        if missing := [name for name in _SLURM if not os.environ.get(name)]:
            os.environ.pop(missing[0], None)  # JAX cannot read an empty one
        detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
        address, number, process, local_device_ids = detect(
            os.environ.get("JAX_COORDINATOR_ADDRESS") or None,
            None,
            None,
            slurm_devices(os.environ),
            None,
            int(timeout) + 1,
        )
        if address is None or number is None or process is None:
            raise errors.UserError(
                f"neither Slurm ({missing[0]} is not set) nor a TPU pod defines the processes: "
                "name them with --coordinator HOST:PORT --num_processes N --process_id I; for one "
                "process, unset --distributed, SLURM_STEP_NUM_TASKS and TPU_WORKER_HOSTNAMES"
            )
        Group(address, number, process)  # refuses other values
    host, _, port = address.rpartition(":")
    bind = host if is_named else _own_address(host)
    # First, because JAX waits for missing processes and then ends this process by itself.
    port = peers.connect(process, number, host, int(port), bind, timeout)
    # gRPC would call process 0 through a proxy, which does not reach it.
    proxies = {name: os.environ.pop(name) for name in [*os.environ] if "proxy" in name.lower()}
    try:
        jax.distributed.initialize(
            f"{host}:{port}",
            number,
            process,
            local_device_ids=local_device_ids,
            cluster_detection_method="deactivate",
            # `peers` detects a lost process sooner.
            initialization_timeout=int(2 * timeout) + 60,
            heartbeat_timeout_seconds=int(2 * timeout) + 60,
            shutdown_timeout_seconds=int(timeout) + 1,
            coordinator_bind_address=f"{bind or '[::]'}:{port}",
        )
    except RuntimeError as error:
        line = errors.first_line(error)
        raise errors.RunFailure(f"the processes did not come together: {line}") from error
    finally:
        os.environ |= proxies
    # JAX has registered its own shutdown before, which therefore runs later.
    atexit.register(peers.leave)


def _own_address(host: str) -> str:
    """Returns the IPv4 address of a name of this machine, for others to connect to.

    Returns:
      "", which stands for all interfaces, if the name has several addresses, one that is not of
      this machine, or a loopback address, as in Debian's /etc/hosts.
    """
    try:
        addresses = socket.gethostbyname_ex(host)[2]
        with socket.create_server((addresses[0], 0)):
            return "" if len(addresses) > 1 or addresses[0].startswith("127.") else addresses[0]
    except OSError:
        return ""


def is_several() -> bool:
    """Returns whether there is more than one process."""
    return _STATE.num_processes > 1


def is_lead() -> bool:
    """Returns whether this process writes files and prints."""
    return _STATE.process_id == 0


def index() -> int:
    """Returns the number of this process, from 0."""
    return _STATE.process_id or 0


def count() -> int:
    """Returns how many processes there are."""
    return _STATE.num_processes or 1


def all_numbers(*mine: int) -> np.ndarray:
    """Returns the int32 numbers of each process, `[process, number]`; all of them call it together.

    It costs less than `all_gather`.
    """
    numbers = np.array(mine, np.int32)
    if not is_several():
        return numbers[None]
    peers.advance()
    return np.asarray(multihost_utils.process_allgather(numbers))


def any_process(flag: bool) -> bool:
    """Returns whether the flag is set in any process; all of them call it together."""
    return bool(np.any(all_numbers(flag)))


def on_lead(function: Callable[[], Any]) -> Any:
    """Returns the result of `function`, which process 0 alone calls; JSON has to hold it.

    Raises:
      errors.UserError, errors.RunFailure: the error of `function`, in every process.
    """
    if not is_several():
        return function()
    key = f"podracers/message/{next(_messages)}"
    client: Any = _STATE.client  # several processes have one
    peers.advance()
    if not is_lead():
        message = json.loads(client.blocking_key_value_get(key, _MESSAGE_TIMEOUT_MS))
        for kind in (errors.UserError, errors.RunFailure):
            if kind.__name__ in message:
                peers.leave()  # process 0 reports it
                raise kind(message[kind.__name__])
        return message["value"]
    try:
        value = function()
    except (errors.UserError, errors.RunFailure) as error:
        kind = errors.UserError if isinstance(error, errors.UserError) else errors.RunFailure
        client.key_value_set(key, json.dumps({kind.__name__: str(error)}))
        raise
    client.key_value_set(key, json.dumps({"value": value}))
    return value


def all_gather(value: Any) -> list[Any]:
    """Returns the value, which JSON can hold, of each process, by its number.

    All processes call it at the same moment.
    """
    parts = gather(json.dumps(value).encode())
    return on_lead(lambda: [json.loads(part) for part in parts])


def gather(mine: bytes) -> list[bytes]:
    """Returns the bytes of all processes, by number, in process 0; elsewhere none."""
    if not is_several():
        return [mine]
    key = f"podracers/gathered/{next(_messages)}"
    peers.advance()
    client: Any = _STATE.client
    if not is_lead():
        client.key_value_set_bytes(f"{key}/{index()}", mine)
        return []
    others = [f"{key}/{other}" for other in range(1, count())]
    read = [client.blocking_key_value_get_bytes(other, _MESSAGE_TIMEOUT_MS) for other in others]
    client.key_value_delete(key)  # the keys below it go, too
    return [mine, *read]


def require_equal(name: str, text: str) -> None:
    """Raises `errors.UserError`, with the `name`, if a text is not equal to process 0's."""
    checksum = zlib.crc32(text.encode())
    if on_lead(lambda: checksum) != checksum:
        raise errors.UserError(
            f"{name} of process {_STATE.process_id} differs from that of process 0: start all of "
            "them with the same command and the same files"
        )
