"""Malformed requests: random bytes, truncated heads, mutated bodies, unknown paths."""

import copy
import http.client
import json
import random
import socket
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

ANSWER_SECONDS = 60.0
BODIES: dict[str, Any] = {
    "/v1/rollouts": {
        "groups": [{"prompt": {"token_ids": [1, 2, 3]}, "n": 2, "id": "a", "seed": 7}],
        "sampling": {
            "max_tokens": 2,
            "temperature": 1.0,
            "top_p": 0.9,
            "top_k": 5,
            "stop_token_ids": [3],
            "ignore_eos": False,
        },
        "weights": {"min_version": "v0"},
        "finish": {"num_samples": 1, "deadline_seconds": 5},
        "priority": 0,
        "stream": False,
    },
    "/v1/score": {"items": [{"prompt": {"text": "1+1="}, "responses": [[1, 2], [3]]}]},
    "/v1/weights/v9": {"path": "/nowhere", "sequence": 3},
    "/v1/weights/v9/activate": {"mode": "keep", "allow_rollback": False},
}
ODD_VALUES: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**400, 1e-320, 1e308, "", "\x00",
    "v0", "\ud7ff", "x" * 300, [], {}, [[]], [-1], [2**40], {"": 0}, float("nan"), float("inf"),
]  # fmt: skip
METHODS = ["GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW", "CONNECT", "get"]
PATHS = [
    "/", "//", "/v1", "/v1/rollouts/", "/v1/rollouts/../pause", "/v1/%00", "/v1/rollouts/%ff",
    "/v1/rollouts?wait=1", "/v1/weights/%2e%2e", "/v1/weights/v0/activate/x", "/docs",
    "/" + "a" * 5000,
    "/v1/rollouts/none?wait=x", "/v1/score#x", "/v1/weights/v1/files/..%2fx", "*", "http://x/v1/status",
]  # fmt: skip
HEADERS = [
    ("Content-Type", "text/html"), ("Content-Type", ""), ("Accept", "image/png"), ("Accept", ","),
    ("Prefer", "respond-async; wait=x"), ("Idempotency-Key", ""), ("Idempotency-Key", "\xff" * 9),
    ("Idempotency-Key", "k" * 300), ("Host", "evil/?"), ("Host", ""), ("Expect", "200-ok"),
    ("Transfer-Encoding", "gzip"), ("Content-Length", "-1"), ("Content-Length", "x"),
    ("Content-Digest", "sha-256=:x:"), ("Authorization", "Bearer"), ("X", "y" * 70000),
    ("Range", "bytes=0-0,1-1"), ("Upgrade", "websocket"), ("Cookie", "\x80" * 100),
]  # fmt: skip


@dataclass
class Malformed:
    """`statuses`: 0 stands for a connection that was closed without an answer."""

    url: str
    total: int
    seed: int
    statuses: Counter[int] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def num_sent(self) -> int:
        return sum(self.statuses.values())

    def run(self, num_threads: int) -> None:
        threads = [
            threading.Thread(target=self._caller, args=(number, self.total // num_threads))
            for number in range(num_threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _caller(self, number: int, count: int) -> None:
        choose = random.Random(f"{self.seed}:{number}")
        address = urlsplit(self.url)
        caller = Caller(str(address.hostname), int(address.port or 0), choose)
        for _ in range(count):
            what, status = caller.ask()
            with self._lock:
                self.statuses[status] += 1
                if status >= 500 and status != 503:
                    self.violations.append(f"{status}: {what[:2000]}")
        caller.close()


class Caller:
    """One connection at a time: kept for whole requests, a new one for bytes that are none."""

    def __init__(self, host: str, port: int, choose: random.Random) -> None:
        self._address = (host, port)
        self._choose = choose
        self._kept: http.client.HTTPConnection | None = None

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def ask(self) -> tuple[str, int]:
        kind = self._choose.choices(
            [self._bytes, self._truncated, self._body, self._wrong_address], [5, 10, 60, 25]
        )[0]
        return kind()

    def _bytes(self) -> tuple[str, int]:
        return self._raw(self._choose.randbytes(self._choose.randrange(1, 400)))

    def _truncated(self) -> tuple[str, int]:
        """A valid request with some bytes changed, or truncated."""
        path = self._choose.choice(list(BODIES))
        body = json.dumps(BODIES[path]).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
        request = bytearray(head.encode() + b"Connection: close\r\n\r\n" + body)
        for _ in range(self._choose.randrange(1, 4)):
            request[self._choose.randrange(len(request))] = self._choose.randrange(256)
        cut = self._choose.choice([len(request), self._choose.randrange(1, len(request))])
        return self._raw(bytes(request[:cut]))

    def _body(self) -> tuple[str, int]:
        path = self._choose.choice(list(BODIES))
        body = copy.deepcopy(BODIES[path])
        for _ in range(self._choose.randrange(1, 4)):
            body = mutate(body, self._choose)
        return self._whole("POST", path, json.dumps(body).encode(), {})

    def _wrong_address(self) -> tuple[str, int]:
        method = self._choose.choice([*METHODS, "POST"])
        path = self._choose.choice([*PATHS, *BODIES])
        headers = dict(self._choose.sample(HEADERS, self._choose.randrange(3)))
        return self._whole(method, path, self._choose.randbytes(20), headers)

    def _whole(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[str, int]:
        what = f"{method} {path} {headers} {body!r}"
        try:
            if self._kept is None:
                self._kept = http.client.HTTPConnection(*self._address, timeout=ANSWER_SECONDS)
            self._kept.request(method, path, body, headers)
            answer = self._kept.getresponse()
            answer.read()
        except (http.client.HTTPException, ConnectionError):
            self.close()
            return what, 0
        return what, answer.status

    def _raw(self, data: bytes) -> tuple[str, int]:
        with socket.create_connection(self._address, timeout=ANSWER_SECONDS) as connection:
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(65536)
                while connection.recv(65536):
                    pass
            except ConnectionError:
                answer = b""
        status = answer[9:12]
        return repr(data), int(status) if status.isdigit() else 0


def mutate(value: Any, choose: random.Random) -> Any:
    """Changes one random value within `value`."""
    if choose.random() < 0.3 or not isinstance(value, dict | list) or not value:
        return copy.deepcopy(choose.choice(ODD_VALUES))
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = choose.choice(keys)
    if isinstance(value, dict):
        if choose.random() < 0.2:
            del value[key]
            return value
        if choose.random() < 0.1:
            value[choose.choice(["", "n", "kv", "\u00e9"])] = copy.deepcopy(
                choose.choice(ODD_VALUES)
            )
            return value
    value[key] = mutate(value[key], choose)
    return value
