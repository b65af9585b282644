"""A real `coppice serve` in its own process group.

It writes only to a folder of its own, so that leftover files can be counted.
"""

import getpass
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from engine.runtime.leftover_files import (
    FileId,
    file_id,
    files_used_by,
    find_leftover_shared_memory,
)

ROOT = Path(__file__).parents[2]
START_SECONDS = 180.0
_READY = re.compile(r"ready: serving .* on (http://\S+?)[\"\s]")
# Compiled kernels and headers are not leftovers: the next engine reuses them.
_COMPILED = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"


def until(condition: Callable[[], bool], *, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


@dataclass(frozen=True, kw_only=True)
class ServerHome:
    """The folder for all files of a server. Short: the path of a Unix socket has at most 107 bytes.

    `held` are files that its processes had open: leftovers of other engines are excluded.
    """

    path: Path
    held: set[FileId] = field(default_factory=set)

    @property
    def temporary(self) -> Path:
        return self.path / "t"

    @property
    def weights(self) -> Path:
        return self.path / "w"

    @property
    def log(self) -> Path:
        return self.path / "log"

    def leftover_files(self) -> list[str]:
        """Leftover files, except the log and files shared by living processes."""
        kept = self.temporary / _COMPILED.name  # torch's precompiled headers
        found = (file for folder in (self.temporary, self.weights) for file in folder.rglob("*"))
        files = [file for file in found if not file.is_relative_to(kept)]
        shared = [file for file in find_leftover_shared_memory() if self._held(file)]
        return sorted(map(str, [*files, *shared]))

    def _held(self, file: Path) -> bool:
        try:
            return file_id(file.stat()) in self.held
        except FileNotFoundError:  # removed by the start of another engine
            return False


@contextmanager
def home() -> Iterator[ServerHome]:
    path = Path(tempfile.mkdtemp(prefix="coppice-"))
    for folder in ("t", "w"):
        (path / folder).mkdir()
    try:
        yield ServerHome(path=path)
    finally:
        shutil.rmtree(path)


@dataclass(frozen=True, kw_only=True)
class ServiceProcess:
    """`url` is set once it serves."""

    process: subprocess.Popen[bytes]
    home: ServerHome
    url: str
    descendants: list[psutil.Process]

    @property
    def core(self) -> psutil.Process:
        (core,) = (child for child in self.descendants if "EngineCore" in child.name())
        return core

    @property
    def log(self) -> str:
        return self.home.log.read_text()

    def signal(self, number: signal.Signals, *, group: bool = False) -> None:
        """Sends a signal to the service or, as a terminal does, to its whole process group."""
        (os.killpg if group else os.kill)(self.process.pid, number)

    def wait(self, seconds: float) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self.log[-4000:]}") from None

    def record_open_files(self) -> None:
        """Records the files that its processes hold, to tell its leftovers from those of others.

        Slow.
        """
        for pid in (self.process.pid, *(child.pid for child in self.descendants)):
            self.home.held.update(files_used_by(pid))

    def surviving_processes(self) -> list[str]:
        """Descendants that outlive it."""
        return [child.name() for child in self.descendants if _lives(child)]


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def service(place: ServerHome, *flags: str, path: Path | None = None) -> Iterator[ServiceProcess]:
    """Kills the service and its descendants if the test leaves it running.

    It imports packages from `path`, too.
    """
    command = [sys.executable, "-m", "service", "serve", "--port", "0"]
    command += ["--weights.directory", str(place.weights), "--log.format", "json", *flags]
    packages = (ROOT, ROOT / "client", *([path] if path else []))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, packages))}
    environment["TMPDIR"] = str(place.temporary)
    environment.setdefault("COPPICE_ENGINE__CPU_THREADS", "1")  # other tests need the cores
    # A shared compile cache makes other engines of the tests start faster (Makefile).
    environment.pop("TORCHDYNAMO_DISABLE", None)
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_COMPILED))
    with place.log.open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    descendants: list[psutil.Process] = []
    try:
        url = _serving_url(process, place)
        descendants = psutil.Process(process.pid).children(recursive=True)
        served = ServiceProcess(process=process, home=place, url=url, descendants=descendants)
        served.record_open_files()
        yield served
    finally:
        for victim in (psutil.Process(p) for p in [process.pid] if process.poll() is None):
            descendants += victim.children(recursive=True)
            process.kill()
        for child in filter(_lives, descendants):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        process.wait()


def _serving_url(process: "subprocess.Popen[bytes]", place: ServerHome) -> str:
    deadline = time.monotonic() + START_SECONDS
    while (found := _READY.search(place.log.read_text())) is None:
        assert process.poll() is None and time.monotonic() < deadline, place.log.read_text()[-4000:]
        time.sleep(0.1)
    return found.group(1)
