"""Several processes as one run: who they are, what they agree on, and what one of them knows.

Each process runs the same program on its own devices, and JAX makes one machine of all devices.
Process 0 leads: it alone writes files and speaks. All of them take the same decisions in the same
order, so that every program over all devices is entered by every process.

What is said between processes, other than by programs, goes through the key-value store of JAX's
distributed runtime: a collective would fail where one of them is late.
"""

import atexit
import dataclasses
import http.client
import itertools
import json
import os
import pathlib
import re
import time
import urllib.request
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import clusters
from jax._src import distributed as jax_distributed

from podracers import errors, parallel
from podracers.hosts import peers

# Known before a backend is there; there is no public name for it (JAX 0.10).
_STATE = jax_distributed.global_state
_CAUSE_TIMEOUT = 2.0  # seconds for another process to report the first cause
_MESSAGE_TIMEOUT = 24 * 3600.0  # seconds for a message of process 0; its loss is found sooner
_MESSAGE_TIMEOUT_MS = int(_MESSAGE_TIMEOUT * 1000)
_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/worker-network-endpoints"

_messages = itertools.count()  # the same number stands for the same message in every process


@dataclasses.dataclass(frozen=True)
class Group:
    """Which processes there are; None where the cluster says so itself.

    Attributes:
      coordinator: `HOST:PORT` of process 0.
      num_processes: number of processes.
      process_id: index of this process, from 0.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None

    def __post_init__(self):
        given = dataclasses.astuple(self)
        if None in given and any(value is not None for value in given):
            raise errors.UserError(
                "several processes by hand need all of --coordinator HOST:PORT, --num_processes "
                "and --process_id"
            )
        if self.coordinator is None:
            return
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdigit() or ":" in host or not 0 < int(port) < 2**16:
            raise errors.UserError(
                f"--coordinator {self.coordinator}: expected HOST:PORT, with a name or an IPv4 "
                "address"
            )
        if not 0 <= self.process_id < self.num_processes:
            raise errors.UserError(
                f"--process_id {self.process_id}: expected a number from 0 to "
                f"{self.num_processes - 1}, for --num_processes is {self.num_processes}"
            )

    @property
    def host_and_port(self) -> tuple[str, int]:
        """Where process 0 listens."""
        host, _, port = self.coordinator.rpartition(":")
        return host, int(port)


def is_cluster() -> bool:
    """Returns whether Slurm or a TPU pod has started several processes, of which this is one."""
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return True
    hosts = os.environ.get("TPU_WORKER_HOSTNAMES")
    if hosts is None and (
        pathlib.Path("/dev/accel0").exists() or pathlib.Path("/dev/vfio/0").exists()
    ):
        request = urllib.request.Request(_METADATA, headers={"Metadata-Flavor": "Google"})
        try:
            with urllib.request.urlopen(request, timeout=2) as answer:
                hosts = answer.read().decode()
        except (OSError, http.client.HTTPException):
            return False  # not a Cloud TPU VM
    return len((hosts or "").split(",")) > 1


def slurm_devices(environment: Mapping[str, str]) -> list[int] | None:
    """Returns which GPUs a task of Slurm uses; None to leave it to JAX, which takes one each.

    Args:
      environment: environment variables of the task. One that sees a single GPU uses it; of tasks
        that all see as many GPUs as there are tasks on their node, each takes one; else a task uses
        all that it sees.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    tasks = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))  # such as 4(x2)
    if not visible or not tasks:
        return None
    count = len(visible.split(","))
    return None if count == int(tasks[0]) > 1 else list(range(count))


def initialize(group: Group, timeout: float) -> None:
    """Joins the other processes, before anything touches a device.

    Args:
      group: the processes. Process 0 listens at the address that the group names, and nowhere else;
        where a cluster names it, on all interfaces.
      timeout: seconds for all of them to be there, and of silence after which one counts as lost,
        which ends all others.

    Raises:
      errors.UserError: there is no cluster that says who they are, or process 0 cannot listen.
      errors.RunFailure: they were not all there in time.
    """
    if not 0.0 < timeout <= _MESSAGE_TIMEOUT:
        raise errors.UserError(
            "--peer_timeout: expected seconds, more than 0 and at most "
            f"{_MESSAGE_TIMEOUT:.0f}, got {timeout}"
        )
    # It would replace the handler of SIGTERM (see `signals`).
    jax.config.update("jax_enable_preemption_service", False)
    # Where a cluster says who they are, its name for process 0 may stand for several interfaces.
    bind = group.coordinator and group.host_and_port[0]
    group, local_device_ids = (group, None) if group.coordinator else _detect(timeout)
    host, port = group.host_and_port
    count = group.num_processes
    # Ours come first: where a process is missing, JAX waits, and then ends the process by itself.
    if group.process_id == 0:
        peers.lead(bind or "", port, count, timeout)
        with peers.listen(bind or "", 0) as free:
            port = free.getsockname()[1]
        peers.begin(port)
    else:
        port = peers.follow(group.process_id, host, port, count, timeout)
    try:
        jax.distributed.initialize(
            f"{host}:{port}",
            count,
            group.process_id,
            local_device_ids=local_device_ids,
            cluster_detection_method="deactivate",
            # Who is lost meanwhile is noticed sooner than JAX does.
            initialization_timeout=int(2 * timeout) + 60,
            heartbeat_timeout_seconds=int(2 * timeout) + 60,
            shutdown_timeout_seconds=int(timeout) + 1,
            coordinator_bind_address=f"{bind or '[::]'}:{port}",
        )
    except RuntimeError as error:
        line = str(error).splitlines()[0]
        raise errors.RunFailure(f"the processes did not come together: {line}") from error
    # JAX's own farewell is registered before, and so comes after.
    atexit.register(peers.leave)


def _detect(timeout: float) -> tuple[Group, Any]:
    """Returns who the processes are by Slurm or the TPU pod, and the devices of this one.

    The devices are None where it uses all that there are.
    """
    found = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        os.environ.get("JAX_COORDINATOR_ADDRESS"),
        None,
        None,
        slurm_devices(os.environ),
        None,
        int(timeout) + 1,
    )
    *group, local_device_ids = found
    if None in group:
        raise errors.UserError(
            "--distributed: neither Slurm nor a TPU pod says which processes there are: name them "
            "with --coordinator HOST:PORT --num_processes N --process_id I"
        )
    return Group(*group), local_device_ids


def fail(cause: str, exit_code: int) -> None:
    """Tells the others why this process fails, so that they end too; nothing where it is alone."""
    peers.fail(cause, exit_code)


def leave() -> None:
    """Ends this process's part in order, where it is one of several; waits for the others."""
    if peers.is_watching():
        peers.leave()
        jax.distributed.shutdown()


def hear_causes() -> None:
    """Gives the others time to say what went wrong first; nothing where this process is alone.

    Whose collective breaks only knows that a connection was closed.
    """
    if peers.is_watching():
        time.sleep(_CAUSE_TIMEOUT)


def is_several() -> bool:
    """Returns whether there is more than one process."""
    return _STATE.num_processes > 1


def is_lead() -> bool:
    """Returns whether this process writes files and speaks."""
    return _STATE.process_id == 0


def index() -> int:
    """Returns the number of this process, from 0."""
    return _STATE.process_id or 0


def count() -> int:
    """Returns how many processes there are."""
    return _STATE.num_processes or 1


def share() -> tuple[int, int]:
    """Returns the number of this process, and how many there are."""
    return index(), count()


def touch() -> None:
    """Shows that this process makes progress where the others may wait for it."""
    peers.touch()


def any_process(flag: bool) -> bool:
    """Returns whether the flag is set in any process; all of them ask at the same moment."""
    if not is_several():
        return bool(flag)
    peers.advance()
    mesh = parallel.make_mesh()
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(parallel.AXIS))
    shards = [jax.device_put(np.array([bool(flag)]), device) for device in mesh.local_devices]
    flags = jax.make_array_from_single_device_arrays((mesh.devices.size,), split, shards)
    return bool(_any(mesh)(flags))


_programs: dict[jax.sharding.Mesh, Any] = {}


def _any(mesh: jax.sharding.Mesh):
    if mesh not in _programs:
        replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        _programs[mesh] = jax.jit(jnp.any, out_shardings=replicated)
    return _programs[mesh]


def on_lead(function: Callable[[], Any]) -> Any:
    """Returns what process 0 gets from `function`, which it alone calls; what JSON can hold.

    Raises:
      errors.UserError, errors.RunFailure: what `function` raised, in every process.
    """
    if not is_several():
        return function()
    key = f"podracers/message/{next(_messages)}"
    peers.advance()
    if not is_lead():
        told = hear(key)
        for kind in (errors.UserError, errors.RunFailure):
            if kind.__name__ in told:
                peers.leave()  # process 0 knows
                raise kind(told[kind.__name__])
        return told["value"]
    try:
        value = function()
    except (errors.UserError, errors.RunFailure) as error:
        say(key, {_kind(error).__name__: str(error)})
        raise
    say(key, {"value": value})
    return value


def all_say(value: Any) -> list[Any]:
    """Returns what each process says, by its number; all of them ask at the same moment.

    Args:
      value: what this process says, as JSON can hold it.
    """
    if not is_several():
        return [value]
    key = f"podracers/said/{next(_messages)}"
    peers.advance()
    say(f"{key}/{index()}", value)
    return [hear(f"{key}/{each}") for each in range(count())]


def say(key: str, value: Any) -> None:
    """Tells all processes a value that JSON can hold, once for each key; any thread may."""
    _client().key_value_set(key, json.dumps(value))


def hear(key: str) -> Any:
    """Waits for what a process says under a key; any thread may."""
    return json.loads(_client().blocking_key_value_get(key, _MESSAGE_TIMEOUT_MS))


def forget(key: str) -> None:
    """Removes what a process has said under a key, once nobody asks for it any more."""
    _client().key_value_delete(key)


def gather(mine: bytes) -> list[bytes] | None:
    """Returns what all processes have to say, in their order, in process 0; elsewhere None."""
    if not is_several():
        return [mine]
    key = f"podracers/gathered/{next(_messages)}"
    peers.advance()
    if not is_lead():
        _client().key_value_set_bytes(f"{key}/{index()}", mine)
        return None
    get = _client().blocking_key_value_get_bytes
    read = [get(f"{key}/{other}", _MESSAGE_TIMEOUT_MS) for other in range(1, count())]
    _client().key_value_delete(key)  # all that is below it
    return [mine, *read]


def _kind(error: Exception) -> type[Exception]:
    return errors.UserError if isinstance(error, errors.UserError) else errors.RunFailure


def require_equal(what: str, text: str) -> None:
    """Refuses processes that were started differently.

    Args:
      what: name of what is compared, in words.
      text: that of this process.

    Raises:
      errors.UserError: that of process 0 is another one.
    """
    mine = zlib.crc32(text.encode())
    if on_lead(lambda: mine) != mine:
        raise errors.UserError(
            f"{what} of process {_STATE.process_id} differs from that of process 0: start all of "
            "them with the same command and the same files"
        )


def local(tree: Any) -> Any:
    """Returns this process's copies of replicated arrays: programs of one process can use them.

    They are the arrays' own buffers, and deleted with them.
    """
    if not is_several():
        return tree
    return jax.tree.map(lambda x: x.addressable_data(0) if isinstance(x, jax.Array) else x, tree)


def _client():
    """Returns the client of the key-value store."""
    return _STATE.client
