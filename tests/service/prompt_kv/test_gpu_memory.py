"""GPU memory with exported KV: what is reserved there, and to whom it is described."""

import uuid
from pathlib import Path
from typing import Any

import pytest

from coppice.prompt_kv import boot_id
from coppice.prompt_kv.boot_id import read_boot_id
from coppice.wire.prompt_kv import KvGpu, KvHandle
from service.kv.arena import PAGE_BYTES, round_up_to_pages
from service.kv.handles.file_layout import LayoutFactory
from tests.fake_engine import FakeEngine
from tests.fake_export import FORMAT
from tests.fake_gpu import NUM_RANKS, GpuEngine
from tests.service.keyfile import bearer, write_keys
from tests.service.prompt_kv.export_requests import export_handle, rollout_body
from tests.serving import Served, serving

KV = {"capacity_bytes": 2**23}
OTHER_HOST = str(uuid.UUID(int=7))


def on_gpu(handle: KvHandle) -> list[tuple[str, int | None]]:
    return [(at.transport, at.offset) for at in handle.locators if at.transport == "cuda_ipc"]


async def described(served: Served, handle: KvHandle, **query: str) -> Any:
    answer = await served.http.get(f"/v1/kv/{handle.handle}/gpu", params=query)
    return KvGpu.model_validate(answer.json()) if answer.is_success else answer.json()["code"]


async def test_slot_has_the_same_part_of_every_rank_until_it_is_freed(tmp_path: Path) -> None:
    engine = GpuEngine()
    async with serving(engine, tmp_path, kv=KV) as served:
        store = served.server.prompt_kv.store
        first, second = [await export_handle(served, [i, *range(40)]) for i in (1, 2)]
        (_, a), (_, b) = on_gpu(first)[0], on_gpu(second)[0]
        layout = LayoutFactory("fake", FORMAT).of(range(40), "v0")
        assert (a, b) == (0, round_up_to_pages(layout.data_bytes // NUM_RANKS))
        given = [request.export for request in engine.submitted if request.export is not None]
        assert [slot.gpu_offset for slot in given] == [a, b]
        for handle in (first, second):
            await served.http.delete(f"/v1/kv/{handle.handle}")
        assert store.gpu_extents.free_bytes == engine.memories[0].numel()
        store.check()


async def test_export_without_room_on_the_gpu_is_in_shared_memory_only(tmp_path: Path) -> None:
    async with serving(GpuEngine(num_bytes=3 * PAGE_BYTES), tmp_path, kv=KV) as served:
        small = await export_handle(served, [1, *range(20)])
        large = await export_handle(served, list(range(100)))
        assert (len(on_gpu(small)), on_gpu(large)) == (1, [])
        assert await described(served, large) == "kv_not_found"
        assert (await served.http.get(f"/v1/kv/{large.handle}/data")).status_code == 200


async def test_ipc_is_offered_to_callers_on_the_same_host_only(tmp_path: Path) -> None:
    async with serving(GpuEngine(), tmp_path, kv=KV) as served:
        handle, own = await export_handle(served), read_boot_id()
        assert own is not None
        memory = await described(served, handle, boot_id=own)
        assert [rank.first_head for rank in memory.ranks] == list(range(NUM_RANKS))
        assert len({rank.ipc.handle for rank in memory.ranks}) == NUM_RANKS
        assert memory.agent == handle.locators[1].agent
        assert await described(served, handle) == "kv_not_found"
        assert await described(served, handle, boot_id=OTHER_HOST) == "kv_not_found"
        assert await described(served, handle, boot_id="x") == "invalid_request"


async def test_memory_is_described_to_the_owner_of_a_handle_only(tmp_path: Path) -> None:
    keys = write_keys(
        tmp_path / "keys.yaml", mine="rollout,kv", yours="rollout,kv", plain="rollout"
    )
    server = {"keys_file": tmp_path / "keys.yaml"}
    async with serving(GpuEngine(), tmp_path, server=server, kv=KV) as served:
        mine = bearer(keys["mine"])
        answer = await served.http.post("/v1/rollouts", json=rollout_body(), headers=mine)
        handle = answer.json()["groups"][0]["kv"]["handle"]
        found = [
            (
                await served.http.get(
                    f"/v1/kv/{handle}/gpu", headers=headers, params={"boot_id": read_boot_id()}
                )
            ).status_code
            for headers in ({}, bearer(keys["plain"]), bearer(keys["yours"]), mine)
        ]
        assert found == [401, 403, 404, 200]


async def test_engine_without_gpu_memory_offers_none(tmp_path: Path) -> None:
    async with serving(FakeEngine(prompt_kv=True), tmp_path, kv=KV) as served:
        handle = await export_handle(served)
        assert on_gpu(handle) == []
        assert await described(served, handle) == "kv_not_found"


def test_unknown_boot_id_matches_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boot_id, "BOOT_ID", tmp_path / "missing")
    assert read_boot_id() is None
