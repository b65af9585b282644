"""Streams that break and resume, over real sockets."""

import asyncio
import gc
import random
from collections.abc import Iterator
from itertools import accumulate

import pytest

from coppice import (
    AsyncRollouts,
    ConnectionFailed,
    CoppiceError,
    Retry,
    RolloutLost,
    Rollouts,
    StreamBroken,
)
from tests.client.conftest import Connect
from tests.client.fake_clock import FakePace
from tests.client.faulty import Faulty, faulty_server, stream_parts, stream_records

pytestmark = pytest.mark.slow

BORDERS = list(accumulate(map(len, stream_parts("r1"))))
NUM_BYTES = BORDERS[-1]


@pytest.fixture
def server() -> Iterator[Faulty]:
    with faulty_server() as server:
        yield server


def resuming(connect: Connect, server: Faulty) -> Rollouts:
    return connect(base_url=server.url, retry=Retry(), clock=FakePace())


@pytest.mark.parametrize("seed", range(10))
def test_stream_cut_anywhere_yields_every_record_once(
    connect: Connect, server: Faulty, seed: int
) -> None:
    dice = random.Random(seed)
    client = resuming(connect, server)
    for number in range(1, 6):
        server.cuts = [dice.randrange(NUM_BYTES) for _ in range(dice.randint(1, 7))]
        records = list(client.stream(["hello"]))
        assert records == stream_records(f"r{number}")
        assert server.num_started == number
    assert len(set(server.keys)) == 5
    assert not server.deleted


def test_rollout_cut_at_every_byte_is_complete_and_single(connect: Connect, server: Faulty) -> None:
    client = resuming(connect, server)
    for number, cut in enumerate(range(0, NUM_BYTES, 37), start=1):
        server.cuts = [cut]
        result = client.rollout(["hello"])
        assert (result.id, server.num_started) == (f"r{number}", number)
        assert [len(group.samples) for group in result.groups] == [2, 1]


def test_progress_resets_the_failure_count(connect: Connect, server: Faulty) -> None:
    server.cuts = [border for border in BORDERS[1:-1] for _ in range(3)]
    client = connect(base_url=server.url, retry=Retry(attempts=4), clock=FakePace())
    assert list(client.stream(["hello"])) == stream_records("r1")


def test_stream_without_progress_is_given_up_and_aborted(connect: Connect, server: Faulty) -> None:
    server.cuts = [NUM_BYTES // 2] * 5
    client = connect(base_url=server.url, retry=Retry(attempts=4), clock=FakePace())
    came = []
    with pytest.raises((StreamBroken, ConnectionFailed)):
        for record in client.stream(["hello"]):
            came.append(record)
    assert came == stream_records("r1")[: len(came)]
    assert len(server.keys) == 4
    assert server.deleted == ["/v1/rollouts/r1"]


def test_restarted_server_without_the_rollout_is_detected(connect: Connect, server: Faulty) -> None:
    server.cuts = [NUM_BYTES // 2]
    records = resuming(connect, server).stream(["hello"])
    assert next(records) == stream_records("r1")[0]
    server.forget()
    with pytest.raises(RolloutLost, match="no longer has rollout r1 and started r2"):
        list(records)
    # The rollout that was started by mistake is aborted.
    assert server.deleted == ["/v1/rollouts/r2"]


def test_without_retries_there_is_no_key_and_no_second_attempt(
    connect: Connect, server: Faulty
) -> None:
    server.cuts = [NUM_BYTES // 2]
    with pytest.raises(CoppiceError):
        connect(base_url=server.url).rollout(["hello"])
    assert server.keys == [None]
    assert not server.deleted


def test_leaving_early_aborts_the_rollout(connect: Connect, server: Faulty) -> None:
    records = resuming(connect, server).stream(["hello"])
    next(records)
    records.close()
    assert server.deleted == ["/v1/rollouts/r1"]


def test_leaving_at_the_end_aborts_nothing(connect: Connect, server: Faulty) -> None:
    records = resuming(connect, server).stream(["hello"])
    while next(records).type != "end":
        pass
    records.close()
    assert not server.deleted


def test_leaving_after_the_client_was_closed_raises_nothing(server: Faulty) -> None:
    with Rollouts(server.url) as client:
        records = client.stream(["hello"])
        next(records)
    records.close()
    assert not server.deleted


async def test_leaving_the_async_loop_aborts_the_rollout(server: Faulty) -> None:
    async with AsyncRollouts(server.url) as client:
        async for _ in client.stream(["hello"]):
            break
        gc.collect()
        async with asyncio.timeout(10):
            while not server.deleted:
                await asyncio.sleep(0.01)
    assert server.deleted == ["/v1/rollouts/r1"]


async def test_cancelled_rollout_is_aborted(server: Faulty) -> None:
    server.cuts = [NUM_BYTES // 2]
    waiting = asyncio.Event()

    class Stuck(FakePace):
        async def sleep(self, seconds: float) -> None:
            waiting.set()
            await asyncio.Event().wait()

    async with AsyncRollouts(server.url, clock=Stuck()) as client:
        rollout = asyncio.create_task(client.rollout(["hello"]))
        await waiting.wait()
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
    assert server.deleted == ["/v1/rollouts/r1"]


def test_interrupted_rollout_is_aborted(server: Faulty) -> None:
    server.cuts = [NUM_BYTES // 2]

    class Interrupted(FakePace):
        async def sleep(self, seconds: float) -> None:
            raise KeyboardInterrupt

    with Rollouts(server.url, clock=Interrupted()) as client, pytest.raises(KeyboardInterrupt):
        client.rollout(["hello"])
    assert server.deleted == ["/v1/rollouts/r1"]
