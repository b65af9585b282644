"""Stream of a rollout's records, each yielded once, across reconnects."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from coppice.errors import CoppiceError
from coppice.transport.deduplicator import RecordDeduplicator
from coppice.transport.driver import Driver
from coppice.transport.messages import HttpRequest
from coppice.transport.ndjson import NdjsonReader
from coppice.transport.request_sender import RequestSender
from coppice.wire.records import Record

NDJSON = "application/x-ndjson"


async def stream_records(
    sender: RequestSender, call: HttpRequest, deduplicator: RecordDeduplicator
) -> AsyncGenerator[Record, None]:
    """Yields the records. A repeated request replays all records from the first one."""
    retry_state = sender.retry_state(call)
    while not deduplicator.ended:
        deduplicator.on_reconnect()
        try:
            async with aclosing(_read_connection(sender.driver, call)) as records:
                async for record in records:
                    if deduplicator.is_new(record):
                        retry_state.reset()
                        yield record
        except CoppiceError as error:
            # After the end record the stream is complete, however the connection ends.
            if not deduplicator.ended and not await retry_state.wait_before_retry(error):
                raise


async def _read_connection(driver: Driver, call: HttpRequest) -> AsyncGenerator[Record, None]:
    reader = NdjsonReader()
    async with aclosing(driver.receive(call)) as chunks:
        async for chunk in chunks:
            for record in reader.feed(chunk):
                yield record
    reader.finish()
