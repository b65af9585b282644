"""KV goes along with moved samples; samples whose KV cannot be fetched in time are prefilled."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.types import Completion, SampleRequest
from service.cluster.in_memory import InMemoryRegistry
from service.prompt_kv.http_transfer import KvDataResponse
from tests.cluster import replica, sees
from tests.fake_engine import BLOCK_SIZE, FakeEngine
from tests.service.cluster.test_move_outcomes import sender_of
from tests.service.cluster.test_moves import (
    engine_of,
    moved_state,
    post,
    submitted,
)
from tests.service.test_rollouts import body, group, running_samples
from tests.serving import Served

pytestmark = pytest.mark.slow

PROMPT = [1 + i % 200 for i in range(70)]
SHARED = 64
TOKENS = 50
LONG = {"sampling": {"max_tokens": 200}}
NUM_BYTES = 1024
"""KV of a token of the fake engine."""


class ExportingEngine(FakeEngine):
    """Engine that runs requests with an export as soon as they are submitted."""

    exports = True
    on_added: Callable[[], Awaitable[None]] | None = None

    async def add_exported_kv(self, names: Sequence[str]) -> None:
        await super().add_exported_kv(names)
        if self.on_added is not None:
            await self.on_added()

    async def submit(self, samples: Sequence[SampleRequest]) -> list[Awaitable[Completion]]:
        pending = await super().submit(samples)
        for sample in samples if self.exports else ():
            if sample.export is not None:
                running = self.running[sample.id]
                self._compute_prompt(running)
                running.token_versions.append(self.version)
                self._finish(running, "length")
        return pending


@asynccontextmanager
async def pair(
    tmp_path: Path,
    *,
    one_host: bool = True,
    sender: dict[str, Any] | None = None,
    receiver: dict[str, Any] | None = None,
    **cluster: Any,
) -> AsyncIterator[tuple[Served, Served]]:
    """Two replicas. The second one has its shared memory elsewhere, unless they share a host."""
    shared = InMemoryRegistry()
    elsewhere = tmp_path / "shm"
    elsewhere.mkdir()
    kv: dict[str, Any] = {"capacity_bytes": 2**22, "spans_bytes": 2**22}
    sections = {
        "weights": {"peers": ["http://127.0.0.1:*"]},
        "cluster": {"move_seconds": 30, **cluster},
    }
    engines = [ExportingEngine(instant=False, prompt_kv=True) for _ in "ab"]
    own = kv | ({} if one_host else {"directory": elsewhere}) | (receiver or {})
    async with (
        replica(tmp_path / "a", engines[0], shared, kv=kv | (sender or {}), **sections) as a,
        replica(tmp_path / "b", engines[1], shared, kv=own, **sections) as b,
    ):
        for served in (a, b):
            await sees(served, 2)
        yield a, b


async def move(a: Served, b: Served, *groups: dict[str, Any], num_samples: int = 2) -> Any:
    """Start a rollout on the first replica, and move it; returns the request that waits for it."""
    calling = asyncio.create_task(post(a, body(*groups, **LONG)))
    await running_samples(a, num_samples)
    engine_of(a).step(TOKENS)
    await a.server.move_sender.send_all(30)
    await running_samples(b, num_samples)
    return calling


def moved_kv(served: Served) -> dict[str, float]:
    """Numbers of moved samples by outcome, on one replica."""
    (family,) = served.server.metrics.cluster.moved_kv.collect()
    return {
        each.labels["outcome"]: each.value
        for each in family.samples
        if each.name.endswith("_total") and each.value
    }


async def is_released(a: Served, b: Served) -> None:
    """Wait until no KV of the move is left."""
    async with asyncio.timeout(30):
        while b.server.kv_reuse.cache.num_bytes or b.server.kv_importer.num_held:
            await asyncio.sleep(0.001)
        status = a.server.prompt_kv.status()
        assert (status.num_handles, status.leased_bytes, status.reserved_bytes) == (0, 0, 0)


async def finish(b: Served, calling: Any) -> Any:
    engine_of(b).step(200)
    answer = (await calling).json()
    assert answer["outcome"] == "done"
    assert all(len(s["token_ids"]) == 200 for g in answer["groups"] for s in g["samples"])
    return answer


@pytest.mark.parametrize("one_host", [True, False])
async def test_moved_samples_load_all_full_blocks(tmp_path: Path, one_host: bool) -> None:
    """Over shared memory, and by HTTP."""
    async with pair(tmp_path, one_host=one_host) as (a, b):
        calling = await move(a, b, group(*PROMPT, n=2))
        first, second = engine_of(b).submitted
        for sample in (first, second):
            assert sample.load is not None
            end = (len(PROMPT) + TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE
            assert [piece.start for piece in sample.load.pieces] == [0, SHARED]
            assert sample.load.pieces[-1].end == end
            assert sample.load.num_requests == 2
        assert len({each.load.chain for each in (first, second) if each.load}) == 1
        assert len({each.load.pieces[0] for each in (first, second) if each.load}) == 1
        engine_of(b).step()
        num_cached = [engine_of(b).running[each.id].num_cached for each in (first, second)]
        assert num_cached == [96, 96]
        await is_released(a, b)
        assert moved_kv(b) == {"loaded": 2} and moved_kv(a) == {}
        await finish(b, calling)


async def test_a_single_sample_has_one_export(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, b):
        calling = await move(a, b, group(*PROMPT, n=1), num_samples=1)
        exports = [each.export for each in engine_of(a).submitted if each.export is not None]
        assert [(each.first_token, each.num_tokens) for each in exports] == [(0, 96)]
        await finish(b, calling)
        await is_released(a, b)


async def test_kv_of_several_groups_goes_along(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, b):
        groups = (group(*PROMPT, n=2), group(*PROMPT, n=2), group(9, *PROMPT, n=1))
        calling = await move(a, b, *groups, num_samples=5)
        assert all(each.load is not None for each in engine_of(b).submitted)
        await finish(b, calling)
        await is_released(a, b)
        assert moved_kv(b) == {"loaded": 5}


async def test_sample_without_a_full_block_is_counted(tmp_path: Path) -> None:
    first = {
        "token_ids": [7] * TOKENS,
        "logprobs": [-1.0] * TOKENS,
        "versions": [{"version": "v0", "start": 0, "end": TOKENS}],
    }
    request = body(group(1, 2, 3, n=2), **LONG, continue_from={"samples": [first]})
    async with pair(tmp_path) as (a, b):
        calling = asyncio.create_task(post(a, request))
        await running_samples(a, 2)
        engine_of(a).step(3)
        async with asyncio.timeout(10):
            await a.server.move_sender.send_all(8)
        await running_samples(b, 2)
        assert moved_kv(b) == {"loaded": 1, "too_small": 1}
        await finish(b, calling)
        await is_released(a, b)


@pytest.mark.parametrize(
    ("cluster", "receiver", "outcome", "counted"),
    [
        ({"move_kv_bytes_per_second": 0}, {}, "disabled", "a"),
        ({"move_kv_bytes_per_second": 1}, {}, "too_large", "a"),
        ({}, {"spans_bytes": 0}, "disabled", "b"),
    ],
)
async def test_samples_without_their_kv_are_prefilled(
    tmp_path: Path,
    cluster: dict[str, Any],
    receiver: dict[str, Any],
    outcome: str,
    counted: str,
) -> None:
    async with pair(tmp_path, receiver=receiver, **cluster) as (a, b):
        calling = await move(a, b, group(*PROMPT, n=2))
        assert all(each.load is None for each in engine_of(b).submitted)
        assert moved_kv({"a": a, "b": b}[counted]) == {outcome: 2}
        await finish(b, calling)
        await is_released(a, b)


async def test_samples_are_prefilled_if_the_receiver_has_no_room(tmp_path: Path) -> None:
    async with pair(tmp_path, receiver={"spans_bytes": 2**20}) as (a, b):
        prompts = [group(i, *PROMPT, *range(5, 200), n=2) for i in range(1, 7)]
        calling = await move(a, b, *prompts, num_samples=12)
        counted = moved_kv(b)
        assert counted["no_room"] and counted["loaded"]
        assert counted["no_room"] + counted["loaded"] == 12
        engine_of(b).step(200)
        assert (await calling).json()["outcome"] == "done"
        await is_released(a, b)


async def test_samples_are_prefilled_if_the_sender_has_no_room(tmp_path: Path) -> None:
    async with pair(tmp_path, sender={"capacity_bytes": 2**20}) as (a, b):
        prompts = [group(i, *PROMPT, *range(5, 200), n=2) for i in range(1, 7)]
        calling = await move(a, b, *prompts, num_samples=12)
        assert moved_kv(a)["no_room"] and moved_kv(b)["loaded"]
        assert moved_kv(a)["no_room"] + moved_kv(b)["loaded"] == 12
        engine_of(b).step(200)
        assert (await calling).json()["outcome"] == "done"
        await is_released(a, b)


async def test_export_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, b):
        calling = asyncio.create_task(post(a, body(group(*PROMPT, n=2), **LONG)))
        await running_samples(a, 2)
        engine = engine_of(a)
        assert isinstance(engine, ExportingEngine)
        engine.step(TOKENS)
        engine.exports = False
        await a.server.move_sender.send_all(1.0)
        await running_samples(b, 2)
        assert moved_kv(a) == {"timeout": 2}
        assert not engine.running
        await finish(b, calling)
        await is_released(a, b)


async def test_kv_of_an_earlier_version_is_not_moved(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, b):
        calling = asyncio.create_task(post(a, body(group(*PROMPT, n=2), **LONG)))
        await running_samples(a, 2)
        engine_of(a).step(TOKENS)
        for sample in engine_of(a).running.values():
            sample.kv_versions[:10] = ["older"] * 10
        await a.server.move_sender.send_all(30)
        await running_samples(b, 2)
        assert moved_kv(a) == {"other_version": 2}
        await finish(b, calling)


async def test_kv_of_samples_is_moved_again_from_the_blocks_of_their_chain(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as (a, b):
        calling = await move(a, b, group(*PROMPT, n=2))
        engine_of(b).step(TOKENS)
        chain = engine_of(b).submitted[0].load
        await b.server.move_sender.send_all(30)
        await running_samples(a, 2)
        exports = [each for each in engine_of(b).submitted if each.export is not None]
        assert chain is not None
        assert [each.load for each in exports] == [chain.of_chain] * 2  # the samples are equal
        again = engine_of(a).submitted[-2:]
        end = (len(PROMPT) + 2 * TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert [each.load.pieces[-1].end for each in again if each.load] == [end, end]
        assert all(each.load and each.load.chain != chain.chain for each in again)
        assert moved_kv(a) == moved_kv(b) == {"loaded": 2}
        await finish(a, calling)
        await is_released(a, b)
        await is_released(b, a)


async def test_samples_that_no_other_replica_accepts_find_their_moved_kv(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, b):
        calling = await move(a, b, group(*PROMPT, n=2))
        engine_of(b).step(TOKENS)
        first = engine_of(b).submitted[0].load
        a.server.admission.close()
        moving = asyncio.create_task(b.server.move_sender.send_all(30))
        await submitted(b, 6)  # each sample twice, and two exports: the samples are equal
        assert first is not None
        assert [each.load for each in engine_of(b).submitted[-2:]] == [first.of_chain] * 2
        assert moved_kv(b) == {"loaded": 2}
        engine_of(b).step()
        end = (len(PROMPT) + 2 * TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert [each.num_cached for each in engine_of(b).running.values()] == [end, end]
        await finish(b, calling)
        await moving
        await is_released(a, b)


async def test_samples_are_prefilled_if_the_download_is_refused(tmp_path: Path) -> None:
    async with pair(tmp_path, one_host=False) as (a, b):
        a.server.prompt_kv.stop_new_readers()
        calling = await move(a, b, group(*PROMPT, n=2))
        assert moved_kv(b) == {"failed": 2}
        assert all(each.load is None for each in engine_of(b).submitted)
        await finish(b, calling)
        await is_released(a, b)


async def test_samples_are_prefilled_if_the_download_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stall(*_: Any) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(KvDataResponse, "stream_response", stall)
    async with pair(tmp_path, one_host=False) as (a, b):
        calling = asyncio.create_task(post(a, body(group(*PROMPT, n=2), **LONG)))
        await running_samples(a, 2)
        engine_of(a).step(TOKENS)
        await a.server.move_sender.send_all(4.0)
        await running_samples(b, 2)
        assert moved_kv(b) == {"timeout": 2}
        await finish(b, calling)
        await is_released(a, b)


class Lost(httpx.AsyncClient):
    """HTTP client whose peer dies while it receives the KV."""

    async def post(self, *args: Any, **kwargs: Any) -> httpx.Response:
        raise httpx.ReadError("reset")


async def test_rollout_continues_here_if_the_receiver_dies(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, b):
        calling = asyncio.create_task(post(a, body(group(*PROMPT, n=2), **LONG)))
        await running_samples(a, 2)
        engine_of(a).step(TOKENS)
        moving = asyncio.create_task(sender_of(a, Lost).send_all(30))
        num_exports = 2  # both samples have the same tokens
        await submitted(a, 4 + num_exports)
        await is_released(a, b)
        await finish(a, calling)
        await moving


def kv_of(handle: str, **fields: Any) -> dict[str, Any]:
    span = {"handle": handle, "start": 0, "num_tokens": 64, "num_bytes": 8192, "offset": 0}
    samples = [span | fields]
    return {"arena": "/dev/shm/x", "seconds": 5, "groups": [{"index": 0, "samples": samples}]}


@pytest.mark.parametrize(
    "fields",
    [{}, {"start": 32}, {"num_tokens": 0}, {"num_tokens": 70}, {"num_tokens": 71}, {"offset": 9}],
)
async def test_state_with_unknown_kv_is_accepted(tmp_path: Path, fields: dict[str, Any]) -> None:
    async with pair(tmp_path) as (a, b):
        state = moved_state(a)
        state["groups"][0]["prompt_token_ids"] = PROMPT
        state["request"] = body(group(*PROMPT), **LONG)
        handle = f"{a.server.cluster.own_id}.0"
        response = await b.http.post("/v1/moves", json=state | {"kv": kv_of(handle, **fields)})
        assert response.status_code == 201
        await running_samples(b, 1)
        assert moved_kv(b) == {"failed": 1}
        assert engine_of(b).submitted[0].load is None
        await is_released(a, b)
        engine_of(b).step(200)


async def test_samples_with_the_handle_of_another_sample_are_prefilled(tmp_path: Path) -> None:
    """The file would be compared with the tokens of one of them only."""
    async with pair(tmp_path) as (a, b):
        state = moved_state(a)
        (moved,) = state["groups"]
        moved["prompt_token_ids"], moved["num_given_tokens"] = PROMPT, [0, 0]
        moved["samples"].append(moved["samples"][0] | {"index": 1, "token_ids": [4]})
        state["request"] = body(group(*PROMPT, n=2), **LONG)
        kv = kv_of(f"{a.server.cluster.own_id}.0")
        kv["groups"][0]["samples"] *= 2
        response = await b.http.post("/v1/moves", json=state | {"kv": kv})
        assert response.status_code == 201
        await running_samples(b, 2)
        assert moved_kv(b) == {"failed": 2}
        engine_of(b).step(200)


async def test_kv_of_a_refused_rollout_is_released(tmp_path: Path) -> None:
    """The source has cancelled the move while the KV was fetched."""
    async with pair(tmp_path) as (a, b):
        engine = engine_of(b)
        assert isinstance(engine, ExportingEngine)
        calling = asyncio.create_task(post(a, body(group(*PROMPT, n=2), **LONG)))
        await running_samples(a, 2)
        (rollout,) = a.server.rollouts.in_flight()

        async def cancel() -> None:
            assert (await b.http.delete(f"/v1/moves/{rollout.id}")).status_code == 404

        engine.on_added = cancel
        engine_of(a).step(TOKENS)
        moving = asyncio.create_task(a.server.move_sender.send_all(30))
        num_exports = 2  # both samples have the same tokens
        await submitted(a, 4 + num_exports)
        await is_released(a, b)
        assert engine.written == {} and engine.submitted == []
        await finish(a, calling)
        await moving


async def test_only_replicas_read_kv_of_moves(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, _):
        response = await a.http.get(f"/v1/moves/{a.server.cluster.own_id}.0/kv/unknown")
        assert response.status_code == 404
