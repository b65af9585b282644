"""Exchange of finished samples with the other replicas, for the draft stores of all of them.

Serving never waits for Redis: finished samples are put into a bounded buffer, which a task writes
to the stream. The same task reads the entries of other replicas and passes them to the engine.
Drafts are verified, so neither the order nor the loss of entries changes any sample.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Literal, get_args

from engine.errors import EngineDead
from engine.protocol import Engine
from engine.types import Completion, SampleRequest
from service.draft_history.entries import (
    MAX_ENTRY_BYTES,
    EncodedEntry,
    FinishedText,
    MalformedEntry,
    decode,
    encode,
)
from service.draft_history.settings import DraftHistorySettings
from service.draft_history.stream import Cursor, HistoryStream, HistoryUnavailable
from service.weights.versions import Versions

DropReason = Literal["overflow", "too_long", "missed", "malformed", "refused"]
"""Reason why a sample was not exchanged.

overflow: this replica finishes more than it may write, or Redis is not available. too_long: the
sample does not fit into an entry. missed: Redis has dropped the entry before it was read.
malformed: the entry cannot be used. refused: the engine's draft store has not accepted the sample.
The reasons missed and malformed count entries of several samples.
"""
Direction = Literal["sent", "received"]
DROP_REASONS: tuple[DropReason, ...] = get_args(DropReason)
BUFFER_SECONDS = 8
"""Size of the buffers for samples to write, in seconds at the maximum rate; at least two intervals.

An interval's samples arrive before the exchange that writes them.
"""
READ_COST = 4096
"""Bytes of the read rate that an entry takes in addition to its size, own ones included."""
RESPONSE_COST = 256
"""Bytes of the read rate that each response takes in addition, for its call to the draft store."""
STOP_SECONDS = 5.0

log = logging.getLogger(__name__)


class ByteBudget:
    """Token bucket of bytes per second. A call may overdraw it, which the next calls wait for.

    It holds the bytes of `seconds`, at least the time between two uses: bytes beyond are lost.
    """

    def __init__(self, rate: int, seconds: float, clock: Callable[[], float]) -> None:
        self._rate, self._capacity, self._clock = rate, rate * seconds, clock
        self._available, self._updated_at = self._capacity, clock()

    def is_available(self) -> bool:
        now = self._clock()
        self._available += self._rate * (now - self._updated_at)
        self._available, self._updated_at = min(self._available, self._capacity), now
        return self._available > 0

    def spend(self, num_bytes: int) -> None:
        self._available -= num_bytes


class Outbox:
    """Finished samples that are not written yet, bounded in bytes; the oldest are dropped first."""

    def __init__(self, max_bytes: int, on_drop: Callable[[DropReason, int], None]) -> None:
        self._max_bytes, self._on_drop = max_bytes, on_drop
        self._texts: deque[FinishedText] = deque()
        self._entries: deque[EncodedEntry] = deque()
        self._num_text_bytes = self._num_entry_bytes = 0

    def add(self, text: FinishedText) -> None:
        if text.num_bytes > MAX_ENTRY_BYTES:
            return self._on_drop("too_long", 1)
        self._texts.append(text)
        self._num_text_bytes += text.num_bytes
        while self._num_text_bytes > self._max_bytes:
            self._num_text_bytes -= self._texts.popleft().num_bytes
            self._on_drop("overflow", 1)

    async def encode(self) -> None:
        """Encode the samples in a thread, as entries to write."""
        texts, self._texts, self._num_text_bytes = self._texts, deque(), 0
        if not texts:
            return
        self._entries += (entries := await asyncio.to_thread(encode, texts))
        self._num_entry_bytes += sum(len(entry.data) for entry in entries)
        while self._num_entry_bytes > self._max_bytes:
            self._on_drop("overflow", self.pop().num_responses)

    def first(self) -> EncodedEntry | None:
        return self._entries[0] if self._entries else None

    def pop(self) -> EncodedEntry:
        entry = self._entries.popleft()
        self._num_entry_bytes -= len(entry.data)
        return entry


class DraftHistory:
    """Exchange of one replica; it runs inside `running`.

    `open_stream` opens the stream for the label of the engine's draft store. Entries that are older
    than `store_file`, the file that the store was loaded from, are in the store already. `on_drop`
    and `on_exchange` count, `on_failure` is called for each exchange that failed.
    """

    def __init__(
        self,
        settings: DraftHistorySettings,
        engine: Engine,
        versions: Versions,
        *,
        open_stream: Callable[[str], HistoryStream],
        store_file: Path | None = None,
        on_drop: Callable[[DropReason, int], None],
        on_exchange: Callable[[Direction, int, int], None],
        on_failure: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._engine, self._versions = settings, engine, versions
        self._open_stream = open_stream
        self._on_drop, self._on_exchange, self._on_failure = on_drop, on_exchange, on_failure
        buffer_seconds = max(BUFFER_SECONDS, 2 * settings.interval_seconds)
        self._outbox = Outbox(math.ceil(buffer_seconds * settings.write_bytes_per_second), on_drop)
        burst_seconds = max(1.0, settings.interval_seconds)
        self._write_budget = ByteBudget(settings.write_bytes_per_second, burst_seconds, clock)
        self._read_budget = ByteBudget(settings.read_bytes_per_second, burst_seconds, clock)
        self._cursor = Cursor(id=(_saved_at(store_file), 0))
        self._task: asyncio.Task[None] | None = None
        self._last_failure: str | None = None
        self.is_available = False

    def start(self) -> None:
        """Start the exchange, once the engine serves; without a draft store there is none."""
        label = self._engine.info.draft_store_label
        if label is None:
            log.warning("draft_history.enabled has no effect: the engine has no draft store")
            return
        self._engine.listen_finished(self.on_finished)
        self._task = asyncio.create_task(self._run(label), name="draft-history")

    async def close(self) -> None:
        self._engine.listen_finished(None)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=STOP_SECONDS)

    def on_finished(self, sample: SampleRequest, completion: Completion) -> None:
        """Queue a finished sample, unless its prefixes are private.

        Samples without a salt share the prefix cache among all callers. Those with a salt, as all
        calls of agent sessions have, stay on this replica.
        """
        is_private = sample.cache_salt or sample.kept_kv or sample.session_id
        if is_private or not completion.versions or not completion.token_ids:
            return
        sequence = self._versions.sequence_of(completion.versions[-1].version)
        text = FinishedText(
            sequence=self._versions.active.sequence if sequence is None else sequence,
            prompt=sample.prompt_token_ids,
            response=completion.token_ids,
        )
        self._outbox.add(text)

    async def _run(self, label: str) -> None:
        async with self._opened(label) as stream:
            while True:
                await self._exchange_safely(stream)
                await asyncio.sleep(self._settings.interval_seconds)

    @asynccontextmanager
    async def _opened(self, label: str) -> AsyncIterator[HistoryStream]:
        stream = self._open_stream(label)
        try:
            yield stream
        finally:
            with suppress(HistoryUnavailable):
                await stream.close()

    async def _exchange_safely(self, stream: HistoryStream) -> None:
        """Exchange samples. Failures are counted, and the next exchange is the retry."""
        try:
            await self.exchange(stream)
        except HistoryUnavailable as unavailable:
            self._on_failed_exchange(str(unavailable))
        except EngineDead:
            self._on_failed_exchange("the engine died")
        except Exception:
            log.exception("an exchange of the draft history failed")
            self._on_failed_exchange("internal error")
        else:
            self.is_available, self._last_failure = True, None

    def _on_failed_exchange(self, failure: str) -> None:
        """Count a failure, and log it unless it is the same as that of the exchange before."""
        if failure != self._last_failure:
            log.warning("the draft history is not available: %s", failure)
        self.is_available, self._last_failure = False, failure
        self._on_failure()

    async def exchange(self, stream: HistoryStream) -> None:
        """Read the samples of other replicas, then write those that have finished here.

        A write that timed out may still be carried out later, and is repeated. While Redis does not
        respond, the read before it fails, so that no entry is written once per exchange.
        """
        await self._outbox.encode()
        while self._read_budget.is_available() and not await self._read(stream):
            pass
        while (entry := self._outbox.first()) and self._write_budget.is_available():
            self._write_budget.spend(len(entry.data))
            await stream.append(entry.data)
            self._outbox.pop()
            self._on_exchange("sent", entry.num_responses, len(entry.data))

    async def _read(self, stream: HistoryStream) -> bool:
        """Read the next part of the stream; returns whether it was the last."""
        part = await stream.read(self._cursor)
        self._cursor = part.cursor
        self._on_drop("missed", part.num_missed)
        self._on_drop("malformed", part.num_refused)
        self._read_budget.spend(part.num_read * READ_COST + sum(map(len, part.entries)))
        for data in part.entries:
            await self._receive(data)
        return part.is_last

    async def _receive(self, data: bytes) -> None:
        try:
            entry = await asyncio.to_thread(decode, data, self._engine.info.vocab_size)
        except MalformedEntry as malformed:
            log.debug("an entry of the draft history is malformed: %s", malformed)
            return self._on_drop("malformed", 1)
        texts = entry.draft_texts(self._versions.age(entry.sequence))
        num_responses = sum(len(one.responses) for one in texts)
        self._read_budget.spend(num_responses * RESPONSE_COST)
        num_added = await self._engine.add_draft_texts(texts)
        self._on_exchange("received", num_added, len(data))
        self._on_drop("refused", num_responses - num_added)


def _saved_at(file: Path | None) -> int:
    """Time at which a draft store was saved, in milliseconds since the epoch; 0 if it was not."""
    try:
        return 0 if file is None else int(file.stat().st_mtime * 1000)
    except OSError:
        return 0
