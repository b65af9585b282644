"""P2: a retried POST with the same key gets the same rollout, which is sampled once.

This holds however often the connection breaks and at whatever byte.
"""

import asyncio
import json
import random
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.fake_engine import FakeEngine
from tests.service.test_rollouts import body, group
from tests.serving import Served, serving

pytestmark = pytest.mark.slow

NUM_RETRIES = 40


async def broken_off(served: Served, request: bytes, sent: int, received: int) -> None:
    """Sends and reads this many bytes, then resets the connection."""
    address = urlsplit(served.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(request[:sent])
    await writer.drain()
    if received:
        await asyncio.wait_for(reader.read(received), 10)
    writer.transport.abort()


async def test_connections_broken_at_any_byte_sample_nothing_twice(tmp_path: Path) -> None:
    choose = random.Random(2)
    engine = FakeEngine(instant=False)
    asked = json.dumps(body(group(1, n=2), stream=True)).encode()
    head = f"POST /v1/rollouts HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(asked)}\r\n"
    request = (
        head.encode() + b"Content-Type: application/json\r\nIdempotency-Key: k\r\n\r\n" + asked
    )
    seen: set[str] = set()
    async with serving(engine, tmp_path) as served:
        for retry in range(NUM_RETRIES):
            whole = retry % 2
            sent = len(request) if whole else choose.randrange(1, len(request))
            await broken_off(served, request, sent, choose.randrange(1, 200) if whole else 0)
            seen |= engine.running.keys()
        assert len(seen) == 2
        engine.step(4)
        headers = {"idempotency-key": "k", "content-type": "application/json"}
        answers = [
            await served.http.post("/v1/rollouts", content=asked, headers=headers) for _ in "ab"
        ]
        assert answers[0].text == answers[1].text
        metrics = (await served.http.get("/metrics")).text
        served.server.rollouts.check()
    assert 'coppice_groups_total{outcome="done"} 1.0' in metrics
