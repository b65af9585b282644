"""Replicas with one Redis, as processes that can be killed, stopped, drained and started."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil

from tests.invariants.service_process import ROOT, ServerHome, home, until
from tests.ports import free_port
from tests.redis_server import RedisServer, redis_server
from tests.soak.cluster_model import FleetModel

NUM_REPLICAS = 3
STOP_SECONDS = 90.0
GONE_SECONDS = 15.0
ARENA_BYTES = 2**24
LEASE_SECONDS = 2.0
SETTINGS = {
    "SERVER__DRAIN_SECONDS": "20",
    "CLUSTER__HEARTBEAT_SECONDS": "0.5",
    "CLUSTER__EXPIRE_SECONDS": "4",
    "KV__CAPACITY_BYTES": str(ARENA_BYTES),
    "LIMITS__KEEP_ANSWERS_SECONDS": "60",
    "WEIGHTS__PEERS": "http://127.0.0.1:*",
    "WEIGHTS__REPLICATION_SECONDS": "60",
    "LOG__FORMAT": "json",
}


class Replica:
    """One replica, at the same address across restarts."""

    def __init__(
        self,
        model: FleetModel,
        index: int,
        place: ServerHome,
        arenas: Path,
        redis_url: str,
        settings: Mapping[str, str],
    ) -> None:
        port = free_port()
        self.place = place
        self.url = f"http://127.0.0.1:{port}"
        settings = {
            **SETTINGS,
            **model.settings(index),
            **settings,
            "SERVER__PORT": str(port),
            "SERVER__ADVERTISED_URL": self.url,
            "CLUSTER__REDIS_URL": redis_url,
            "WEIGHTS__DIRECTORY": str(place.weights),
            "KV__DIRECTORY": str(arenas),
        }
        self._model = model
        self._environment = os.environ | {
            **{f"COPPICE_{name}": text for name, text in settings.items()},
            "PYTHONPATH": f"{ROOT}:{ROOT / 'client'}",
            "TMPDIR": str(place.temporary),
            "TORCHINDUCTOR_CACHE_DIR": str(place.path / "compiled"),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._descendants: list[psutil.Process] = []

    def start(self) -> None:
        """Starts the process; returns when it serves."""
        self._launch()
        until(self._ready, seconds=self._model.start_seconds, what="a replica serves")
        self._note_descendants()

    def starts(self) -> bool:
        """Starts the process; true if it serves.

        If not, it has exited with an error and left no process.
        """
        process = self._launch()
        until(
            lambda: process.poll() is not None or self.passes("readyz"),
            seconds=self._model.start_seconds,
            what="a replica serves, or says that it cannot",
        )
        if process.poll() is None:
            self._note_descendants()
            return True
        assert process.returncode == 1, self._log_tail()
        assert "the engine did not start" in self._log_tail()
        return False

    def _launch(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", self._model.module, "serve"]
        with self.place.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=self._environment, stdout=log, stderr=log
            )
        return self._process

    def _note_descendants(self) -> None:
        assert self._process is not None
        self._descendants = psutil.Process(self._process.pid).children(recursive=True)

    def kill(self) -> None:
        """Kills the process; its child processes must end with it."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._check_gone()

    def pause(self, seconds: float) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> float:
        """Drains the replica; returns the duration. It must exit with status 0."""
        assert self._process is not None
        began = time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(STOP_SECONDS) == 0, self._log_tail()
        took = time.monotonic() - began
        self._check_gone()
        return took

    def end(self) -> None:
        """Kills it in any state."""
        if self._process is not None and self._process.poll() is None:
            self._descendants += psutil.Process(self._process.pid).children(recursive=True)
            self._process.kill()
            self._process.wait()
        for child in filter(_lives, self._descendants):
            child.kill()

    def processes(self, name: str) -> list[psutil.Process]:
        """Processes of its engine with this name."""
        return [child for child in self._descendants if name in child.name()]

    def passes(self, probe: str) -> bool:
        try:
            return httpx.get(f"{self.url}/{probe}", timeout=10).status_code == 200
        except httpx.TransportError:
            return False

    def status(self) -> dict[str, object]:
        status: dict[str, object] = httpx.get(f"{self.url}/v1/status", timeout=10).json()
        return status

    def errors(self) -> str:
        """The last errors in its log, with their tracebacks."""
        lines = self.place.log.read_text().splitlines()
        return "\n".join(["", *[line for line in lines if '"level": "error"' in line][-3:]])

    def _ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log_tail()
        return self.passes("readyz")

    def _check_gone(self) -> None:
        until(
            lambda: not any(map(_lives, self._descendants)),
            seconds=GONE_SECONDS,
            what="its processes end",
        )

    def _log_tail(self) -> str:
        return self.place.log.read_text()[-4000:]


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def replicas(
    model: FleetModel, folder: Path, arenas: Path, *, num_spare: int = 0, **settings: str
) -> Iterator[tuple[RedisServer, Sequence[Replica]]]:
    """Replicas on one Redis, with further settings. `arenas`: the directory of all KV arenas.

    The last `num_spare` replicas are not started.
    """
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(folder))
        made = [
            Replica(model, index, stack.enter_context(home()), arenas, redis.url, settings)
            for index in range(NUM_REPLICAS + num_spare)
        ]
        for replica in made:
            stack.callback(replica.end)
        for replica in made[:NUM_REPLICAS]:
            replica.start()
        yield redis, made
