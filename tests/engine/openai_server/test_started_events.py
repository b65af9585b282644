"""Streams of vLLM's serving classes: errors of the start, order of the events, and their end."""

import asyncio
import gc
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest

from engine.openai_server.engine_client import RolloutEngineClient, started_events


class StubClient:
    """The samples start when `start` has a result, or fail with its exception."""

    def __init__(self) -> None:
        self.start: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.closed = 0

    async def wait_started(self) -> None:
        await asyncio.shield(self.start)

    def close(self) -> None:
        self.closed += 1


class Stream:
    """Events of vLLM: the first ones before the samples start, the others after it."""

    def __init__(self, client: StubClient, early: list[str], late: list[str]) -> None:
        self._client, self._early, self._late = client, early, late
        self.ended = False

    async def events(self) -> AsyncGenerator[str, None]:
        try:
            for event in self._early:
                yield event
            await asyncio.shield(self._client.start)
            for event in self._late:
                yield event
        finally:
            self.ended = True


async def begun(client: StubClient, stream: Stream) -> Any:
    return await started_events(stream.events(), cast(RolloutEngineClient, client))


@pytest.mark.parametrize("early", [[], ["created", "in progress"]])
@pytest.mark.parametrize("late", [[], ["text", "done"]])
async def test_events_keep_their_order(early: list[str], late: list[str]) -> None:
    client = StubClient()
    stream = Stream(client, early, late)
    starting = asyncio.ensure_future(begun(client, stream))
    await asyncio.sleep(0)
    client.start.set_result(None)
    assert [event async for event in await starting] == early + late
    assert stream.ended and client.closed == 1


async def test_errors_of_the_start_are_raised_before_the_first_event() -> None:
    client = StubClient()
    stream = Stream(client, ["created"], [])
    starting = asyncio.ensure_future(begun(client, stream))
    await asyncio.sleep(0)
    client.start.set_exception(ValueError("no such version"))
    with pytest.raises(ValueError, match="no such version"):
        await starting
    assert stream.ended and client.closed == 1


async def test_a_caller_that_leaves_before_the_start_ends_the_stream() -> None:
    client = StubClient()
    stream = Stream(client, ["created"], [])
    starting = asyncio.ensure_future(begun(client, stream))
    await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert stream.ended and client.closed == 1


async def test_a_stream_that_nobody_reads_ends() -> None:
    """A client may leave between the start of the samples and the first event."""
    client = StubClient()
    stream = Stream(client, [], ["text"])
    client.start.set_result(None)
    events = await begun(client, stream)
    del events
    gc.collect()
    for _ in range(10):
        await asyncio.sleep(0)
    assert stream.ended and client.closed == 1


async def test_an_error_that_vllm_reports_itself_is_an_event() -> None:
    """Then no samples were started."""
    client = StubClient()

    async def failed() -> AsyncGenerator[str, None]:
        yield "error"

    events = await started_events(failed(), cast(RolloutEngineClient, client))
    assert [event async for event in events] == ["error"]
    assert client.closed == 1
