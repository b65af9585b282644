"""Sending side of a move of prompt-KV handles: a draining replica sends them to other replicas."""

import asyncio
import logging
from collections.abc import Callable, Sequence

import httpx

from coppice.prompt_kv.host import read_boot_id
from coppice.wire.moves import FORMAT, MovedHandle, MovedSpan
from service.cluster.key_transfers import KeyTransfers
from service.cluster.membership import ClusterMembership
from service.cluster.registry import Replica
from service.http.errors import KvNotFound
from service.moves import offers
from service.moves.exports import is_of_move
from service.moves.handle_receiver import PATH
from service.moves.kv_files import MAX_SECONDS
from service.moves.peers import MovePeers
from service.moves.sender import MoveOutcome
from service.prompt_kv.handle import Handle
from service.prompt_kv.manager import PromptKvManager
from service.prompt_kv.slots import Slot
from service.rollouts.idempotency import IdempotencyClaim
from service.weights.replication.allowed_peers import Peers

CONCURRENT_FILES = 2
POLL_SECONDS = 0.1
RETRY_SECONDS = 2.0
RESPONSE_SECONDS = 1.0
"""Time for the response, after that for the copy."""
MAX_LEASE_SHARE = 0.5
"""Share of the remaining lease in which a handle is offered: a renewal waits for its end."""

log = logging.getLogger(__name__)


class HandleSender:
    """Moves the prompt-KV handles of this replica to others, with their files and leases.

    The handles of a slot go to one replica, one after the other, so that it copies the file once.
    A handle that no replica accepts stays here, and is offered again after `RETRY_SECONDS`. One
    whose file takes too long at `bytes_per_second` is not offered. `on_ended` is called with the
    outcome of each handle that was offered to at least one replica.
    """

    def __init__(
        self,
        prompt_kv: PromptKvManager,
        cluster: ClusterMembership,
        transfers: KeyTransfers,
        allowed: Peers,
        *,
        bytes_per_second: float,
        on_ended: Callable[[MoveOutcome], None],
        client: type[httpx.AsyncClient] = httpx.AsyncClient,
    ) -> None:
        self._prompt_kv = prompt_kv
        self._cluster = cluster
        self._transfers = transfers
        self._peers = MovePeers(cluster, allowed, client)
        self._bytes_per_second = bytes_per_second
        self._on_ended = on_ended
        self._boot_id = read_boot_id()
        self._files = asyncio.Semaphore(CONCURRENT_FILES)
        self._busy: set[Slot] = set()
        self._retry_at: dict[Slot, float] = {}

    async def run(self) -> None:
        """Move handles as soon as their leases have started, until it is cancelled."""
        is_enabled = self._bytes_per_second and not self._cluster.is_standalone
        connect = await asyncio.to_thread(self._peers.connect) if is_enabled else None
        if connect is None:
            return
        async with connect() as http, asyncio.TaskGroup() as tasks:
            while True:
                for slot, handles in self._due().items():
                    self._busy.add(slot)
                    tasks.create_task(self._send_slot(http, slot, handles))
                await asyncio.sleep(POLL_SECONDS)

    def moving_owner(self, handle_id: str) -> str:
        """Owner of a handle that is being moved, whose file its receiver may read."""
        handle = self._prompt_kv.handles.find(handle_id)
        if handle is None or handle.move_ended is None:
            raise KvNotFound()
        return handle.owner

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _due(self) -> dict[Slot, list[Handle]]:
        """Handles that can be sent now, by their slots."""
        now, found = self._now(), dict[Slot, list[Handle]]()
        for handle in self._prompt_kv.handles:
            slot = handle.slot
            is_due = slot not in self._busy and self._retry_at.get(slot, 0.0) <= now
            if is_due and _can_move(handle):
                found.setdefault(slot, []).append(handle)
        return found

    async def _send_slot(
        self, http: httpx.AsyncClient, slot: Slot, handles: Sequence[Handle]
    ) -> None:
        """Send the handles of a slot; an unexpected error keeps them here."""
        try:
            self._log_size(slot)
            async with self._files:
                candidates: Sequence[Replica] = self._peers.candidates()
                for handle in handles:
                    if candidates and self._offer_seconds(handle):
                        candidates = await self._offer(http, handle, candidates)
        except Exception:
            log.exception("a move of prompt KV failed")
        finally:
            self._retry_at[slot] = self._now() + RETRY_SECONDS
            self._busy.discard(slot)

    async def _offer(
        self, http: httpx.AsyncClient, handle: Handle, candidates: Sequence[Replica]
    ) -> Sequence[Replica]:
        """Offer a handle to one replica after the other; returns the one that has accepted it."""
        accepted, num_offers = list[Replica](), 0
        until = self._now() + self._offer_seconds(handle)
        with handle.moving():
            for replica in candidates:
                seconds = until - self._now() - RESPONSE_SECONDS
                if seconds <= 0:
                    break
                num_offers += 1
                if await self._is_accepted(http, replica, handle, seconds):
                    accepted = [replica]
                    break
        if num_offers:
            self._on_ended("moved" if accepted else "kept")
        return accepted

    def _offer_seconds(self, handle: Handle) -> float:
        """Time in which a handle is offered; 0 if its copy is estimated to take longer."""
        share = handle.remaining_seconds * MAX_LEASE_SHARE
        seconds = min(share, MAX_SECONDS + RESPONSE_SECONDS)
        return seconds if self._estimate(handle.slot) < seconds - RESPONSE_SECONDS else 0.0

    def _estimate(self, slot: Slot) -> float:
        """Estimated time for the copy of a slot's file."""
        return slot.layout.file_bytes / self._bytes_per_second

    def _log_size(self, slot: Slot) -> None:
        """Log once that the file of a slot is too large."""
        if slot not in self._retry_at and self._estimate(slot) >= MAX_SECONDS:
            num_bytes, version = slot.layout.file_bytes, slot.layout.version
            log.warning("prompt KV of %d bytes (%s) is too large for a move", num_bytes, version)

    async def _is_accepted(
        self, http: httpx.AsyncClient, replica: Replica, handle: Handle, seconds: float
    ) -> bool:
        """True if the other replica has accepted a handle, which is then there only.

        It may take `seconds` for the copy.
        """
        body, is_accepted, limit = self._body(handle, seconds), False, seconds + RESPONSE_SECONDS
        try:
            is_accepted = await offers.is_accepted(
                http, replica, PATH, body, resource_id=handle.id, seconds=limit
            )
            if is_accepted:
                self._on_moved(handle, replica)
        finally:
            if not is_accepted:
                await self._transfers.restore([_cluster_key(handle)], replica.id)
        return is_accepted

    def _body(self, handle: Handle, seconds: float) -> bytes:
        assert self._prompt_kv.arena is not None, "a handle exists only with an arena"
        slot, layout = handle.slot, handle.slot.layout
        state = MovedHandle.model_construct(
            format=FORMAT,
            source=self._cluster.own_id,
            owner=handle.owner,
            version=layout.version,
            tokens_sha256=layout.tokens_sha256,
            etag=slot.etag,
            lease_seconds=handle.remaining_seconds,
            lifetime_seconds=handle.lifetime_seconds,
            boot_id=self._boot_id,
            arena=str(self._prompt_kv.arena.path),
            seconds=seconds,
            file=MovedSpan.model_construct(
                handle=handle.id,
                start=0,
                num_tokens=layout.num_tokens,
                num_bytes=layout.file_bytes,
                offset=slot.file_offset,
            ),
        )
        return state.model_dump_json().encode()

    def _on_moved(self, handle: Handle, replica: Replica) -> None:
        """Redirect requests for a handle, whose key the replica has taken over."""
        self._cluster.claims.discard(_cluster_key(handle))
        self._prompt_kv.handles.on_moved(handle, replica.url)
        log.info("a prompt-KV handle moved to %s", replica.url)


def _can_move(handle: Handle) -> bool:
    return handle.has_started and not handle.is_arriving and not is_of_move(handle.owner)


def _cluster_key(handle: Handle) -> str:
    return IdempotencyClaim.of_move(handle.owner, handle.id).cluster_key
