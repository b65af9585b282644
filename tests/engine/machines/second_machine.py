"""A second machine on this one: a network namespace, or another loopback address.

The namespace has its own addresses and shared memory, and does not see the directories that are
hidden from it. It needs root; without it, tests that need these differences are skipped.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from engine.settings import EngineSettings, SpeculationSettings
from tests.ports import free_port

ROOT = Path(__file__).parents[3]
NAME = f"cop{os.getpid() % 100_000}"
HIDE = (
    'for folder in "$COPPICE_HIDDEN" /dev/shm; do mount -t tmpfs tmpfs "$folder"; done; exec "$@"'
)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@dataclass(frozen=True)
class SecondMachine:
    """Command prefix of processes on the second machine, and the address of the first one."""

    prefix: Sequence[str]
    master_addr: str

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


LOOPBACK = SecondMachine((), "127.0.0.1")


@contextmanager
def namespace(hidden: Path) -> Iterator[SecondMachine]:
    """A network namespace that is connected to this one. Raises OSError if it is not permitted."""
    network = f"10.{213 + os.getpid() % 40}.{os.getpid() % 250}"
    try:
        ip("netns", "add", NAME)
    except subprocess.CalledProcessError as error:
        raise OSError(error.stderr.decode()) from error
    try:
        ip("link", "add", f"{NAME}a", "type", "veth", "peer", "name", f"{NAME}b", "netns", NAME)
        ip("addr", "add", f"{network}.1/30", "dev", f"{NAME}a")
        ip("link", "set", f"{NAME}a", "up")
        ip("-n", NAME, "addr", "add", f"{network}.2/30", "dev", f"{NAME}b")
        for device in (f"{NAME}b", "lo"):
            ip("-n", NAME, "link", "set", device, "up")
        enter = ("ip", "netns", "exec", NAME, "env", f"COPPICE_HIDDEN={hidden}")
        yield SecondMachine((*enter, "unshare", "-m", "bash", "-c", HIDE, "bash"), f"{network}.1")
    finally:
        ip("netns", "del", NAME)


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
    """`coppice serve` of machine 1; its copies are stored in `folder`."""
    engine = settings.model_dump(mode="json", exclude_unset=True)
    engine |= {"node_rank": 1, "copies_directory": str(folder / "copies")}
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
