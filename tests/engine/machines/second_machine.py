"""A second machine on this one: a network namespace, or another loopback address.

The namespace has its own addresses and shared memory, and does not see the directories that are
hidden from it. It needs root; without it, tests that need these differences are skipped.
"""

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv4Network, ip_interface
from pathlib import Path

import psutil
import pytest
import yaml

from engine.settings import EngineSettings
from engine.speculation.settings import SpeculationSettings
from tests.ports import free_port

ROOT = Path(__file__).parents[3]
HIDE = (
    'for folder in "$COPPICE_HIDDEN" /dev/shm; do mount -t tmpfs tmpfs "$folder"; done; exec "$@"'
)


def run(*command: str) -> None:
    """Run a command that needs root. Raises OSError with its message."""
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    if ended.returncode:
        raise OSError(f"{' '.join(command)}: {ended.stderr.strip()}")


@dataclass(frozen=True)
class SecondMachine:
    """Command prefix of processes on the second machine, and the addresses of both.

    `namespace` is the name of its network namespace, if it has one.
    """

    prefix: Sequence[str]
    master_addr: str
    address: str
    namespace: str = ""

    def popen(self, command: Sequence[str], log: Path) -> "subprocess.Popen[bytes]":
        with log.open("wb") as output:
            return subprocess.Popen(
                [*self.prefix, *command],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": ".:client"},
            )

    def disconnect(self) -> None:
        run("ip", "-n", self.namespace, "link", "set", f"{self.namespace}b", "down")


LOOPBACK = SecondMachine((), "127.0.0.1", "127.0.0.1")


@contextmanager
def namespace_or_skip(hidden: Path) -> Iterator[SecondMachine]:
    """A second machine in a namespace; the test is skipped if namespaces are not permitted."""
    with ExitStack() as stack:
        try:
            machine = stack.enter_context(namespace(hidden))
        except OSError as error:
            pytest.skip(f"network namespaces are not permitted: {error}")
        yield machine


@contextmanager
def namespace(hidden: Path) -> Iterator[SecondMachine]:
    """A network namespace that is connected to this one. Raises OSError if it is not permitted."""
    name = f"cop{secrets.token_hex(4)}"
    enter = ("ip", "netns", "exec", name, "env", f"COPPICE_HIDDEN={hidden}", "unshare", "-m")
    run("ip", "netns", "add", name)
    try:
        own, other = _connect(name)
        run(*enter, "true")
        yield SecondMachine((*enter, "bash", "-c", HIDE, "bash"), own, other, name)
    finally:
        run("ip", "netns", "del", name)


def _connect(name: str) -> tuple[str, str]:
    """Connect a namespace to this one. Returns the addresses of this side and of the other."""
    network = _unused_network()
    own, other = f"{name}a", f"{name}b"
    run("ip", "link", "add", own, "type", "veth", "peer", "name", other, "netns", name)
    run("ip", "addr", "add", f"{network[1]}/30", "dev", own)
    run("ip", "link", "set", own, "up")
    run("ip", "-n", name, "addr", "add", f"{network[2]}/30", "dev", other)
    for device in (other, "lo"):
        run("ip", "-n", name, "link", "set", device, "up")
    return str(network[1]), str(network[2])


def _unused_network() -> IPv4Network:
    """Random network of two hosts that no interface of this machine has."""
    used = [
        ip_interface(f"{address.address}/{address.netmask}").network
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET and address.netmask
    ]
    while True:
        network = IPv4Network((10 << 24 | secrets.randbits(22) << 2, 30))
        if not any(network.overlaps(other) for other in used):
            return network


@dataclass(frozen=True)
class Node:
    """The process of `coppice serve` on the second machine."""

    process: "subprocess.Popen[bytes]"
    log: Path
    port: int

    def ranks(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if "Worker" in child.name()]

    def processes(self) -> list[psutil.Process]:
        """Running processes of the session that the process has started in."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                is_running = process.status() != psutil.STATUS_ZOMBIE
                if is_running and os.getsid(process.pid) == self.process.pid:
                    found.append(process)
        return found


@contextmanager
def node(
    machine: SecondMachine,
    settings: EngineSettings,
    folder: Path,
    speculation: SpeculationSettings | None = None,
) -> Iterator[Node]:
    """`coppice serve` of machine 1; its log is in `folder`."""
    engine = settings.model_dump(mode="json", exclude_unset=True)
    engine["node_rank"] = 1
    port = free_port()
    config = folder / "node.yaml"
    drafting = speculation.model_dump(mode="json", exclude_unset=True) if speculation else {}
    sections = {"engine": engine, "speculation": drafting, "server": {"port": port}}
    config.write_text(yaml.safe_dump(sections))
    command = [sys.executable, "-m", "service", "serve", "--config", str(config)]
    process = machine.popen(command, folder / "node.log")
    try:
        yield Node(process, folder / "node.log", port)
    finally:
        for child in _children(process):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
        process.wait()


def _children(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).children(recursive=True)
    return []
