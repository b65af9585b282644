"""From a rollout that requests prompt KV to its handles, or to each reason for their absence."""

import asyncio
import json
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import pytest
from safetensors.numpy import load, save

from coppice.wire.prompt_kv import KvReason
from engine.errors import EngineDead
from engine.types.info import EngineInfo
from engine.types.kv import ExportStatus
from service.kv.arena import PAGE_BYTES, Extent
from service.kv.store import Entry
from tests.fake_engine import FakeEngine
from tests.fake_export import fake_kv
from tests.service.prompt_kv.export_requests import (
    PROMPT,
    export_groups,
    export_handle,
    rollout_body,
)
from tests.serving import Served, serving

LONG = list(range(200)) + list(range(200))


def exporting(**options: Any) -> FakeEngine:
    return FakeEngine(prompt_kv=True, **options)


async def data(served: Served, handle_id: str) -> dict[str, Any]:
    answer = await served.http.get(f"/v1/kv/{handle_id}/data")
    assert answer.status_code == 200, answer.text
    tensors: dict[str, Any] = load(answer.content)
    return tensors


def start_rollout(served: Served, *prompts: list[int], **rest: Any) -> "asyncio.Task[Any]":
    return asyncio.create_task(
        served.http.post("/v1/rollouts", json=rollout_body(*prompts, **rest))
    )


async def wait_until_running(served: Served, count: int) -> None:
    while served.server.rollouts.num_samples_running != count:
        await asyncio.sleep(0.001)


async def activate_weights(served: Served, label: str) -> None:
    weights = save({"w": np.zeros(1, np.float32)})
    await served.http.put(f"/v1/weights/{label}", content=weights)
    answer = await served.http.post(f"/v1/weights/{label}/activate", json={"mode": "keep"})
    assert answer.status_code == 200, answer.text


async def test_group_exports_kv_of_its_prompt_except_the_last_token(
    tmp_path: Path,
) -> None:
    other = [7, 8, 9]
    async with serving(exporting(), tmp_path) as served:
        for prompt, group in zip(
            (PROMPT, other), await export_groups(served, PROMPT, other), strict=True
        ):
            assert group.kv is not None and group.kv_reason is None
            assert (group.kv.version, group.kv.num_tokens) == ("v0", len(prompt) - 1)
            tensors = await data(served, group.kv.handle)
            expected = fake_kv(prompt[:-1], "v0")
            assert sorted(tensors) == ["k.0", "k.1", "v.0", "v.1"]
            for layer in range(2):
                assert (tensors[f"k.{layer}"] == expected[layer, 0]).all()
                assert (tensors[f"v.{layer}"] == expected[layer, 1]).all()


async def test_rollout_without_a_request_for_kv_has_neither_handle_nor_reason(
    tmp_path: Path,
) -> None:
    async with serving(exporting(), tmp_path) as served:
        for kv in ({}, {"kv": None}):
            body = (
                {**rollout_body(), **kv}
                if kv
                else {k: v for k, v in rollout_body().items() if k != "kv"}
            )
            (group,) = (await served.http.post("/v1/rollouts", json=body)).json()["groups"]
            assert (group["kv"], group["kv_reason"]) == (None, None)
        assert served.server.prompt_kv.status().num_handles == 0


async def test_groups_with_equal_prompt_and_version_share_their_bytes(tmp_path: Path) -> None:
    async with serving(exporting(), tmp_path) as served:
        first, second = await export_groups(served, PROMPT, PROMPT)
        third = await export_handle(served)
        assert first.kv is not None and second.kv is not None
        assert len({first.kv.handle, second.kv.handle, third.handle}) == 3
        assert first.kv.locators[0] == second.kv.locators[0] == third.locators[0]
        await served.http.delete(f"/v1/kv/{first.kv.handle}")
        assert len(await data(served, second.kv.handle)) == 4
        served.server.prompt_kv.check()
        for held in (second.kv, third):
            await served.http.delete(f"/v1/kv/{held.handle}")
        status = served.server.prompt_kv.status()
        assert status.free_bytes == status.capacity_bytes


async def test_stream_sends_the_handle_while_its_samples_run(tmp_path: Path) -> None:
    engine = exporting(instant=False)
    async with serving(engine, tmp_path) as served:
        body = rollout_body(stream=True)
        types = []
        async with served.http.stream("POST", "/v1/rollouts", json=body) as answer:
            await wait_until_running(served, 2)
            engine.step()
            async for line in answer.aiter_lines():
                record = json.loads(line)
                types.append(record["type"])
                if record["type"] == "kv":
                    assert served.server.rollouts.num_samples_running == 2
                    assert len(await data(served, record["kv"]["handle"])) == 4
                    engine.step(10)
                if record["type"] == "group":
                    assert record["group"]["kv"]["num_tokens"] == len(PROMPT) - 1
        assert types == ["start", "kv", "sample", "sample", "group", "end"]


@pytest.mark.slow
async def test_lease_starts_at_the_end_of_its_rollout(tmp_path: Path) -> None:
    engine = exporting(instant=False)
    async with serving(engine, tmp_path) as served:
        rollout = start_rollout(served, lease_seconds=0.2)
        await wait_until_running(served, 2)
        engine.step()
        await asyncio.sleep(0.4)
        served.server.prompt_kv.handles.sweep()
        assert served.server.prompt_kv.status().num_handles == 1, "held while the rollout runs"
        engine.step(10)
        (group,) = (await rollout).json()["groups"]
        assert group["kv"]["lease_seconds"] == 0.2
        while (await served.http.get(f"/v1/kv/{group['kv']['handle']}")).status_code == 200:
            await asyncio.sleep(0.02)
        while served.server.prompt_kv.status().free_bytes < 2**20:
            await asyncio.sleep(0.02)


async def test_lease_is_capped_by_the_settings(tmp_path: Path) -> None:
    async with serving(exporting(), tmp_path, kv={"max_lease_seconds": 7}) as served:
        assert (await export_handle(served, lease_seconds=60)).lease_seconds == 7


async def test_handle_outlives_an_activation_under_its_own_version(tmp_path: Path) -> None:
    async with serving(exporting(), tmp_path) as served:
        old = await export_handle(served)
        await activate_weights(served, "v1")
        new = await export_handle(served)
        assert (old.version, new.version) == ("v0", "v1")
        for known in (old, new):
            layout = (await served.http.get(f"/v1/kv/{known.handle}")).json()
            assert layout["version"] == known.version
            tensors = await data(served, known.handle)
            assert (tensors["k.0"] == fake_kv(PROMPT[:-1], known.version)[0, 0]).all()


async def test_prompt_not_started_at_an_activation_belongs_to_the_new_version(
    tmp_path: Path,
) -> None:
    engine = exporting(instant=False)
    async with serving(engine, tmp_path) as served:
        rollout = start_rollout(served)
        await wait_until_running(served, 2)
        await activate_weights(served, "v1")
        engine.step(10)
        (group,) = (await rollout).json()["groups"]
        assert group["kv"]["version"] == "v1"
        tensors = await data(served, group["kv"]["handle"])
        assert (tensors["k.0"] == fake_kv(PROMPT[:-1], "v1")[0, 0]).all()
        shared = start_rollout(served)
        await wait_until_running(served, 2)
        engine.step(10)
        (again,) = (await shared).json()["groups"]
        assert again["kv"]["locators"][0] == group["kv"]["locators"][0]


async def test_kv_written_before_an_activation_keeps_the_old_version(
    tmp_path: Path,
) -> None:
    engine = exporting(instant=False)
    async with serving(engine, tmp_path) as served:
        rollout = start_rollout(served)
        await wait_until_running(served, 2)
        engine.step()
        await activate_weights(served, "v1")
        engine.step(10)
        (group,) = (await rollout).json()["groups"]
        assert group["kv"]["version"] == "v0"


# All reasons


async def arena_full(tmp_path: Path) -> KvReason | None:
    async with serving(exporting(), tmp_path) as served:
        reasons = [
            group.kv_reason
            for group in await export_groups(served, *[[p, *LONG] for p in range(9)])
        ]
        assert None in reasons, "some fit"
        return reasons[-1]


async def no_shm(tmp_path: Path) -> KvReason | None:
    async with serving(exporting(), tmp_path, kv={"directory": tmp_path / "none"}) as served:
        return (await export_groups(served))[0].kv_reason


async def disabled(tmp_path: Path) -> KvReason | None:
    async with serving(FakeEngine(), tmp_path) as served:
        return (await export_groups(served))[0].kv_reason


class Unsupported(FakeEngine):
    @property
    def info(self) -> EngineInfo:
        from dataclasses import replace

        return replace(super().info, kv_format=None, kv_reason="unsupported_cache")


async def unsupported_cache(tmp_path: Path) -> KvReason | None:
    async with serving(Unsupported(), tmp_path) as served:
        return (await export_groups(served))[0].kv_reason


async def prompt_too_short(tmp_path: Path) -> KvReason | None:
    async with serving(exporting(), tmp_path) as served:
        return (await export_groups(served, [5]))[0].kv_reason


async def reason_for_status(tmp_path: Path, status: ExportStatus) -> KvReason | None:
    engine = exporting()
    engine.export_status = status
    async with serving(engine, tmp_path) as served:
        (group,) = await export_groups(served)
        while served.server.prompt_kv.status().free_bytes < 2**20:
            await asyncio.sleep(0.001)
        return group.kv_reason


async def mixed_version(tmp_path: Path) -> KvReason | None:
    return await reason_for_status(tmp_path, ExportStatus.MIXED_VERSION)


async def export_failed(tmp_path: Path) -> KvReason | None:
    return await reason_for_status(tmp_path, ExportStatus.FAILED)


async def not_continued(tmp_path: Path) -> KvReason | None:
    tree = {"mode": "interval", "interval": 32, "max_depth": 1, "max_leaves": 2}
    async with serving(exporting(), tmp_path) as served:
        body = rollout_body(branching=tree, groups=[{"prompt": {"token_ids": PROMPT}}])
        (group,) = (await served.http.post("/v1/rollouts", json=body)).json()["groups"]
        reason: KvReason | None = group["segments"][0]["kv_reason"]
        return reason


async def not_written(tmp_path: Path) -> KvReason | None:
    return await reason_for_status(tmp_path, ExportStatus.PENDING)


class FailingFlush(FakeEngine):
    async def flush_exports(self) -> None:
        raise EngineDead("dead")


async def internal(tmp_path: Path) -> KvReason | None:
    engine = FailingFlush(prompt_kv=True)
    engine.export_status = ExportStatus.PENDING
    async with serving(engine, tmp_path) as served:
        (group,) = await export_groups(served)
        assert served.server.prompt_kv.status().quarantined_bytes > 0, "it may still be written"
        return group.kv_reason


REASONS = [
    disabled, unsupported_cache, no_shm, arena_full, prompt_too_short, mixed_version,
    export_failed, not_written, not_continued, internal,
]  # fmt: skip


@pytest.mark.parametrize("produce", REASONS)
async def test_reason_is_returned_and_counted_and_fails_no_rollout(
    tmp_path: Path, produce: Any
) -> None:
    assert await produce(tmp_path) == produce.__name__


def test_every_reason_is_tested() -> None:
    assert {produce.__name__ for produce in REASONS} == set(get_args(KvReason))


async def test_reasons_are_counted(tmp_path: Path) -> None:
    async with serving(exporting(), tmp_path) as served:
        await export_groups(served, PROMPT, [5])
        metrics = (await served.http.get("/metrics")).text
    assert 'coppice_kv_exports_total{outcome="handle"} 1.0' in metrics
    assert 'coppice_kv_exports_total{outcome="prompt_too_short"} 1.0' in metrics
    assert 'coppice_kv_exports_total{outcome="arena_full"} 0.0' in metrics
    assert 'coppice_kv_bytes{state="leased"}' in metrics
    assert "coppice_event_loop_lag_seconds_count" in metrics


# Interrupted exports


async def test_slot_is_quarantined_until_no_worker_can_write_it(tmp_path: Path) -> None:
    engine = exporting(instant=False)
    engine.settle_gate = asyncio.Event()
    async with serving(engine, tmp_path) as served:
        kv = served.server.prompt_kv
        rollout = start_rollout(served)
        await wait_until_running(served, 2)
        assert kv.status().reserved_bytes > 0
        rollout.cancel()
        await wait_until_running(served, 0)
        await asyncio.sleep(0.05)
        kv.check()
        assert kv.status().reserved_bytes + kv.status().quarantined_bytes > 0
        assert kv.status().free_bytes < 2**20
        engine.settle_gate.set()
        while kv.status().free_bytes < 2**20:
            await asyncio.sleep(0.001)


async def test_sharing_group_does_not_wait_for_the_writing_group(tmp_path: Path) -> None:
    engine = exporting(instant=False)
    async with serving(engine, tmp_path) as served:
        writer = start_rollout(served)
        await wait_until_running(served, 2)
        follower = start_rollout(served)
        await wait_until_running(served, 4)
        last = list(engine.running)[2:]
        await engine.abort(last)
        (group,) = (await follower).json()["groups"]
        assert group["kv_reason"] == "not_written"
        engine.step(10)
        (group,) = (await writer).json()["groups"]
        assert group["kv_reason"] is None
        served.server.prompt_kv.check()


async def test_writer_that_ends_early_leaves_a_reason_to_sharing_groups(tmp_path: Path) -> None:
    engine = exporting(instant=False)
    async with serving(engine, tmp_path) as served:
        writer = start_rollout(served)
        await wait_until_running(served, 2)
        follower = start_rollout(served)
        await wait_until_running(served, 4)
        await engine.abort(list(engine.running)[:2])
        (group,) = (await writer).json()["groups"]
        assert group["kv_reason"] == "not_written"
        engine.step(10)
        (group,) = (await follower).json()["groups"]
        assert (group["outcome"], group["kv_reason"]) == ("done", "not_written")
        while served.server.prompt_kv.status().free_bytes < 2**20:
            await asyncio.sleep(0.001)


async def test_engine_death_keeps_handles(tmp_path: Path) -> None:
    engine = exporting(instant=False)
    async with serving(engine, tmp_path) as served:
        first = start_rollout(served)
        await wait_until_running(served, 2)
        engine.step(10)
        (group,) = (await first).json()["groups"]
        broken = start_rollout(served, [1, 2, 3])
        await wait_until_running(served, 2)
        engine.die()
        assert (await broken).json()["code"] == "engine_dead"
        served.server.prompt_kv.check()
        assert len(await data(served, group["kv"]["handle"])) == 4


async def test_sharing_groups_that_end_together_free_the_slot(
    tmp_path: Path,
) -> None:
    engine = exporting(instant=False)
    async with serving(engine, tmp_path) as served:
        both = [start_rollout(served), start_rollout(served)]
        await wait_until_running(served, 4)
        engine.die()
        for broken in both:
            assert (await broken).json()["code"] == "engine_dead"
        kv = served.server.prompt_kv
        while kv.status().free_bytes < kv.status().capacity_bytes:
            await asyncio.sleep(0.001)
        kv.check()


async def test_unbalanced_accounts_disable_only_prompt_kv(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(exporting(), tmp_path) as served:
        kv = served.server.prompt_kv
        kv.store._entries.add(Entry(slot=cast(Any, None), extent=Extent(0, PAGE_BYTES)))
        while kv.status().reason != "internal":
            await asyncio.sleep(0.01)
        answer = (await served.http.post("/v1/rollouts", json=rollout_body())).json()
    assert (answer["outcome"], answer["groups"][0]["kv_reason"]) == ("done", "internal")
    assert "prompt KV is disabled until a restart" in caplog.text


async def test_bad_checksum_leaves_a_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(exporting(), tmp_path) as served:
        served.server.prompt_kv.exports._hasher.shutdown()
        (group,) = await export_groups(served)
    assert group.kv_reason == "internal"
    assert "export failed" in caplog.text


async def test_server_stop_removes_the_arena(tmp_path: Path) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    async with serving(exporting(), tmp_path, kv={"directory": shared}) as served:
        await export_handle(served)
        assert len(list(shared.iterdir())) == 2  # the other one is the span cache's
    assert list(shared.iterdir()) == []


async def test_pages_of_a_slot_are_allocated_before_the_engine_writes_it(tmp_path: Path) -> None:
    """Otherwise a worker would allocate them in an engine step."""
    kv = {"capacity_bytes": 2**23}
    async with serving(exporting(), tmp_path, kv=kv) as served:
        prompt_kv = served.server.prompt_kv
        arena = prompt_kv.store.arena.path
        export = prompt_kv.begin("me", list(range(2000)), 60.0)
        assert export.entry is not None and export.entry.layout.data_bytes > 2**20
        async with asyncio.timeout(30):
            while 512 * arena.stat().st_blocks < export.entry.extent.num_bytes:
                await asyncio.sleep(0.01)
        prompt_kv.exports.abandon(export)
