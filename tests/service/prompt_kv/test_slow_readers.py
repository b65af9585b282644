"""Limits on the memory and time that readers that stall or read slowly can hold."""

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest

from coppice.prompt_kv.http_client import Download, KvHttpClient
from coppice.transport.redirects import RedirectPolicy, parse_address
from tests.service.keyfile import bearer, write_keys
from tests.service.prompt_kv.export_requests import export_handle
from tests.service.prompt_kv.stalled_readers import (
    CAPACITY,
    NUM_BYTES,
    SHORT_PATIENCE,
    arena_is_free,
    exporting,
    large_handle,
    read_to_end,
    stalled_reader,
    wait_until,
)
from tests.serving import serving

pytestmark = pytest.mark.slow


async def test_stalled_reader_is_dropped(tmp_path: Path) -> None:
    async with serving(exporting(), tmp_path, kv=CAPACITY, limits=SHORT_PATIENCE) as served:
        known = await large_handle(served)
        with stalled_reader(served, known):
            await wait_until(lambda: served.server.kv_downloads.num_open > 0)
            await wait_until(lambda: not served.server.kv_downloads.num_open)


async def test_stalled_readers_do_not_block_other_keys(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.yaml", slow="rollout,kv", quick="rollout,kv")
    kv = {"capacity_bytes": 40 * 2**20}
    server = {"keys_file": tmp_path / "keys.yaml"}
    async with serving(exporting(), tmp_path, kv=kv, server=server) as served:
        slow, quick = [await large_handle(served, bearer(keys[name])) for name in ("slow", "quick")]
        with ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(stalled_reader(served, slow, keys["slow"]))
            await wait_until(lambda: served.server.kv_downloads.num_open == 4)
            async with asyncio.timeout(10):
                path, headers = f"/v1/kv/{quick}/data", bearer(keys["quick"])
                answer = await served.http.get(path, headers=headers)
        assert len(answer.content) > NUM_BYTES


async def test_stalled_readers_do_not_block_their_own_key(tmp_path: Path) -> None:
    async with serving(exporting(), tmp_path, kv=CAPACITY) as served:
        known = await large_handle(served)
        with stalled_reader(served, known), stalled_reader(served, known):
            await wait_until(lambda: served.server.kv_downloads.num_open == 2)
            async with asyncio.timeout(10):
                answer = await served.http.get(f"/v1/kv/{known}/data")
        assert len(answer.content) > NUM_BYTES


async def test_slow_reader_frees_the_memory_when_its_lease_ends(tmp_path: Path) -> None:
    async with serving(exporting(), tmp_path, kv=CAPACITY) as served:
        known = await large_handle(served, lease_seconds=1.0)
        with stalled_reader(served, known):
            await wait_until(lambda: served.server.kv_downloads.num_open > 0)
            await wait_until(lambda: arena_is_free(served))
            assert served.server.kv_downloads.num_open == 1
            served.server.prompt_kv.check()


async def test_read_continues_while_its_lease_is_renewed(tmp_path: Path) -> None:
    async with serving(exporting(), tmp_path, kv=CAPACITY) as served:
        known = await large_handle(served, lease_seconds=1.0)
        whole = (await served.http.get(f"/v1/kv/{known}/data")).content
        with stalled_reader(served, known) as reader:
            await wait_until(lambda: served.server.kv_downloads.num_open > 0)
            await served.http.post(f"/v1/kv/{known}/lease", json={"lease_seconds": 60})
            await asyncio.sleep(1.5)
            assert await asyncio.to_thread(read_to_end, reader, len(whole)) == whole


async def test_reader_is_cut_off_when_its_lease_ends(tmp_path: Path) -> None:
    async with serving(exporting(), tmp_path, kv=CAPACITY) as served:
        known = await large_handle(served, lease_seconds=1.0)
        with stalled_reader(served, known) as reader:
            await wait_until(lambda: served.server.prompt_kv.status().num_handles == 0)
            with pytest.raises(ConnectionError):
                await asyncio.to_thread(read_to_end, reader, NUM_BYTES)


async def test_dropped_reader_resumes_with_a_range(tmp_path: Path) -> None:
    async with serving(exporting(), tmp_path, kv=CAPACITY, limits=SHORT_PATIENCE) as served:
        known = await export_handle(served, [*range(256)] * 64)
        download = Download(
            KvHttpClient(parse_address(served.url, None), 60.0, RedirectPolicy(served.url)),
            f"/v1/kv/{known.handle}/data",
            known.num_bytes,
        )
        room = memoryview(bytearray(known.num_bytes))
        await asyncio.to_thread(download.readinto, room[:1000])
        await wait_until(lambda: not served.server.kv_downloads.num_open)
        await asyncio.to_thread(download.readinto, room[1000:])
        download.close()
        whole = (await served.http.get(f"/v1/kv/{known.handle}/data")).content
        assert bytes(room) == whole


@pytest.mark.parametrize(
    ("held_by", "expected"), [("quick", (429, "quota_exceeded")), ("slow", (503, "overloaded"))]
)
async def test_downloads_past_the_limit_are_refused(
    tmp_path: Path, held_by: str, expected: tuple[int, str]
) -> None:
    """A key may have two of the four slots."""
    names = ("quick", "slow", "other")
    keys = write_keys(tmp_path / "keys.yaml", **dict.fromkeys(names, "rollout,kv"))
    kv = {"capacity_bytes": 60 * 2**20, "max_open_transfers": 4}
    server = {"keys_file": tmp_path / "keys.yaml"}
    async with serving(exporting(), tmp_path, kv=kv, server=server) as served:
        known = {name: await large_handle(served, bearer(keys[name])) for name in names}
        holders = {"quick": ["quick"] * 2, "slow": ["slow"] * 2 + ["other"] * 2}[held_by]
        with ExitStack() as stack:
            for name in holders:
                stack.enter_context(stalled_reader(served, known[name], keys[name]))
            await wait_until(lambda: served.server.kv_downloads.num_open == len(holders))
            path, headers = f"/v1/kv/{known['quick']}/data", bearer(keys["quick"])
            answer = await served.http.get(path, headers=headers)
            assert (answer.status_code, answer.json()["code"]) == expected
            assert int(answer.headers["retry-after"]) > 0
            assert (await served.http.head(path, headers=headers)).status_code == 200
        await wait_until(lambda: not served.server.kv_downloads.num_open)
        assert (await served.http.get(path, headers=headers)).status_code == 200
