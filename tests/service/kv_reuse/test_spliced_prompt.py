"""kv_reuse.mode splice over the fake engine: the engine requests it makes, and the answers."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine.types.kv import ExportStatus
from tests.fake_engine import FakeEngine
from tests.service.keyfile import bearer, write_keys
from tests.service.kv_reuse.span_requests import ASK, OWN, TALE, TOOL, placed, post_rollout, reusing
from tests.service.test_rollouts import running_samples

PROMPT = [*OWN, *TOOL, *TALE, *ASK]


def engine_of(**rest: Any) -> FakeEngine:
    return FakeEngine(prompt_kv=True, **rest)


async def test_chain_prefills_unnamed_text_and_first_tokens(tmp_path: Path) -> None:
    """Spliced KV begins at a block boundary (32). Links and samples are submitted together."""
    engine = engine_of()
    async with reusing(engine, tmp_path) as served:
        group = await post_rollout(served, placed())
    tool, tale, first, second, *samples = engine.submitted
    assert (list(tool.prompt_token_ids), list(tale.prompt_token_ids)) == (TOOL, TALE)
    assert list(first.prompt_token_ids) == PROMPT[:64]
    assert list(second.prompt_token_ids) == PROMPT[:128]
    assert [list(sample.prompt_token_ids) for sample in samples] == [PROMPT, PROMPT]
    assert [request.load for request in (tool, tale)] == [None] * 2
    assert {request.cache_salt for request in engine.submitted} == {None}
    load = first.load
    assert load is not None and all(request.load is load for request in (second, *samples))
    assert load.num_requests == 4
    taken = [
        (piece.start, piece.num_tokens, piece.token_offset, piece.shift) for piece in load.pieces
    ]
    assert taken == [(64, 46, 24, 40), (128, 42, 18, 110)]
    assert group["exact"] is False
    assert group["kv_reuse"] == {
        "mode": "splice",
        "num_reused_tokens": 46 + 42,
        "num_computed_tokens": 64 + 18 + 4,
        "num_prepared_tokens": 130,
        "num_round_trips": 2,
        "num_observations": 0,
        "reason": None,
    }


async def test_cached_spans_are_not_prefilled_alone_again(tmp_path: Path) -> None:
    async with reusing(engine_of(), tmp_path) as served:
        await post_rollout(served, placed())
        group = await post_rollout(served, placed(own=[3] * 33))
        metrics = (await served.http.get("/metrics")).text
    assert (group["exact"], group["kv_reuse"]["num_prepared_tokens"]) == (False, 0)
    assert group["kv_reuse"]["num_round_trips"] == 1
    assert 'coppice_kv_reuse_tokens_total{kind="prepared",mode="splice"} 130.0' in metrics
    assert 'coppice_kv_reuse_groups_total{mode="splice",outcome="done"} 2.0' in metrics
    assert "coppice_kv_reuse_spans 2.0" in metrics


async def test_concurrent_groups_prefill_a_span_once(tmp_path: Path) -> None:
    engine = engine_of(instant=False)
    async with reusing(engine, tmp_path) as served:
        groups = [asyncio.create_task(post_rollout(served, placed())) for _ in range(3)]
        while not all(group.done() for group in groups):
            engine.step()
            await asyncio.sleep(0.001)
        told = [(await group)["kv_reuse"] for group in groups]
    assert sorted(reuse["num_prepared_tokens"] for reuse in told) == [0, 0, 130]
    assert [reuse["reason"] for reuse in told] == [None] * 3


async def test_new_weights_find_no_span_of_the_old_ones(tmp_path: Path) -> None:
    async with reusing(engine_of(), tmp_path) as served:
        await post_rollout(served, placed())
        await served.http.put("/v1/weights/v1", content=b"x")
        await served.http.post("/v1/weights/v1/activate", json={})
        group = await post_rollout(served, placed())
    assert group["kv_reuse"]["num_prepared_tokens"] == 130
    assert group["samples"][0]["versions"][0]["version"] == "v1"


async def test_weights_that_change_before_the_chain_leave_an_exact_prompt(tmp_path: Path) -> None:
    engine = engine_of(instant=False)
    async with reusing(engine, tmp_path) as served:
        asking = asyncio.create_task(post_rollout(served, placed()))
        await running_samples(served, 2)
        engine.step()
        await running_samples(served, 4)
        await served.http.put("/v1/weights/v1", content=b"x")
        await served.http.post("/v1/weights/v1/activate", json={})
        engine.step(4)
        group = await asking
    assert (group["exact"], group["kv_reuse"]["reason"]) == (True, "not_loaded")
    assert group["kv_reuse"]["num_reused_tokens"] == 0
    assert group["outcome"] == "done"


async def test_new_text_of_a_name_replaces_the_first(tmp_path: Path) -> None:
    async with reusing(engine_of(), tmp_path) as served:
        await post_rollout(served, placed())
        other = placed()
        other["groups"][0]["prompt"]["spans"][1]["token_ids"] = [7] * 60
        group = await post_rollout(served, other)
        assert served.server.kv_reuse.spans.num_spans == 2
    assert group["kv_reuse"]["num_prepared_tokens"] == 60


async def test_keys_do_not_share_cached_spans(tmp_path: Path) -> None:
    secrets = write_keys(tmp_path / "keys", one="rollout", other="rollout")
    server = {"keys_file": tmp_path / "keys"}
    async with reusing(engine_of(), tmp_path, server=server) as served:
        prepared = [
            (await post_rollout(served, placed(), **bearer(secrets[name])))["kv_reuse"]
            for name in ("one", "other", "one")
        ]
    assert [reuse["num_prepared_tokens"] for reuse in prepared] == [130, 130, 0]


@pytest.mark.parametrize(
    ("spans_bytes", "prompt_kv", "reason"),
    [
        (0, True, "disabled"),
        (2**20, False, "disabled"),
        (2**20, True, "nothing_to_reuse"),
        (2**20, True, "not_written"),
        (2**20, True, "cache_full"),
    ],
)
async def test_without_splicing_the_prompt_is_prefilled_and_exact(
    tmp_path: Path, spans_bytes: int, prompt_kv: bool, reason: str
) -> None:
    engine = FakeEngine(prompt_kv=prompt_kv, max_context_tokens=4096)
    body = placed()
    if reason == "nothing_to_reuse":
        body["kv_reuse"]["recompute_tokens"] = 70
    if reason == "not_written":
        engine.export_status = ExportStatus.FAILED
    if reason == "cache_full":
        body["groups"][0]["prompt"]["spans"][1]["token_ids"] = [5] * 3000
    async with reusing(engine, tmp_path, spans_bytes=spans_bytes) as served:
        group = await post_rollout(served, body)
        await asyncio.sleep(0.01)
    assert (group["exact"], group["kv_reuse"]["reason"]) == (True, reason)
    assert group["outcome"] == "done"
    assert group["kv_reuse"]["num_computed_tokens"] >= group["num_prompt_tokens"]
    assert [s.load for s in engine.submitted[-2:]] == [None, None]
    assert [s.cache_salt for s in engine.submitted[-2:]] == [None, None]


@pytest.mark.parametrize("num_steps", [0, 1, 2])
async def test_cancelled_chain_leaves_nothing(tmp_path: Path, num_steps: int) -> None:
    """During the prefill of spans, and before and after the chain's first step."""
    engine = engine_of(instant=False)
    async with reusing(engine, tmp_path) as served:
        asking = asyncio.create_task(post_rollout(served, placed()))
        for at, running in enumerate((2, 4, 2)[: num_steps + 1]):
            await running_samples(served, running)
            if at < num_steps:
                engine.step()
        [rollout] = served.server.rollouts.in_flight()
        await served.server.rollouts.cancel(rollout)
        group = await asking
        assert not engine.running
        await asyncio.sleep(0.01)
    assert group["outcome"] == "cancelled"
    assert all(sample["finish_reason"] == "aborted" for sample in group["samples"])


async def test_deadline_counts_from_the_start_of_the_chain(tmp_path: Path) -> None:
    engine = engine_of(instant=False)
    async with reusing(engine, tmp_path) as served:
        group = await post_rollout(served, placed(finish={"deadline_seconds": 0.05}))
        assert not engine.running
        await asyncio.sleep(0.01)
    assert [sample["finish_reason"] for sample in group["samples"]] == ["deadline"] * 2


async def test_spans_evicted_by_the_engine_are_written_again(tmp_path: Path) -> None:
    """As after a reset of the prefix cache under the same weights."""
    engine = engine_of()
    async with reusing(engine, tmp_path) as served:
        told = []
        for forgets in (False, True, False, False):
            if forgets:
                engine.written.clear()
                engine.left.clear()
            group = await post_rollout(served, placed())
            told.append((group["exact"], group["kv_reuse"]["reason"]))
    assert told == [(False, None), (True, "not_loaded"), (False, None), (False, None)]


@pytest.mark.parametrize("how", ["cancelled", "deadline"])
async def test_waiter_on_the_spans_of_another_group_ends_on_time(tmp_path: Path, how: str) -> None:
    engine = engine_of(instant=False)
    finish = {"deadline_seconds": 0.05} if how == "deadline" else {}
    async with reusing(engine, tmp_path) as served:
        writing = asyncio.create_task(post_rollout(served, placed()))
        await running_samples(served, 2)
        [first] = served.server.rollouts.in_flight()
        waiting = asyncio.create_task(post_rollout(served, placed(finish=finish)))
        while len(found := served.server.rollouts.in_flight()) < 2:
            await asyncio.sleep(0.001)
        if how == "cancelled":
            await served.server.rollouts.cancel(next(r for r in found if r != first))
        async with asyncio.timeout(10):
            group = await waiting
        assert len(engine.running) == 2, "the first still writes"
        while not writing.done():
            engine.step()
            await asyncio.sleep(0.001)
        assert (await writing)["exact"] is False
    reason = "aborted" if how == "cancelled" else "deadline"
    assert [sample["finish_reason"] for sample in group["samples"]] == [reason] * 2


async def test_least_recently_used_spans_are_evicted(tmp_path: Path) -> None:
    """A span takes a sixteenth of one MiB."""
    async with reusing(engine_of(), tmp_path) as served:
        for i in range(12):
            body = placed()
            for span in body["groups"][0]["prompt"]["spans"][1:3]:
                span["token_ids"] = [20 + i + len(span["token_ids"])] * 60
                span["cache_key"] += str(i)
            group = await post_rollout(served, body)
            assert (group["exact"], group["kv_reuse"]["num_prepared_tokens"]) == (False, 120)
        assert 0 < served.server.kv_reuse.spans.num_spans <= 16
