"""A rollout's records, each of them once, over as many connections as it takes."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from coppice.errors import CoppiceError
from coppice.transport.deduplicator import Replay
from coppice.transport.driver import Driver
from coppice.transport.messages import Call
from coppice.transport.ndjson import RecordReader
from coppice.transport.request_sender import Courier
from coppice.wire.records import Record

NDJSON = "application/x-ndjson"


async def records_of(courier: Courier, call: Call, replay: Replay) -> AsyncGenerator[Record, None]:
    """The server answers the same call with the same records from the first one on."""
    trouble = courier.trouble(call)
    while not replay.ended:
        replay.rewind()
        try:
            async with aclosing(_connection(courier.driver, call)) as records:
                async for record in records:
                    if replay.is_new(record):
                        trouble.over()
                        yield record
        except CoppiceError as error:
            # Nothing is missing once the last record is there, however the connection ends.
            if not replay.ended and not await trouble.endured(error):
                raise


async def _connection(driver: Driver, call: Call) -> AsyncGenerator[Record, None]:
    reader = RecordReader()
    async with aclosing(driver.receive(call)) as chunks:
        async for chunk in chunks:
            for record in reader.feed(chunk):
                yield record
    reader.finish()
