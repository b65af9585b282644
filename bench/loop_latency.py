"""Benchmark: latency of health probes while the service handles its largest valid requests.

The service runs with the tests' fake engine, so all time is the service's own. A separate process
sends probes of `/livez` at a fixed rate. Latency counts from the time when a probe was due, so
probes that could not be sent in time count as waiting. A third process sends requests sequentially.
"""

import argparse
import asyncio
import http.client
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import uvloop

from bench.harness.record import Record, Row, add_out
from service.http.serve import tuned
from tests.fake_engine import FakeEngine
from tests.serving import serving

EVERY_SECONDS = 0.01
IDLE_SECONDS = 1.0  # the server closes connections that are idle for 5 s
GOAL_MILLISECONDS = 100
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
MAX_CONTEXT_TOKENS = 2**20


def rollout(num_groups: int, n: int, prompt_tokens: int, max_tokens: int) -> bytes:
    group = {"prompt": {"token_ids": [1] * prompt_tokens}, "n": n}
    return json.dumps(
        {"groups": [group] * num_groups, "sampling": {"max_tokens": max_tokens}}
    ).encode()


def refused() -> bytes:
    """Large request body that is refused only for its last group.

    Its token ids are whole-number floats, which are valid.
    """
    floats = ",".join(["1.0"] * 1_000_000)
    group = f'{{"prompt": {{"token_ids": [{floats}]}}}}'
    return f'{{"groups": [{group}, {group}, 1]}}'.encode()


REQUESTS: Mapping[str, Callable[[], bytes]] = {
    "16 groups of 1,024 samples of one token": lambda: rollout(16, 1024, 1, 1),
    "4,096 groups of one sample": lambda: rollout(4096, 1, 1, 1),
    "4,096 groups of 16 samples": lambda: rollout(4096, 16, 1, 1),
    "4,096 groups with prompts of 900 tokens": lambda: rollout(4096, 1, 900, 1),
    "an answer of 16,384 samples of 250 tokens": lambda: rollout(1024, 16, 1, 250),
    "a refused body of 2,000,000 integral floats": refused,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Latency of each probe in ms while requests were in flight, and seconds of each request."""

    probes: list[float]
    seconds: list[float]

    def percentile(self, share: float) -> float:
        ordered = sorted(self.probes)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def measure(body: bytes, rounds: int) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "body"
        path.write_bytes(body)
        engine = FakeEngine(max_context_tokens=MAX_CONTEXT_TOKENS)
        async with serving(engine, Path(folder)) as served:
            tuning = asyncio.create_task(tuned())
            probes = await _started("--probe", served.url)
            assert probes.stdin is not None and probes.stdout is not None
            await probes.stdout.readline()  # printed when the first probe is due
            spans = list[tuple[float, float]]()
            for _ in range(rounds):
                sent = await _started("--send", served.url, "--body", str(path))
                began, ended = (await sent.communicate())[0].split()
                spans.append((float(began), float(ended)))
                engine.submitted.clear()
            probes.stdin.close()
            waited = json.loads((await probes.communicate())[0])
            tuning.cancel()
    # Probes while a process starts are excluded, since it competes for the processor.
    during = [wait for due, wait in waited if any(b <= due <= e for b, e in spans)]
    return Measured(probes=during, seconds=[ended - began for began, ended in spans])


async def _started(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "bench.loop_latency", *arguments],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )


async def probe(url: str) -> None:
    """Send health probes at a fixed rate until stdin ends, then print their latencies.

    Each probe has its own connection, so none waits for another.
    """
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    due, waited = time.monotonic(), list[tuple[float, float]]()
    free = list[tuple[Connection, float]]()  # with the time since which each is idle

    async def one(due: float) -> None:
        while free and free[-1][1] < time.monotonic() - IDLE_SECONDS:
            free.pop()[0][1].close()
        connection = free.pop()[0] if free else await asyncio.open_connection(*_address(url))
        await _ask(connection)
        waited.append((due, 1000 * (time.monotonic() - due)))
        free.append((connection, time.monotonic()))

    print(due, flush=True)
    async with asyncio.TaskGroup() as probes:
        while not ended.done():
            due += EVERY_SECONDS
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            probes.create_task(one(due))
    print(json.dumps(waited))


async def _ask(connection: Connection) -> None:
    reader, writer = connection
    writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n")[0]))


def send(url: str, body: bytes) -> None:
    connection = http.client.HTTPConnection(*_address(url))
    began = time.monotonic()
    connection.request("POST", "/v1/rollouts", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    while answer.read(2**20):
        pass
    print(began, time.monotonic())


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    return parts.hostname, parts.port


def record(measured: Mapping[str, Measured]) -> Record:
    rows = []
    for name, each in measured.items():
        p99 = each.percentile(0.99)
        rows.append(
            Row(
                what=f"p99 of /livez, {name}",
                value=f"{p99:.1f} ms (median {each.percentile(0.5):.1f}, longest "
                f"{max(each.probes):.1f}; the request {statistics.median(each.seconds):.2f} s)",
                goal=f"< {GOAL_MILLISECONDS} ms",
                verdict="met" if p99 < GOAL_MILLISECONDS else "missed",
            )
        )
    return Record(
        name="loop_latency",
        claim="Latency of `/livez`, one probe due every 10 ms, while the largest permitted "
        "requests are submitted and answered by the service with a fake engine.",
        rows=rows,
        raw={name: [round(value, 2) for value in each.probes] for name, each in measured.items()},
    )


async def measure_all(rounds: int) -> dict[str, Measured]:
    return {name: await measure(body(), rounds) for name, body in REQUESTS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--probe", metavar="URL", help="send probes (internal)")
    parser.add_argument("--send", metavar="URL", help="send --body (internal)")
    parser.add_argument("--body", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    add_out(parser)
    arguments = parser.parse_args()
    if arguments.probe:
        asyncio.run(probe(arguments.probe))
    elif arguments.send:
        send(arguments.send, arguments.body.read_bytes())
    else:
        result = record(uvloop.run(measure_all(arguments.rounds)))
        result.show()
        print(f"\nwrote {result.write(arguments.out).name}")
        missed = [row.what for row in result.rows if row.verdict != "met"]
        sys.exit(f"missed: {missed}" if missed else 0)


if __name__ == "__main__":
    main()
