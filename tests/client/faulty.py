"""A server on a real socket that follows the contract and loses its connections."""

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from coppice import ProgressRecord, Record, StartRecord
from coppice.wire.packed.requests import PACKED_MEDIA_TYPE
from coppice.wire.packed.results import pack
from coppice.wire.rollouts import RunningAnswer
from tests.client.answers import ANSWER, RECORDS

_RESET = struct.pack("ii", 1, 0)


class Faulty:
    """Starts a rollout for every new key, and for every request without one.

    `cuts` are the numbers of bytes after which the next answers end, one per answer; the others are
    complete. Samples take no time here, so there are no progress records.
    """

    def __init__(self) -> None:
        self.url = ""
        self.cuts: list[int] = []
        self.keys: list[str | None] = []
        self.deleted: list[str] = []
        self.polls: list[str] = []
        self.num_running_answers = 0
        self.num_started = 0
        self._ids: dict[str, str] = {}
        self._lock = threading.Lock()

    def start(self, key: str | None) -> str:
        with self._lock:
            self.keys.append(key)
            if key in self._ids:
                return self._ids[key]
            self.num_started += 1
            rollout_id = f"r{self.num_started}"
            if key is not None:
                self._ids[key] = rollout_id
            return rollout_id

    def forget(self) -> None:
        """Forgets all rollouts, as a restarted server does."""
        self._ids.clear()


def stream_records(rollout_id: str) -> list[Record]:
    rest = [record for record in RECORDS[1:] if not isinstance(record, ProgressRecord)]
    return [StartRecord(id=rollout_id), *rest]


def stream_bytes(rollout_id: str) -> bytes:
    """A complete answer as sent on the wire."""
    return b"".join(stream_parts(rollout_id))


def stream_parts(rollout_id: str) -> list[bytes]:
    """Its head, its records and its end."""
    lines = [record.model_dump_json().encode() + b"\n" for record in stream_records(rollout_id)]
    chunks = [f"{len(line):x}\r\n".encode() + line + b"\r\n" for line in lines]
    head = "HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n"
    return [head.encode() + b"\r\n", *chunks, b"0\r\n\r\n"]


def _whole(status: str, content_type: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # http.server requires these names.
    server: "_Server"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        rollout_id = self.server.faulty.start(self.headers["Idempotency-Key"])
        if self.headers["Prefer"] == "respond-async":
            self._answer(self._running(rollout_id))
        else:
            self._answer(stream_bytes(rollout_id))

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if self.headers["Accept"] == "application/x-ndjson":
            self._answer(stream_bytes(path.rpartition("/")[2]))
            return
        faulty = self.server.faulty
        faulty.polls.append(query)
        if faulty.num_running_answers:
            faulty.num_running_answers -= 1
            self._answer(self._running("r1"))
        else:
            self._answer(_whole("200 OK", PACKED_MEDIA_TYPE, pack(ANSWER)))

    def do_DELETE(self) -> None:
        self.server.faulty.deleted.append(self.path)
        self._answer(_whole("200 OK", "application/json", ANSWER.model_dump_json().encode()))

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _running(self, rollout_id: str) -> bytes:
        answer = RunningAnswer(id=rollout_id, num_samples=3, num_samples_done=0)
        return _whole("202 Accepted", "application/json", answer.model_dump_json().encode())

    def _answer(self, answer: bytes) -> None:
        cuts = self.server.faulty.cuts
        if not cuts:
            self.wfile.write(answer)
            return
        cut = cuts.pop(0)
        self.wfile.write(answer[:cut])
        self.close_connection = True
        if cut % 2:
            # A reset, where the others close cleanly.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.connection.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    faulty: Faulty

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores disconnected clients."""


@contextmanager
def faulty_server() -> Iterator[Faulty]:
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.faulty = Faulty()
        server.faulty.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.faulty
        finally:
            server.shutdown()
            thread.join()
