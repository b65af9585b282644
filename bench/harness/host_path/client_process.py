"""Client process of the host path's benchmark, which uses as little processor time as it can.

    python -m bench.harness.host_path.client_process

It reads a job per line from stdin, opens its connections, and prints an empty line. At the next
line it sends the requests, and prints the result. Answers are parsed after the last one has come.
"""

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, cast
from urllib.parse import urlsplit

import uvloop

from bench.harness.host_path.loads import ROUTES, Load, Route, requests_of

HEAD_END, LAST_CHUNK = b"\r\n\r\n", b"\r\n0\r\n\r\n"


class Exchange(asyncio.Protocol):
    """A connection with one request at a time, and the pieces of its answer with their times."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._start()

    def _start(self) -> None:
        self.pieces = list[tuple[float, bytes]]()
        self._missing: int | None = None
        self._is_chunked, self._tail = False, b""
        self._answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def connection_lost(self, error: Exception | None) -> None:
        if not self._answered.done():
            self._answered.set_exception(error or ConnectionError("the server closed early"))
            self._answered.exception()  # an idle connection may be closed

    async def ask(self, request: bytes) -> list[tuple[float, bytes]]:
        assert self._transport is not None
        self._start()
        self._transport.write(request)
        await self._answered
        return self.pieces

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))
        if self._missing is None and not self._is_chunked:
            self._read_head()
        elif self._missing is not None:
            self._missing -= len(data)
        length = len(LAST_CHUNK)
        self._tail = (self._tail + data[-length:])[-length:]
        if self._missing == 0 or (self._is_chunked and self._tail == LAST_CHUNK):
            self._answered.set_result(None)

    def _read_head(self) -> None:
        so_far = b"".join(data for _, data in self.pieces)
        head, end, body = so_far.partition(HEAD_END)
        if not end:
            return
        lines = head.lower().split(b"\r\n")
        assert lines[0].endswith(b" 200 ok"), so_far.decode(errors="replace")
        self._is_chunked = b"transfer-encoding: chunked" in lines
        for line in lines:
            if line.startswith(b"content-length:"):
                self._missing = int(line.partition(b":")[2]) - len(body)


async def run(job: dict[str, Any]) -> None:
    route, load = ROUTES[job["route"]], Load(**job["load"])
    waves = [requests_of(route, load, job["model"]) for _ in range(load.num_waves)]
    address, loop = urlsplit(job["url"]), asyncio.get_running_loop()
    exchanges = [
        (await loop.create_connection(Exchange, address.hostname, address.port))[1]
        for _ in range(load.num_groups)
    ]
    print(flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    began, answers = time.perf_counter(), list[list[tuple[float, bytes]]]()
    for requests in waves:
        pairs = zip(exchanges, requests, strict=True)
        answers += await asyncio.gather(*(each.ask(request) for each, request in pairs))
    seconds = time.perf_counter() - began
    for each in exchanges:
        each.close()
    print(json.dumps(result(route, load, seconds, answers)), flush=True)


def result(
    route: Route, load: Load, seconds: float, answers: Sequence[list[tuple[float, bytes]]]
) -> dict[str, Any]:
    num_tokens = sum(route.count(_body(pieces)) for pieces in answers)
    assert num_tokens == load.num_tokens, f"{num_tokens} tokens instead of {load.num_tokens}"
    num_bytes = sum(len(data) for pieces in answers for _, data in pieces)
    gaps = sorted(itertools.chain.from_iterable(_gaps(route, pieces) for pieces in answers))
    p99 = gaps[int(0.99 * len(gaps))] if gaps else None
    return {"seconds": seconds, "num_bytes": num_bytes, "p99_gap_seconds": p99}


def _gaps(route: Route, pieces: Sequence[tuple[float, bytes]]) -> Iterator[float]:
    """Times between the deliveries of tokens of a stream."""
    marker = route.marker.encode()
    times = [at for at, data in pieces if marker in data] if marker else []
    return (after - before for before, after in pairwise(times))


def _body(pieces: Sequence[tuple[float, bytes]]) -> bytes:
    head, _, body = b"".join(data for _, data in pieces).partition(HEAD_END)
    return b"".join(_chunks(body)) if b"chunked" in head.lower() else body


def _chunks(body: bytes) -> Iterator[bytes]:
    at = 0
    while True:
        end = body.index(b"\r\n", at)
        length = int(body[at:end], 16)
        if not length:
            return
        yield body[end + 2 : end + 2 + length]
        at = end + 2 + length + 2


async def serve() -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        await run(json.loads(line))


if __name__ == "__main__":
    uvloop.run(serve())
