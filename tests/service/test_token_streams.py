"""`stream_tokens`: records with the tokens of running samples, before the samples themselves."""

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from coppice import AsyncRollouts, Record, Retry, SampleRecord, TokensRecord
from tests.fake_engine import FakeEngine
from tests.service.test_resume import resume_request, started
from tests.service.test_rollouts import body, group, lines, running_samples
from tests.serving import Served, serving


def streaming(*groups: dict[str, Any], **rest: Any) -> dict[str, Any]:
    return body(*groups, stream=True, stream_tokens=True, **rest)


async def parsed(got: Any) -> AsyncIterator[dict[str, Any]]:
    async for line in got.aiter_lines():
        yield json.loads(line)


def tokens_of(records: Sequence[dict[str, Any]]) -> dict[tuple[int, int], list[int]]:
    """The tokens of each sample in its tokens records, which are consecutive."""
    found: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for record in records:
        if record["type"] == "tokens":
            key = (record["group"], record["index"])
            assert record["start"] == len(found[key])
            assert len(record["logprobs"]) == len(record["token_ids"])
            assert record["versions"][-1]["end"] == len(record["token_ids"])
            found[key] += record["token_ids"]
    return dict(found)


async def test_tokens_are_sent_as_they_are_sampled(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        asked = streaming(group(1), sampling={"max_tokens": 6})
        async with served.http.stream("POST", "/v1/rollouts", json=asked) as got:
            records = parsed(got)
            assert (await anext(records))["type"] == "start"
            await running_samples(served, 1)
            for start in (0, 2, 4):
                engine.step(2)
                assert await anext(records) == {
                    "type": "tokens",
                    "group": 0,
                    "index": 0,
                    "start": start,
                    "token_ids": [start + 1, start + 2],
                    "logprobs": [-0.5, -0.5],
                    "versions": [{"version": "v0", "start": 0, "end": 2}],
                }
            rest = [record async for record in records]
    assert [record["type"] for record in rest] == ["sample", "group", "end"]
    assert rest[0]["sample"]["token_ids"] == [1, 2, 3, 4, 5, 6]


async def test_tokens_of_each_sample_come_before_it_and_are_complete(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        asked = streaming(group(1, n=3), group(2, 3, n=2), sampling={"max_tokens": 9})
        async with served.http.stream("POST", "/v1/rollouts", json=asked) as got:
            await running_samples(served, 5)
            stepping = asyncio.create_task(stepped(engine))
            records = await lines(got)
            await stepping
    samples = {
        (r["group"], r["sample"]["index"]): r["sample"]["token_ids"]
        for r in records
        if r["type"] == "sample"
    }
    assert len(samples) == 5
    assert tokens_of(records) == samples
    for key in samples:
        kinds = [r["type"] for r in records if sample_key(r) == key]
        assert kinds[-1] == "sample" and set(kinds[:-1]) == {"tokens"}


def sample_key(record: dict[str, Any]) -> tuple[int, int] | None:
    index = record.get("sample", record).get("index")
    return None if record["type"] == "group" or index is None else (record["group"], index)


async def stepped(engine: FakeEngine) -> None:
    while engine.running:
        engine.step(1)
        await asyncio.sleep(0.001)


async def test_other_streams_have_no_tokens_and_cost_nothing(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        asked = body(group(1), stream=True)
        async with served.http.stream("POST", "/v1/rollouts", json=asked) as got:
            await running_samples(served, 1)
            engine.step(2)
            engine.step(2)
            records = await lines(got)
    assert [record["type"] for record in records] == ["start", "sample", "group", "end"]
    assert [sample.on_tokens for sample in engine.submitted] == [None]


async def test_slow_reader_receives_what_it_has_missed_in_one_record(tmp_path: Path) -> None:
    """A second reader that connects late, in place of one whose socket is full."""
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        asked = streaming(group(1), sampling={"max_tokens": 400})
        async with served.http.stream("POST", "/v1/rollouts", json=asked) as got:
            await running_samples(served, 1)
            for _ in range(300):
                engine.step(1)
            path = f"/v1/rollouts/{got.headers['coppice-rollout-id']}"
            headers = {"accept": "application/x-ndjson"}
            async with served.http.stream("GET", path, headers=headers) as late:
                records = parsed(late)
                assert (await anext(records))["type"] == "start"
                missed = await anext(records)
                engine.step(100)
                rest = [record async for record in records]
    assert (missed["start"], missed["token_ids"]) == (0, [i % 256 for i in range(1, 301)])
    assert [record["type"] for record in rest] == ["tokens", "sample", "group", "end"]


async def test_tokens_that_are_resumed_are_not_sent_again(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        asked = resume_request(started(90, 91, 92), stream=True, stream_tokens=True)
        async with served.http.stream("POST", "/v1/rollouts", json=asked) as got:
            await running_samples(served, 3)
            engine.step(2)
            await asyncio.sleep(0.01)
            engine.step(100)
            records = await lines(got)
    sent = [r for r in records if r["type"] == "tokens" and (r["group"], r["index"]) == (0, 0)]
    assert [record["start"] for record in sent] == [3, 5]
    assert [record["token_ids"] for record in sent] == [[5, 6], [7, 8, 9]]


async def test_tokens_after_a_weights_update_have_its_version(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        asked = streaming(group(1), sampling={"max_tokens": 8})
        async with served.http.stream("POST", "/v1/rollouts", json=asked) as got:
            await running_samples(served, 1)
            engine.step(2)
            engine.version = "v1"
            engine.step(2)
            records = parsed(got)
            assert (await anext(records))["type"] == "start"
            assert (await anext(records))["versions"] == [
                {"version": "v0", "start": 0, "end": 2},
                {"version": "v1", "start": 2, "end": 4},
            ]
            engine.step(8)
            last, sample = await anext(records), await anext(records)
    assert last["versions"] == [{"version": "v1", "start": 0, "end": 4}]
    assert sample["sample"]["versions"] == [
        {"version": "v0", "start": 0, "end": 2},
        {"version": "v1", "start": 2, "end": 8},
    ]


async def test_tokens_of_other_versions_than_the_exact_one_are_not_sent(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        exact = {"exact_version": "v0"}
        asked = streaming(group(1), weights=exact, sampling={"max_tokens": 8})
        async with served.http.stream("POST", "/v1/rollouts", json=asked) as got:
            await running_samples(served, 1)
            engine.step(2)
            for version in ("v1", "v0", "v0"):
                engine.version = version
                engine.step(2)
            records = await lines(got)
    assert tokens_of(records) == {(0, 0): [1, 2]}
    [sample] = [r["sample"] for r in records if r["type"] == "sample"]
    assert (sample["token_ids"], sample["finish_reason"]) == ([1, 2], "version_changed")


async def test_abort_ends_the_tokens_with_those_of_the_sample(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        asked = streaming(group(1, n=2), sampling={"max_tokens": 50})
        async with served.http.stream("POST", "/v1/rollouts", json=asked) as got:
            await running_samples(served, 2)
            engine.step(5)
            await served.http.delete(f"/v1/rollouts/{got.headers['coppice-rollout-id']}")
            records = await lines(got)
    assert tokens_of(records) == {(0, 0): [1, 2, 3, 4, 5], (0, 1): [1, 2, 3, 4, 5]}
    assert records[-1]["outcome"] == "cancelled"


async def test_surplus_samples_send_their_tokens_up_to_the_abort(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        asked = streaming(group(1, n=2), finish={"num_samples": 1}, sampling={"max_tokens": 50})
        async with served.http.stream("POST", "/v1/rollouts", json=asked) as got:
            await running_samples(served, 2)
            engine.step(3)
            first, _ = engine.running.values()
            first.limit = 3
            engine.step(1)
            records = await lines(got)
    reasons = {r["sample"]["finish_reason"] for r in records if r["type"] == "sample"}
    assert "surplus" in reasons
    samples = [r["sample"]["token_ids"] for r in records if r["type"] == "sample"]
    assert sorted(tokens_of(records).values()) == sorted(samples)


async def test_closed_connection_aborts_the_samples(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        asked = streaming(group(1), sampling={"max_tokens": 50})
        async with served.http.stream("POST", "/v1/rollouts", json=asked):
            await running_samples(served, 1)
            engine.step(2)
        await running_samples(served, 0)
        assert not engine.running


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ({}, "needs stream: true"),
        ({"stream": True, "branching": {"mode": "fixed", "depth": 1}}, "branching"),
    ],
)
async def test_tokens_need_a_stream_of_samples(
    tmp_path: Path, rest: dict[str, Any], message: str
) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        asked = body(group(1), stream_tokens=True, **rest)
        answer = await served.http.post("/v1/rollouts", json=asked)
    assert answer.status_code == 422
    assert message in answer.text


async def test_client_yields_each_token_once_across_reconnects(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with (
        serving(engine, tmp_path) as served,
        AsyncRollouts(served.url, retry=Retry()) as rollouts,
    ):
        stream = rollouts.stream([[1, 2]], n=2, max_tokens=40, stream_tokens=True)
        got: list[Record] = [await anext(stream)]
        await running_samples(served, 2)
        engine.step(5)
        got += [await anext(stream), await anext(stream)]
        await broken(served)
        engine.step(5)
        stepping = asyncio.create_task(stepped(engine))
        got += [record async for record in stream]
        await stepping
    for index in (0, 1):
        parts = [r for r in got if isinstance(r, TokensRecord) and r.index == index]
        [sample] = [
            r.sample for r in got if isinstance(r, SampleRecord) and r.sample.index == index
        ]
        assert [token for part in parts for token in part.token_ids] == sample.token_ids
        assert [part.start for part in parts] == starts_of(parts)


def starts_of(parts: Sequence[TokensRecord]) -> list[int]:
    return [sum(len(part.token_ids) for part in parts[:i]) for i in range(len(parts))]


async def broken(served: Served) -> None:
    """Closes all connections on the server's side."""
    connections: list[Any] = list(served.connections)
    for connection in connections:
        connection.transport.abort()
    await asyncio.sleep(0.01)
