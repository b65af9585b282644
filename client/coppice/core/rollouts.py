"""Rollouts: whole, streamed, aborted."""

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Unpack
from urllib.parse import quote

from coppice.core.call import Call, json_call
from coppice.core.collector import Collector
from coppice.core.driver import Driver
from coppice.core.reader import RecordReader
from coppice.errors import TransportError
from coppice.options import RolloutOptions, rollout_request
from coppice.progress import progress_bar
from coppice.prompts import PromptLike
from coppice.results import RolloutResult, result_of
from coppice.wire.records import Record
from coppice.wire.rollouts import RolloutAnswer, RolloutRequest


class RolloutOperations:
    """Needs a driver and keeps no state beside it."""

    _driver: Driver

    async def rollout(
        self,
        prompts: Iterable[PromptLike],
        *,
        progress: bool = False,
        **options: Unpack[RolloutOptions],
    ) -> RolloutResult:
        """Draws samples for every prompt and waits for all of them.

        The answer comes as a stream, whose progress records tell a long sample from a dead server
        and keep proxies from closing a silent connection.
        """
        request = rollout_request(prompts, **options)
        collector = Collector()
        with progress_bar(request, wanted=progress) as tell:
            async with aclosing(self._records(request)) as records:
                async for record in records:
                    collector.add(record)
                    tell(record)
        return collector.result()

    def stream(
        self, prompts: Iterable[PromptLike], **options: Unpack[RolloutOptions]
    ) -> AsyncGenerator[Record, None]:
        """Draws samples for every prompt and yields each record as it comes.

        StreamBroken if the last one is not an EndRecord. Whoever stops early, by leaving the loop
        and dropping or closing this generator, closes the connection and so cancels the rollout.
        """
        return self._records(rollout_request(prompts, **options))

    async def abort(self, rollout_id: str) -> RolloutResult:
        """Ends a running rollout. The tokens so far are kept."""
        path = f"/v1/rollouts/{quote(rollout_id, safe='')}"
        reply = await self._driver.send(Call(method="DELETE", path=path))
        return result_of(reply.read(RolloutAnswer))

    async def _records(self, request: RolloutRequest) -> AsyncGenerator[Record, None]:
        call = json_call("POST", "/v1/rollouts", request, accept="application/x-ndjson")
        reader = RecordReader()
        try:
            async with aclosing(self._driver.receive(call)) as chunks:
                async for chunk in chunks:
                    for record in reader.feed(chunk):
                        yield record
        except TransportError:
            # Nothing is missing once the last record is there, however the connection ends.
            if not reader.ended:
                raise
        reader.finish()
