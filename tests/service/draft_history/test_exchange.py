"""Exchange of finished samples between two replicas: what is shared, and every bound and loss."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from engine.types import Completion, KeptKv, SampleRequest, Sampling, VersionSpan
from service.draft_history import exchange
from service.draft_history.entries import MAX_ENTRY_BYTES, FinishedText, encode
from service.draft_history.exchange import DraftHistory
from service.draft_history.settings import DraftHistorySettings
from service.draft_history.stream import Cursor, HistoryPart, HistoryUnavailable
from service.weights.versions import Versions, first_version
from tests.fake_engine import VOCAB_SIZE, FakeEngine

LABEL = "label"
REQUEST = SampleRequest(id="s", prompt_token_ids=[1, 2, 3], sampling=Sampling(max_tokens=8))


@dataclass
class MemoryStream:
    """Stream in memory. `num_refused` is added to the next part."""

    entries: list[bytes] = field(default_factory=list)
    is_available: bool = True
    num_refused: int = 0
    is_closed: bool = False

    async def append(self, data: bytes) -> None:
        self._check()
        self.entries.append(data)

    async def read(self, cursor: Cursor) -> HistoryPart:
        self._check()
        begin = cursor.number or 0
        found = self.entries[begin : begin + 2]
        refused, self.num_refused = self.num_refused, 0
        return HistoryPart(
            entries=found,
            cursor=replace(cursor, number=begin + len(found)),
            num_read=len(found),
            num_missed=0,
            num_refused=refused,
            is_last=len(found) < 2,
        )

    async def close(self) -> None:
        self.is_closed = True

    def _check(self) -> None:
        if not self.is_available:
            raise HistoryUnavailable("down")


class Replica:
    """Exchange of a replica with a fake engine, and its counters."""

    def __init__(self, store_file: Path | None = None, **settings: Any) -> None:
        self.engine = FakeEngine()
        self.engine.draft_store_label = LABEL
        self.versions = Versions(first_version("v0"))
        self.dropped: Counter[str] = Counter()
        self.exchanged: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()
        self.num_failures = 0
        self.now = 0.0
        self.stream = MemoryStream()
        self.history = DraftHistory(
            DraftHistorySettings(enabled=True, **settings),
            self.engine,
            self.versions,
            open_stream=lambda label: self.stream,
            store_file=store_file,
            on_drop=lambda reason, number: self.dropped.update({reason: number}),
            on_exchange=self.count,
            on_failure=self.fail,
            clock=lambda: self.now,
        )

    def count(self, direction: str, num_samples: int, num_bytes: int) -> None:
        self.exchanged[direction] += num_samples
        self.num_bytes[direction] += num_bytes

    def fail(self) -> None:
        self.num_failures += 1

    def finish(self, response: list[int], version: str = "v0", **changes: Any) -> None:
        spans = (VersionSpan(version=version, start=0, end=len(response)),)
        completion = Completion(
            token_ids=response,
            logprobs=[-0.5] * len(response),
            finish="length",
            versions=spans,
            num_cached_tokens=0,
        )
        self.history.on_finished(replace(REQUEST, **changes), completion)

    def activate(self, label: str, sequence: int) -> None:
        version = replace(first_version(label), sequence=sequence, state="staged")
        self.versions.put(version)
        self.versions.activated(label)

    async def exchange(self) -> None:
        await self.history.exchange(self.stream)

    def received(self) -> list[tuple[list[int], list[int], int]]:
        return [
            (texts.prompt.tolist(), response.tolist(), texts.age)
            for texts in self.engine.draft_texts
            for response in texts.responses
        ]


def pair(**settings: Any) -> tuple[Replica, Replica]:
    one, other = Replica(**settings), Replica(**settings)
    one.stream = other.stream = MemoryStream()
    return one, other


async def test_finished_samples_are_added_to_the_other_engine() -> None:
    one, other = pair()
    one.finish([7, 8])
    one.finish([7, 9], prompt_token_ids=[4])
    await one.exchange()
    await other.exchange()
    assert other.received() == [([1, 2, 3], [7, 8], 0), ([4], [7, 9], 0)]
    assert one.exchanged["sent"] == other.exchanged["received"] == 2
    assert one.num_bytes["sent"] == other.num_bytes["received"] > 0
    assert not +one.dropped and not +other.dropped


@pytest.mark.parametrize(
    "private",
    [
        {"cache_salt": "key:salt"},
        {"session_id": "session"},
        {"kept_kv": KeptKv(chain="chain")},
    ],
)
async def test_samples_with_private_prefixes_are_never_written(private: dict[str, Any]) -> None:
    one, _ = pair()
    one.finish([7, 8], **private)
    await one.exchange()
    assert one.stream.entries == []


async def test_samples_without_tokens_are_not_written() -> None:
    one, _ = pair()
    one.finish([])
    await one.exchange()
    assert one.stream.entries == []


async def test_ages_are_counted_in_activations_of_the_receiver() -> None:
    """Sequence numbers may have gaps, and the other replica may be a version ahead."""
    one, other = pair()
    for label, sequence in (("v10", 10), ("v20", 20)):
        for each in (one, other):
            await each.exchange()
            each.activate(label, sequence)
            one.finish([sequence], version=label)
            await one.exchange()
            await other.exchange()
    one.activate("v30", 30)
    one.finish([30], version="v30")
    one.finish([5], version="v0")
    one.finish([6], version="v10")
    await one.exchange()
    await other.exchange()
    ages = {response[0]: age for _, response, age in other.received()[-3:]}
    assert ages == {30: 0, 5: 2, 6: 1}


async def test_samples_beyond_the_write_rate_wait_and_the_oldest_are_dropped() -> None:
    one, other = pair(write_bytes_per_second=MAX_ENTRY_BYTES)
    for _ in range(4 * exchange.BUFFER_SECONDS):
        one.finish([5] * (MAX_ENTRY_BYTES // 8))
    await one.exchange()
    assert one.num_bytes["sent"] <= 2 * MAX_ENTRY_BYTES
    for second in range(1, 20):
        one.now = float(second)
        await one.exchange()
    assert one.num_bytes["sent"] <= (exchange.BUFFER_SECONDS + 1) * MAX_ENTRY_BYTES
    assert one.dropped["overflow"] >= 2 * exchange.BUFFER_SECONDS
    assert one.dropped["overflow"] + one.exchanged["sent"] == 4 * exchange.BUFFER_SECONDS
    assert len(one.stream.entries) > 1 and other.received() == []


@pytest.mark.parametrize("interval_seconds", [0.5, 10, 30])
async def test_rates_do_not_depend_on_the_interval(interval_seconds: float) -> None:
    rates = {f"{each}_bytes_per_second": MAX_ENTRY_BYTES for each in ("write", "read")}
    one, other = pair(interval_seconds=interval_seconds, **rates)
    for number in range(1, 121):
        for _ in range(3):
            one.finish([5] * (MAX_ENTRY_BYTES // 16))
        if number % max(1, interval_seconds) == 0:
            one.now = other.now = float(number)
            await one.exchange()
            await other.exchange()
    assert not +one.dropped
    assert one.exchanged["sent"] == 3 * 120
    assert other.exchanged["received"] >= 3 * 120 - 3 * interval_seconds


async def test_sample_that_fits_into_no_entry_is_dropped() -> None:
    one, _ = pair()
    one.finish([5] * (MAX_ENTRY_BYTES // 4))
    await one.exchange()
    assert one.stream.entries == [] and one.dropped["too_long"] == 1


async def test_flood_of_entries_is_read_at_the_allowed_rate() -> None:
    one, other = pair(read_bytes_per_second=MAX_ENTRY_BYTES)
    flood = encode([text(number, MAX_ENTRY_BYTES // 8) for number in range(100)])
    one.stream.entries += [entry.data for entry in flood]
    for second in range(10):
        other.now = float(second)
        await other.exchange()
    assert 8 * MAX_ENTRY_BYTES < other.num_bytes["received"] < 12 * MAX_ENTRY_BYTES


@pytest.mark.parametrize("num_responses", [1, 100])
async def test_flood_of_small_responses_is_read_at_a_lower_rate(num_responses: int) -> None:
    one, other = pair(read_bytes_per_second=MAX_ENTRY_BYTES)
    [entry] = encode([text(1, 1)] * num_responses)
    one.stream.entries += [entry.data] * 1000
    await other.exchange()
    cost = exchange.READ_COST + num_responses * exchange.RESPONSE_COST
    assert other.exchanged["received"] <= num_responses * (2 + MAX_ENTRY_BYTES // cost)


async def test_flood_of_refused_entries_ends_an_exchange() -> None:
    one, other = pair(read_bytes_per_second=MAX_ENTRY_BYTES)
    one.stream.entries += [b""] * 1000
    await other.exchange()
    assert other.dropped["malformed"] <= 2 + MAX_ENTRY_BYTES // exchange.READ_COST


def text(number: int, length: int) -> FinishedText:
    return FinishedText(sequence=0, prompt=[number], response=[5] * length)


async def test_malformed_entries_are_counted_and_the_rest_is_added() -> None:
    one, other = pair()
    [valid] = encode([text(1, 2)])
    [foreign] = encode([FinishedText(sequence=0, prompt=[1], response=[VOCAB_SIZE])])
    one.stream.entries += [b"x" * 100, foreign.data, b"", valid.data]
    one.stream.num_refused = 3
    await other.exchange()
    assert other.received() == [([1], [5, 5], 0)]
    assert other.dropped["malformed"] == 6


async def test_samples_wait_while_redis_is_away_and_are_written_later() -> None:
    one, other = pair()
    one.stream.is_available = False
    for number in range(3):
        one.finish([number])
        with pytest.raises(HistoryUnavailable):
            await one.exchange()
    one.stream.is_available = True
    await one.exchange()
    await other.exchange()
    assert [response for _, response, _ in other.received()] == [[0], [1], [2]]


async def test_entry_is_not_written_again_and_again_while_redis_responds_too_late() -> None:
    """A server that is suspended carries out what it was sent once it continues."""

    class SuspendedStream(MemoryStream):
        async def append(self, data: bytes) -> None:
            self.entries.append(data)
            self._check()

    one = Replica()
    one.stream = SuspendedStream(is_available=False)
    one.finish([7])
    for _ in range(5):
        with pytest.raises(HistoryUnavailable):
            await one.exchange()
    one.stream.is_available = True
    await one.exchange()
    assert len(one.stream.entries) == 1


async def test_responses_that_the_store_refuses_are_counted() -> None:
    one, other = pair()

    async def refuse(texts: object) -> int:
        return 0

    other.engine.add_draft_texts = refuse  # type: ignore[method-assign]
    one.finish([7])
    await one.exchange()
    await other.exchange()
    assert other.dropped["refused"] == 1 and other.exchanged["received"] == 0


async def test_entries_older_than_the_loaded_store_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "store").touch()
    saved_at = int((tmp_path / "store").stat().st_mtime * 1000)
    assert Replica(tmp_path / "store").history._cursor.id == (saved_at, 0)
    assert Replica(tmp_path / "none").history._cursor.id == (0, 0)


async def eventually(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.001)


async def test_first_failure_is_logged_with_its_reason_and_the_same_one_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = Replica(interval_seconds=0.001)
    one.stream.is_available = False
    one.history.start()
    await eventually(lambda: one.num_failures > 2)
    await one.history.close()
    assert [record.message for record in caplog.records] == [
        "the draft history is not available: down"
    ]


async def test_each_activation_between_two_exchanges_is_counted() -> None:
    one, other = pair()
    one.finish([7])
    await one.exchange()
    for label, sequence in (("v10", 10), ("v20", 20), ("v30", 30)):
        other.activate(label, sequence)
    await other.exchange()
    assert other.received() == [([1, 2, 3], [7], 3)]


async def test_exchange_runs_until_it_is_closed_and_survives_failures() -> None:
    one, other = pair(interval_seconds=0.001)
    one.history.start()
    other.history.start()
    one.finish([7, 8])
    await eventually(other.received)
    one.stream.is_available = False
    await eventually(lambda: one.num_failures > 1)
    assert not one.history.is_available
    one.stream.is_available = True
    await eventually(lambda: one.history.is_available)
    other.engine.alive = False
    one.finish([7, 9])
    await eventually(lambda: len(one.stream.entries) == 2)
    await eventually(lambda: not other.history.is_available)
    for each in (one, other):
        await each.history.close()
        assert each.engine.finished_listener is None
    assert one.stream.is_closed


async def test_engine_without_a_draft_store_exchanges_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = Replica()
    one.engine.draft_store_label = None
    one.history.start()
    assert one.engine.finished_listener is None
    assert "the engine has no draft store" in caplog.text
    await one.history.close()
