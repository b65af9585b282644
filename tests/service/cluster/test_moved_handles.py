"""A draining replica sends its open prompt-KV handles, so that their owners can still read them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from coppice import KvSource, PromptKV
from coppice.wire.kv import KvHandle
from service.cluster.in_memory import InMemoryRegistry
from service.cluster.membership import RedirectToReplica
from service.moves.exports import owner_of
from service.moves.handle_sender import HandleSender
from service.weights.replication.allowed_peers import Peers
from tests.cluster import replica, sees
from tests.fake_engine import FakeEngine
from tests.service.cluster.test_moves import PEERS, OneTransfer, Unavailable, drain, engine_of
from tests.service.keyfile import bearer, write_keys
from tests.service.prompt_kv.export_requests import export_groups, export_handle, rollout_body
from tests.service.test_rollouts import running_samples
from tests.serving import Served

pytestmark = pytest.mark.slow

PROMPT = [1 + i % 200 for i in range(70)]
LONG = [1 + i % 200 for i in range(510)]
"""Prompt whose KV takes more than half a MiB."""
DRAIN_SECONDS = 60.0


@asynccontextmanager
async def pair(
    tmp_path: Path,
    *,
    one_host: bool = True,
    registry: InMemoryRegistry | None = None,
    receiver: dict[str, Any] | None = None,
    **sections: dict[str, Any],
) -> AsyncIterator[tuple[Served, Served]]:
    """Two replicas. The second one has its shared memory elsewhere, unless they share a host."""
    shared = registry or InMemoryRegistry()
    elsewhere = tmp_path / "shm"
    elsewhere.mkdir()
    kv: dict[str, Any] = {"capacity_bytes": 2**21}
    own = kv | ({} if one_host else {"directory": elsewhere}) | (receiver or {})
    sections = {"weights": PEERS, "cluster": {"move_seconds": 30}, **sections}
    engines = [FakeEngine(prompt_kv=True) for _ in "ab"]
    async with (
        replica(tmp_path / "a", engines[0], shared, kv=kv, **sections) as a,
        replica(tmp_path / "b", engines[1], shared, kv=own, **sections) as b,
    ):
        for served in (a, b):
            await sees(served, 2)
        yield a, b


async def file_of(served: Served, handle: str) -> httpx.Response:
    """The file of a handle, as its owner reads it."""
    return await served.http.get(f"/v1/kv/{handle}/data", follow_redirects=True)


def num_handles(served: Served) -> int:
    served.server.prompt_kv.check()
    return len(served.server.prompt_kv.handles)


def moves(served: Served) -> dict[str, float]:
    """Numbers of offers of handles by outcome."""
    (family,) = served.server.metrics.cluster.handle_moves.collect()
    return {
        each.labels["outcome"]: each.value
        for each in family.samples
        if each.name.endswith("_total") and each.value
    }


def sender_of(served: Served, client: type[httpx.AsyncClient]) -> HandleSender:
    server = served.server
    return HandleSender(
        server.prompt_kv,
        server.cluster,
        server.key_transfers,
        Peers(["http://127.0.0.1:*"], None),
        bytes_per_second=2**30,
        on_ended=lambda outcome: server.metrics.cluster.handle_moves.labels(outcome).inc(),
        client=client,
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def sending(served: Served, client: type[httpx.AsyncClient]) -> AsyncIterator[None]:
    """The handles of a replica are sent by this client, as during a drain."""
    task = asyncio.create_task(sender_of(served, client).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("one_host", [True, False])
async def test_handle_is_read_at_another_replica_after_a_drain(
    tmp_path: Path, one_host: bool
) -> None:
    """Over shared memory, and by HTTP. The sender redirects, and the file is the same."""
    async with pair(tmp_path, one_host=one_host) as (a, b):
        kv = await export_handle(a, PROMPT)
        before = await file_of(a, kv.handle)
        await drain(a)
        assert (num_handles(a), num_handles(b), moves(a)) == (0, 1, {"moved": 1})
        moved = await a.http.get(f"/v1/kv/{kv.handle}/data")
        assert moved.headers["location"] == f"{b.url}/v1/kv/{kv.handle}/data"
        for served in (a, b):
            after = await file_of(served, kv.handle)
            assert (after.status_code, after.content) == (200, before.content)
            assert after.headers["etag"] == before.headers["etag"]
        layout = (await b.http.get(f"/v1/kv/{kv.handle}")).json()
        assert (layout["version"], layout["num_tokens"]) == (kv.version, kv.num_tokens)


async def test_handle_is_found_after_its_first_replica_has_left(tmp_path: Path) -> None:
    shared = InMemoryRegistry()
    async with pair(tmp_path, registry=shared) as (a, b):
        kv = await export_handle(a, PROMPT)
        before = await file_of(a, kv.handle)
        await drain(a)
        await shared.leave(a.server.cluster.own_id)
        async with replica(tmp_path / "c", FakeEngine(prompt_kv=True), shared) as c:
            await sees(c, 2)
            place = f"/v1/kv/{kv.handle}/data"
            assert (await c.http.get(place)).headers["location"] == b.url + place
            assert (await file_of(c, kv.handle)).content == before.content
            assert (await c.http.delete(f"/v1/kv/{kv.handle}", follow_redirects=True)).is_success
            await b.server.cluster.refresh()
            gone = await c.http.get(place, follow_redirects=True)
            assert (gone.status_code, gone.json()["code"]) == (410, "kv_gone")


async def test_lease_is_renewed_and_released_at_the_receiver(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, b):
        kv = await export_handle(a, PROMPT, kv={"lease_seconds": 30})
        await drain(a)
        (handle,) = b.server.prompt_kv.handles
        assert 25 < handle.remaining_seconds <= 30
        assert 3000 < handle.lifetime_seconds <= 3600
        renewed = await a.http.post(
            f"/v1/kv/{kv.handle}/lease", json={"lease_seconds": 60}, follow_redirects=True
        )
        assert 55 < renewed.json()["lease_seconds"] <= 60
        await a.http.delete(f"/v1/kv/{kv.handle}", follow_redirects=True)
        assert num_handles(b) == 0
        assert b.server.prompt_kv.status().leased_bytes == 0
        for served in (a, b):
            assert (await file_of(served, kv.handle)).json()["code"] == "kv_gone"


async def test_handles_of_one_prompt_share_the_copy(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, b):
        groups = await export_groups(a, PROMPT, PROMPT, PROMPT)
        leased = a.server.prompt_kv.status().leased_bytes
        await drain(a)
        assert num_handles(b) == 3
        assert b.server.prompt_kv.status().leased_bytes == leased
        files = [await file_of(b, each.kv.handle) for each in groups if each.kv is not None]
        assert len({file.content for file in files}) == 1


async def test_copy_is_not_shared_with_other_kv_of_the_prompt(tmp_path: Path) -> None:
    """The receiver's own KV of the prompt may differ in its last bits."""
    async with pair(tmp_path) as (a, b):
        own = await export_handle(b, PROMPT)
        (handle,) = b.server.prompt_kv.handles
        handle.slot.etag = '"other"'
        kv = await export_handle(a, PROMPT)
        await drain(a)
        slots = {each.id: each.slot for each in b.server.prompt_kv.handles}
        assert slots[own.handle] is not slots[kv.handle]


async def test_handle_moves_again_with_its_second_replica(tmp_path: Path) -> None:
    shared = InMemoryRegistry()
    async with pair(tmp_path, registry=shared) as (a, b):
        kv = await export_handle(a, PROMPT)
        before = await file_of(a, kv.handle)
        await drain(a)
        sections = {"weights": PEERS, "kv": {"capacity_bytes": 2**21}}
        engine = FakeEngine(prompt_kv=True)
        async with replica(tmp_path / "c", engine, shared, **sections) as c:
            for served in (a, b, c):
                await sees(served, 3)
            await drain(b)
            assert [num_handles(each) for each in (a, b, c)] == [0, 0, 1]
            for served in (a, b, c):
                assert (await file_of(served, kv.handle)).content == before.content


async def test_handle_of_a_running_rollout_moves_when_its_lease_has_started(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as (a, b):
        engine_of(a).instant = False
        calling = asyncio.create_task(a.http.post("/v1/rollouts", json=rollout_body(PROMPT)))
        await running_samples(a, 2)
        draining = asyncio.create_task(drain(a))
        engine_of(a).step(4)
        kv = (await calling).json()["groups"][0]["kv"]
        await draining
        assert (await file_of(a, kv["handle"])).status_code == 200
        assert num_handles(b) == 1


@pytest.mark.parametrize(
    ("sections", "receiver"),
    [
        ({"cluster": {"move_seconds": 0}}, {}),
        ({"cluster": {"move_kv_bytes_per_second": 0}}, {}),
        ({"cluster": {"move_kv_bytes_per_second": 1}}, {}),
        ({"weights": {}}, {}),
    ],
    ids=["no moves", "no KV", "too slow", "no peers"],
)
async def test_handle_that_cannot_move_is_read_during_the_drain(
    tmp_path: Path, sections: dict[str, Any], receiver: dict[str, Any]
) -> None:
    async with pair(tmp_path, receiver=receiver, **sections) as (a, b):
        kv = await export_handle(a, PROMPT)
        draining = asyncio.create_task(drain(a))
        await asyncio.sleep(0.2)
        assert (await a.http.get(f"/v1/kv/{kv.handle}/data")).status_code == 200
        assert not draining.done()
        await a.http.delete(f"/v1/kv/{kv.handle}")
        await draining
        assert (num_handles(b), moves(a)) == (0, {})


async def test_file_that_is_too_large_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = {"move_kv_bytes_per_second": 1}
    async with pair(tmp_path, cluster=cluster) as (a, _):
        await export_handle(a, PROMPT)
        (handle,) = a.server.prompt_kv.handles
        async with httpx.AsyncClient() as http:
            for _ in range(2):
                await a.server.handle_sender._send_slot(http, handle.slot, [handle])
        assert caplog.text.count("is too large for a move") == 1


async def test_short_lease_does_not_keep_other_handles_of_the_prompt(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, b):
        short = await export_handle(a, PROMPT, kv={"lease_seconds": 1.9})
        long = await export_handle(a, PROMPT)
        async with sending(a, httpx.AsyncClient):
            await until(lambda: bool(moves(a)))
            assert [handle.id for handle in a.server.prompt_kv.handles] == [short.handle]
            assert [handle.id for handle in b.server.prompt_kv.handles] == [long.handle]
        assert moves(a) == {"moved": 1}


async def test_handle_stays_if_the_receiver_has_no_room(tmp_path: Path) -> None:
    async with pair(tmp_path, receiver={"capacity_bytes": 2**20}) as (a, b):
        whole = await export_handle(b, LONG[::-1])
        free = b.server.prompt_kv.status().free_bytes
        kv = await export_handle(a, LONG)
        async with sending(a, httpx.AsyncClient):
            await until(lambda: bool(moves(a)))
            assert (moves(a), num_handles(a), num_handles(b)) == ({"kept": 1}, 1, 1)
            assert b.server.prompt_kv.status().free_bytes == free
            assert (await a.http.get(f"/v1/kv/{kv.handle}/data")).status_code == 200
            await b.http.delete(f"/v1/kv/{whole.handle}")
            await until(lambda: moves(a).get("moved") == 1)
        assert (num_handles(a), num_handles(b)) == (0, 1)


async def test_handle_stays_if_another_model_is_loaded(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, b):
        files = b.server.prompt_kv.received_files
        assert files is not None
        files._layouts._model = "other"
        await export_handle(a, PROMPT)
        async with sending(a, httpx.AsyncClient):
            await until(lambda: bool(moves(a)))
        assert (moves(a), num_handles(a), num_handles(b)) == ({"kept": 1}, 1, 0)
        await until(lambda: b.server.prompt_kv.status().free_bytes == 2**21)


class Dead(httpx.AsyncClient):
    """HTTP client whose peer has died."""

    async def post(self, *args: Any, **kwargs: Any) -> httpx.Response:
        raise httpx.ReadError("reset")


class Lost(httpx.AsyncClient):
    """HTTP client that loses the responses of its peer."""

    async def post(self, *args: Any, **kwargs: Any) -> httpx.Response:
        await super().post(*args, **kwargs)
        raise httpx.ReadError("reset")


@pytest.mark.parametrize("client", [Dead, Lost])
async def test_handle_stays_if_the_receiver_dies(
    tmp_path: Path, client: type[httpx.AsyncClient]
) -> None:
    """The receiver may have taken the handle over, and must forget it."""
    async with pair(tmp_path) as (a, b):
        kv = await export_handle(a, PROMPT)
        async with sending(a, client):
            await until(lambda: bool(moves(a)))
        assert (num_handles(a), num_handles(b)) == (1, 0)
        assert b.server.prompt_kv.status().leased_bytes == 0
        place = f"/v1/kv/{kv.handle}/data"
        assert (await b.http.get(place)).headers["location"] == a.url + place
        assert (await file_of(b, kv.handle)).status_code == 200


async def test_sender_that_dies_during_the_move_leaves_nothing(tmp_path: Path) -> None:
    async with pair(tmp_path, one_host=False) as (a, b):
        kv = await export_handle(a, PROMPT)
        (handle,) = a.server.prompt_kv.handles
        sender = sender_of(a, httpx.AsyncClient)
        body = sender._body(handle, 5)
        a.server.prompt_kv.stop_new_readers()
        response = await b.http.post("/v1/moves/kv", content=body, headers=JSON_BODY)
        assert (response.status_code, num_handles(b)) == (422, 0)
        await until(lambda: b.server.prompt_kv.status().free_bytes == 2**21)
        assert (await b.http.get(f"/v1/kv/{kv.handle}")).status_code == 307


JSON_BODY = {"content-type": "application/json"}


@pytest.mark.parametrize("registry", [Unavailable, OneTransfer])
async def test_handle_stays_if_the_registry_does_not_respond(
    tmp_path: Path, registry: type[InMemoryRegistry]
) -> None:
    shared = registry()
    if isinstance(shared, OneTransfer):
        shared.num_transfers = 1
    async with pair(tmp_path, registry=shared) as (a, b):
        kv = await export_handle(a, PROMPT)
        async with sending(a, httpx.AsyncClient):
            await until(lambda: bool(moves(a)))
        assert (moves(a), num_handles(a), num_handles(b)) == ({"kept": 1}, 1, 0)
        assert (await a.http.get(f"/v1/kv/{kv.handle}/data")).status_code == 200


def paused(at: asyncio.Event, go_on: asyncio.Event) -> type[httpx.AsyncClient]:
    """HTTP client that waits between the acceptance of a move and its response."""

    class Paused(httpx.AsyncClient):
        async def post(self, *args: Any, **kwargs: Any) -> httpx.Response:
            response = await super().post(*args, **kwargs)
            at.set()
            await go_on.wait()
            return response

    return Paused


async def test_lease_that_ends_during_the_move_ends_at_both(tmp_path: Path) -> None:
    at, go_on = asyncio.Event(), asyncio.Event()
    async with pair(tmp_path) as (a, b):
        kv = await export_handle(a, PROMPT)
        async with sending(a, paused(at, go_on)):
            await at.wait()
            for served in (a, b):
                (handle,) = served.server.prompt_kv.handles
                handle.end_lease()
                served.server.prompt_kv.handles.sweep()
            go_on.set()
            await until(lambda: bool(moves(a)))
        assert (num_handles(a), num_handles(b)) == (0, 0)
        for served in (a, b):
            assert (await file_of(served, kv.handle)).json()["code"] == "kv_gone"


class PausedTransfer(InMemoryRegistry):
    """Registry whose transfers wait before they are executed."""

    def __init__(self) -> None:
        super().__init__()
        self.at, self.go_on = asyncio.Event(), asyncio.Event()

    async def transfer(
        self, claim_key: str, source: str, replica_id: str, *, ttl_seconds: float
    ) -> str:
        self.at.set()
        await self.go_on.wait()
        return await super().transfer(claim_key, source, replica_id, ttl_seconds=ttl_seconds)


async def test_handle_stays_if_the_receiver_drains_during_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, go_on = asyncio.Event(), asyncio.Event()
    async with pair(tmp_path) as (a, b):
        files = b.server.prompt_kv.received_files
        assert files is not None
        copy = files.slot

        async def paused_copy(*args: Any) -> Any:
            at.set()
            await go_on.wait()
            return await copy(*args)

        monkeypatch.setattr(files, "slot", paused_copy)
        kv = await export_handle(a, PROMPT)
        async with sending(a, httpx.AsyncClient):
            await at.wait()
            await drain(b)
            go_on.set()
            await until(lambda: bool(moves(a)))
        assert (moves(a), num_handles(a), num_handles(b)) == ({"kept": 1}, 1, 0)
        assert (await file_of(a, kv.handle)).status_code == 200


async def test_handle_stays_if_the_receiver_drains_while_it_takes_over_the_key(
    tmp_path: Path,
) -> None:
    shared = PausedTransfer()
    async with pair(tmp_path, registry=shared) as (a, b):
        kv = await export_handle(a, PROMPT)
        async with sending(a, httpx.AsyncClient):
            await shared.at.wait()
            draining = asyncio.create_task(drain(b))
            await until(lambda: b.server.readiness.draining)
            shared.go_on.set()
            await until(lambda: bool(moves(a)))
        await draining
        assert (moves(a), num_handles(a), num_handles(b)) == ({"kept": 1}, 1, 0)
        assert (await file_of(a, kv.handle)).status_code == 200


async def test_handle_is_not_moved_on_before_its_key_is_taken_over(tmp_path: Path) -> None:
    shared = PausedTransfer()
    async with pair(tmp_path, registry=shared) as (a, b):
        await export_handle(a, PROMPT)
        async with sending(a, httpx.AsyncClient):
            await shared.at.wait()
            (handle,) = b.server.prompt_kv.handles
            assert b.server.handle_sender._due() == {}
            shared.go_on.set()
            await until(lambda: bool(moves(a)))
        assert b.server.handle_sender._due() == {handle.slot: [handle]}


async def test_handle_that_was_moved_on_is_still_redirected(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, _):
        await export_handle(a, PROMPT)
        handles = a.server.prompt_kv.handles
        (handle,) = handles
        handles.on_moved(handle, "http://other")
        handles.return_to_source(handle)
        with pytest.raises(RedirectToReplica):
            handles.check_here(handle.id, handle.owner)


@pytest.mark.parametrize("is_accepted", [True, False])
async def test_renewal_and_release_wait_for_the_move(tmp_path: Path, is_accepted: bool) -> None:
    at, go_on = asyncio.Event(), asyncio.Event()

    class Refused(paused(at, go_on)):  # type: ignore[misc]
        async def post(self, *args: Any, **kwargs: Any) -> httpx.Response:
            response: httpx.Response = await super().post(*args, **kwargs)
            if not is_accepted:
                raise httpx.ReadError("reset")
            return response

    async with pair(tmp_path) as (a, b):
        kv, other = await export_handle(a, PROMPT), await export_handle(a, PROMPT[1:])
        async with sending(a, Refused):
            await at.wait()
            await until(lambda: all(h.move_ended for h in a.server.prompt_kv.handles))
            place = f"/v1/kv/{kv.handle}"
            requests: list[Awaitable[httpx.Response]] = [
                asyncio.create_task(a.http.post(f"{place}/lease", json={"lease_seconds": 50})),
                asyncio.create_task(a.http.delete(f"/v1/kv/{other.handle}")),
            ]
            assert (await a.http.get(f"{place}/data")).status_code == 200
            go_on.set()
            statuses = [response.status_code for response in await asyncio.gather(*requests)]
        assert statuses == ([307, 307] if is_accepted else [200, 204])
        assert num_handles(b) == (2 if is_accepted else 0)


class Stalled(httpx.AsyncClient):
    """HTTP client whose peer does not respond to moves."""

    async def post(self, *args: Any, **kwargs: Any) -> httpx.Response:
        return await asyncio.Future()


async def test_renewal_in_time_is_granted_if_the_receiver_stalls(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, _):
        kv = await export_handle(a, PROMPT, kv={"lease_seconds": 3})
        (handle,) = a.server.prompt_kv.handles
        async with sending(a, Stalled):
            await until(lambda: handle.move_ended is not None)
            renewed = await a.http.post(f"/v1/kv/{kv.handle}/lease", json={"lease_seconds": 60})
        assert renewed.status_code == 200
        assert 55 < renewed.json()["lease_seconds"] <= 60


async def test_renewal_during_a_move_takes_effect_on_arrival(tmp_path: Path) -> None:
    """Its end may be later than that of the lease."""
    async with pair(tmp_path) as (a, _):
        kv = await export_handle(a, PROMPT, kv={"lease_seconds": 1})
        (handle,) = a.server.prompt_kv.handles
        with handle.moving():
            place = f"/v1/kv/{kv.handle}/lease"
            renewing = asyncio.create_task(a.http.post(place, json={"lease_seconds": 60}))
            await asyncio.sleep(1.2)
        assert (await renewing).status_code == 200


async def test_time_of_all_candidates_together_is_half_of_the_lease(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, _):
        await export_handle(a, PROMPT, kv={"lease_seconds": 4})
        (handle,) = a.server.prompt_kv.handles
        sender = sender_of(a, Stalled)
        peers = list(a.server.cluster.view.replicas.values())[:1] * 3
        async with Stalled() as http:
            assert await sender._offer(http, handle, peers) == []
        assert handle.remaining_seconds > 1.0


async def test_copy_is_not_a_download_of_the_api_key(tmp_path: Path) -> None:
    async with pair(tmp_path, one_host=False) as (a, b):
        await export_handle(a, PROMPT)
        (handle,) = a.server.prompt_kv.handles
        share = a.server.settings.kv.max_open_transfers // 2
        with ExitStack() as downloads:
            for _ in range(share):
                downloads.enter_context(a.server.kv_downloads.admitted(handle.owner))
            async with sending(a, httpx.AsyncClient):
                await until(lambda: bool(moves(a)))
        assert (moves(a), num_handles(b)) == ({"moved": 1}, 1)


async def test_open_download_of_a_moved_handle_completes(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, _):
        kv = await export_handle(a, PROMPT)
        whole = (await file_of(a, kv.handle)).content
        (handle,) = a.server.prompt_kv.handles
        with a.server.prompt_kv.handles.pinned(handle) as pin:
            draining = asyncio.create_task(drain(a))
            await until(lambda: not num_handles(a))
            pin.sweep()
            assert pin.is_open
            assert bytes(a.server.prompt_kv.file(handle)) == whole
            assert not draining.done()
        await draining


async def test_memory_that_a_trainer_has_mapped_stays_unchanged(tmp_path: Path) -> None:
    """It renews the lease at the receiver, and reads the memory of the sender."""
    async with pair(tmp_path) as (a, b):
        kv = await export_handle(a, PROMPT)
        source = KvSource(a.url, transports=["shm"])
        mapped = await asyncio.to_thread(PromptKV.fetch, kv, source)
        assert mapped is not None
        before = mapped.numpy(1)[0].copy()
        await drain(a)
        assert a.server.prompt_kv.status().quarantined_bytes
        assert await asyncio.to_thread(mapped.renew, 60) > 55
        again = await asyncio.to_thread(PromptKV.fetch, kv, source)
        assert again is not None and again.transport == "shm"
        assert (again.numpy(1)[0] == before).all() and (mapped.numpy(1)[0] == before).all()
        await asyncio.to_thread(mapped.release)
        assert num_handles(b) == 0


async def test_client_follows_the_redirect(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, _):
        kv = await export_handle(a, PROMPT)
        first = await fetched(kv, a.url)
        await drain(a)
        moved = await fetched(kv, a.url)
        assert moved.transport == "http"
        for index in range(2):
            for mine, theirs in zip(first.numpy(index), moved.numpy(index), strict=True):
                assert (mine == theirs).all()


async def fetched(kv: KvHandle, url: str) -> PromptKV:
    source = KvSource(url, transports=["http"])
    found = await asyncio.to_thread(PromptKV.fetch, kv, source)
    assert found is not None, source.counts
    return found


async def test_handle_keeps_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    roles = {"mine": "rollout,kv", "yours": "rollout,kv", "peer": "replica"}
    keys = write_keys(path, **roles)
    weights = PEERS | {"peer_key_file": tmp_path / "peer"}
    (tmp_path / "peer").write_text(keys["peer"])
    (tmp_path / "peer").chmod(0o600)
    async with pair(tmp_path, one_host=False, weights=weights, server={"keys_file": path}) as (
        a,
        b,
    ):
        mine, yours = bearer(keys["mine"]), bearer(keys["yours"])
        answer = await a.http.post("/v1/rollouts", json=rollout_body(PROMPT), headers=mine)
        place = f"/v1/kv/{answer.json()['groups'][0]['kv']['handle']}/data"
        await drain(a)
        assert (await a.http.get(place, headers=mine)).headers["location"] == b.url + place
        assert (await b.http.get(place, headers=mine)).status_code == 200
        for served, status in ((a, 503), (b, 404)):  # the first one has drained
            assert (await served.http.get(place, headers=yours)).status_code == status
        for method, path_ in (("POST", ""), ("GET", "/0"), ("DELETE", "/0")):
            answer = await b.http.request(method, f"/v1/moves/kv{path_}", headers=mine)
            assert answer.status_code == 403


async def test_only_files_of_handles_that_are_moving_are_read(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, _):
        kv = await export_handle(a, PROMPT)
        assert (await a.http.get(f"/v1/moves/kv/{kv.handle}")).status_code == 404
        assert (await a.http.delete(f"/v1/moves/kv/{kv.handle}")).status_code == 404
        assert (await a.http.get(f"/v1/kv/{kv.handle}")).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("etag", '"00000000000000000000000000000000"'),
        ("tokens_sha256", "0" * 64),
        ("version", "v9"),
        ("lease_seconds", 0),
        ("lease_seconds", 1e9),
        ("seconds", -1),
        ("source", "x"),
        ("arena", "/etc/passwd"),
        ("file", {"num_tokens": 68}),
        ("file", {"num_tokens": 10**9}),
        ("file", {"num_bytes": 1}),
        ("file", {"start": 1}),
        ("file", {"offset": 2**53}),
    ],
)
async def test_wrong_state_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    """The source is a replica that has no such handle to move."""
    async with pair(tmp_path) as (a, b):
        await export_handle(a, PROMPT)
        (handle,) = a.server.prompt_kv.handles
        state = httpx.Response(200, content=sender_of(a, Dead)._body(handle, 5)).json()
        state[field] = state[field] | value if isinstance(value, dict) else value
        response = await b.http.post("/v1/moves/kv", json=state)
        assert (response.status_code, num_handles(b)) == (422, 0)
        await until(lambda: b.server.prompt_kv.status().free_bytes == 2**21)


async def test_handle_is_received_once(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, b):
        await export_handle(a, PROMPT)
        (handle,) = a.server.prompt_kv.handles
        content = sender_of(a, Dead)._body(handle, 5)
        requests = [
            b.http.post("/v1/moves/kv", content=content, headers=JSON_BODY) for _ in range(3)
        ]
        statuses = [response.status_code for response in await asyncio.gather(*requests)]
        assert sorted(statuses) == [201, 422, 422]
        assert num_handles(b) == 1
        assert (await b.http.delete(f"/v1/moves/kv/{handle.id}")).status_code == 204
        again = await b.http.post("/v1/moves/kv", content=content, headers=JSON_BODY)
        assert (again.status_code, num_handles(b)) == (422, 0)


async def test_cancelled_handle_that_is_being_moved_on_is_not_received_again(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as (a, b):
        await export_handle(a, PROMPT)
        (handle,) = a.server.prompt_kv.handles
        content = sender_of(a, Dead)._body(handle, 5)
        first = await b.http.post("/v1/moves/kv", content=content, headers=JSON_BODY)
        assert first.status_code == 201
        (received,) = b.server.prompt_kv.handles
        with received.moving():
            assert (await b.http.delete(f"/v1/moves/kv/{handle.id}")).status_code == 404
        b.server.prompt_kv.handles.end(received)
        again = await b.http.post("/v1/moves/kv", content=content, headers=JSON_BODY)
        assert (again.status_code, num_handles(b)) == (422, 0)


async def test_kv_of_moved_samples_is_not_sent_as_handles(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, _):
        await export_handle(a, PROMPT)
        (handle,) = a.server.prompt_kv.handles
        of_move = a.server.prompt_kv.handles.grant(owner_of("rollout"), handle.slot, 60)
        of_move.start_lease()
        assert a.server.handle_sender._due() == {handle.slot: [handle]}
        a.server.prompt_kv.handles.end(of_move)
