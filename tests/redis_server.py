"""A real Redis server per test, which can be killed, paused, flushed and restarted.

It persists nothing on disk: after a restart it is empty.
"""

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from redis import Redis

from tests.ports import free_port
from tests.tools import tool, tool_environment

START_SECONDS = 20.0


class RedisServer:
    """Keeps its port across restarts. `lines` are appended to its configuration."""

    def __init__(self, folder: Path, lines: Sequence[str] = ()) -> None:
        self.port = free_port()
        self._folder = folder
        self._lines = [
            "bind 127.0.0.1",
            f"port {self.port}",
            f"dir {folder}",
            f"logfile {folder / 'redis.log'}",
            'save ""',
            "appendonly no",
            *lines,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        file = self._folder / "redis.conf"
        file.write_text("\n".join(self._lines))
        command = [tool("redis-server"), str(file)]
        self._process = subprocess.Popen(command, env=tool_environment())
        deadline = time.monotonic() + START_SECONDS
        while not self._listens():
            log = self._folder / "redis.log"
            assert time.monotonic() < deadline, log.read_text() if log.exists() else "no log"
            time.sleep(0.01)

    def kill(self) -> None:
        """Kills the process, which resets every connection at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    def pause(self) -> None:
        """Stops the process: it still accepts connections and never answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def flush(self) -> None:
        with Redis(port=self.port) as redis:
            redis.flushall()

    def keys(self) -> list[str]:
        with Redis(port=self.port, decode_responses=True) as redis:
            return sorted(map(str, redis.scan_iter("*")))

    def put(self, key: str, entries: Mapping[str, str] | str | bytes) -> None:
        """Writes the key as a foreign client would."""
        with Redis(port=self.port) as redis:
            if isinstance(entries, str | bytes):
                redis.set(key, entries)
                return
            for field, entry in entries.items():
                redis.hset(key, field, entry)

    def put_deadline(self, key: str, member: str, milliseconds: float) -> None:
        """Writes the time at which an entry expires, in milliseconds since the epoch."""
        with Redis(port=self.port) as redis:
            redis.zadd(key, {member: milliseconds})

    def _listens(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False


@contextmanager
def redis_server(folder: Path, lines: Sequence[str] = ()) -> Iterator[RedisServer]:
    home = folder / "redis"
    home.mkdir()
    server = RedisServer(home, lines)
    server.start()
    try:
        yield server
    finally:
        server.kill()
        shutil.rmtree(home)
