"""A Ray cluster of two nodes with one rank each: this machine, and the second machine."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.engine.machines.second_machine import ROOT, SecondMachine
from tests.ports import free_port

RAY_PACKAGES = ROOT / ".ray"
VARIABLES = {
    "RAY_AUTH_MODE": "disabled",  # it would write a token to the home directory
    "RAY_worker_niceness": "0",  # its default of 15 takes minutes longer on a busy machine
    "RAY_USAGE_STATS_ENABLED": "0",
}
OBJECT_STORE_BYTES = 10**8
START_SECONDS = 90.0


@dataclass(frozen=True)
class RayNode:
    """The process of `ray start --block`, in a session of its own."""

    process: "subprocess.Popen[bytes]"
    log: Path

    def processes(self, name: str = "") -> list[psutil.Process]:
        """Running processes of the node, whose names contain `name`."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                is_running = process.status() != psutil.STATUS_ZOMBIE
                is_of_node = os.getsid(process.pid) == self.process.pid
                if is_running and is_of_node and name in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def ranks(self) -> list[psutil.Process]:
        """Actors that are ranks; Ray sets their titles."""
        return self.processes("ray::RayRank")

    def kill(self) -> None:
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()
        self.process.wait()


@dataclass(frozen=True)
class RayCluster:
    """`address` is that of the cluster; `first` and `second` are its nodes."""

    address: str
    first: RayNode
    second: RayNode


def _start(machine: Sequence[str], *arguments: str, log: Path) -> RayNode:
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *arguments]
    packages = os.pathsep.join(map(str, (ROOT, ROOT / "client", RAY_PACKAGES)))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*machine, *command],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | VARIABLES | {"PYTHONPATH": packages, "RAY_TMPDIR": str(log.parent)},
        )
    return RayNode(process, log)


@contextmanager
def ray_cluster(machine: SecondMachine, folder: Path) -> Iterator[RayCluster]:
    """A cluster whose files are in `folder`, which has a short path: Ray creates sockets there."""
    resources = [
        *("--num-cpus", "1", "--num-gpus", "0", "--disable-usage-stats"),
        *("--object-store-memory", str(OBJECT_STORE_BYTES)),
        *("--min-worker-port", "0", "--max-worker-port", "0"),
    ]
    port = free_port()
    address = f"{machine.master_addr}:{port}"
    head = [
        *("--head", "--port", str(port), "--node-ip-address", machine.master_addr),
        *("--include-dashboard", "false", "--temp-dir", str(folder)),
    ]
    worker = ("--address", address, "--node-ip-address", machine.address)
    nodes = [_start((), *head, *resources, log=folder / "first.log")]
    try:
        _wait_until_started(nodes[0])
        nodes.append(_start(machine.prefix, *worker, *resources, log=folder / "second.log"))
        _wait_until_started(nodes[1])
        yield RayCluster(address, *nodes)
    finally:
        for node in reversed(nodes):
            node.kill()


def _wait_until_started(node: RayNode) -> None:
    from tests.invariants.service_process import until

    def is_started() -> bool:
        assert node.process.poll() is None, node.log.read_text()
        return "Ray runtime started." in node.log.read_text()

    until(is_started, seconds=START_SECONDS, what="the Ray node has started")
