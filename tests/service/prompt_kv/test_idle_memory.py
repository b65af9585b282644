"""Return of shared memory that no slot has used for a while."""

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv_types import ARENA_CHUNK_BYTES as CHUNK
from service.prompt_kv.arena import PAGE_BYTES, Arena, Extent, ExtentAllocator
from service.prompt_kv.idle_memory import IdleMemory
from tests.fake_engine import FakeEngine
from tests.service.prompt_kv.export_requests import export_handle
from tests.serving import Served, serving

IDLE_SECONDS = 10.0


def used_bytes(path: Path) -> int:
    return 512 * path.stat().st_blocks


def test_released_pages_are_returned_and_read_as_zeros(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path, 4 * 2**20)
    assert arena is not None and arena.back(0, arena.num_bytes)
    arena.view[2**20] = arena.view[3 * 2**20] = 7
    before = used_bytes(arena.path)
    assert arena.release_pages(Extent(2**20, 2 * 2**20))
    assert used_bytes(arena.path) == before - 2**20
    assert (arena.view[2**20], arena.view[3 * 2**20], arena.page_epoch) == (0, 7, 1)
    arena.close()


def test_mount_that_cannot_return_pages_keeps_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arena = Arena.create(tmp_path, 4 * 2**20)
    assert arena is not None
    assert not arena.release_pages(Extent(1, PAGE_BYTES))  # not a page, which the system refuses
    assert arena.page_epoch == 0 and "cannot return shared memory" in caplog.text
    arena.close()


@given(st.data())
def test_only_free_chunks_that_were_used_and_are_idle_are_taken(data: st.DataObject) -> None:
    """A model: every chunk's last use, and the extents that are allocated now."""
    capacity, now = 3 * CHUNK + 5 * PAGE_BYTES, 0.0
    idle = IdleMemory(capacity, idle_seconds=IDLE_SECONDS, clock=lambda: now)
    allocator, used_at = ExtentAllocator(capacity), dict[int, float]()
    taken: list[Extent] = []

    def use(extent: Extent) -> None:
        idle.on_used(extent)
        used_at.update(
            (chunk, now) for chunk in range(extent.start // CHUNK, -(-extent.end // CHUNK))
        )

    for _ in range(data.draw(st.integers(1, 12))):
        now += data.draw(st.sampled_from([0.0, 6.0, IDLE_SECONDS]))
        ends: bool = data.draw(st.booleans())
        if taken and ends:
            extent = taken.pop(data.draw(st.integers(0, len(taken) - 1)))
            allocator.release(extent)
            use(extent)
        elif (found := allocator.allocate(data.draw(st.integers(1, CHUNK)))) is not None:
            taken.append(found)
            use(found)
        released = set[int]()
        while extent_of_chunk := idle.take(allocator.free_extents):
            released.add(extent_of_chunk.start // CHUNK)
            assert extent_of_chunk.end == min(extent_of_chunk.start + CHUNK, capacity)
        busy = {c for e in taken for c in range(e.start // CHUNK, -(-e.end // CHUNK))}
        expected = {c for c, at in used_at.items() if at <= now - IDLE_SECONDS} - busy
        assert released == expected
        for chunk in released:
            del used_at[chunk]


async def test_pages_of_a_slot_are_allocated_before_the_engine_writes_it(tmp_path: Path) -> None:
    """Otherwise a worker would allocate them in an engine step."""
    kv = {"capacity_bytes": 2**23}
    async with serving(FakeEngine(prompt_kv=True), tmp_path, kv=kv) as served:
        prompt_kv = served.server.prompt_kv
        assert prompt_kv.arena is not None
        export = prompt_kv.begin("me", list(range(2000)), 60.0)
        assert export.slot is not None and export.slot.layout.data_bytes > 2**20
        async with asyncio.timeout(30):
            while used_bytes(prompt_kv.arena.path) < export.slot.extent.num_bytes:
                await asyncio.sleep(0.01)
        prompt_kv.abandon(export)


async def released(served: Served) -> None:
    arena = served.server.prompt_kv.arena
    assert arena is not None
    async with asyncio.timeout(30):
        while not arena.page_epoch:
            await asyncio.sleep(0.01)


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no shared memory")
async def test_arena_shrinks_after_the_last_lease_and_grows_again(tmp_path: Path) -> None:
    engine = FakeEngine(prompt_kv=True)
    kv = {"directory": "/dev/shm", "capacity_bytes": 2**23, "idle_seconds": 0.0, "grace_seconds": 0}
    async with serving(engine, tmp_path, kv=kv) as served:
        arena = served.server.prompt_kv.arena
        assert arena is not None
        handle = await export_handle(served)
        exporting = used_bytes(arena.path)
        assert exporting >= handle.num_bytes and not arena.page_epoch
        await served.http.delete(f"/v1/kv/{handle.handle}")
        await released(served)
        assert used_bytes(arena.path) == 0
        again = await export_handle(served)
        answer = await served.http.get(f"/v1/kv/{again.handle}/data")
        assert len(answer.content) == again.num_bytes
    assert "release_kv_pages 1" in engine.calls


async def test_memory_in_use_is_not_returned(tmp_path: Path) -> None:
    kv = {"capacity_bytes": 2**23, "idle_seconds": 0.0}
    async with serving(FakeEngine(prompt_kv=True), tmp_path, kv=kv) as served:
        await export_handle(served)
        await asyncio.sleep(1.2)  # two rounds of the maintenance
        assert served.server.prompt_kv.arena is not None
        assert not served.server.prompt_kv.arena.page_epoch
