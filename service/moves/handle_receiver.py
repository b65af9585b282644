"""Receiving side of a move of prompt-KV handles: their KV is copied, and can be read here."""

import logging
import time
from collections.abc import Callable

from coppice.wire.moves import MovedHandle
from service.cluster.key_transfers import KeyTransfers
from service.cluster.membership import ClusterMembership
from service.http.errors import InvalidRequest, KvGone, KvNotFound, NotReady, Overloaded
from service.moves.cancelled_moves import CancelledMoves
from service.moves.kv_files import MAX_SECONDS, Deadline, FetchFailed, KvSources, read_checked
from service.prompt_kv.handle import Handle
from service.prompt_kv.layout import Layout, etag
from service.prompt_kv.manager import PromptKvManager
from service.prompt_kv.received_files import ArenaFull, ReadFile
from service.prompt_kv.slots import Slot
from service.rollouts.idempotency import IdempotencyClaim

RETRY_SECONDS = 1.0
PATH = "/v1/moves/kv"

log = logging.getLogger(__name__)


class HandleReceiver:
    """Takes over prompt-KV handles of other replicas, with their files, ids and leases.

    A refused handle leaves nothing here, and its sender tries the next replica. `check_ready`
    raises an error once this replica drains, which does not wait for a copy in progress.
    """

    def __init__(
        self,
        prompt_kv: PromptKvManager,
        sources: KvSources,
        cluster: ClusterMembership,
        transfers: KeyTransfers,
        *,
        check_ready: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prompt_kv = prompt_kv
        self._sources = sources
        self._cluster = cluster
        self._transfers = transfers
        self._check_ready = check_ready
        self._clock = clock
        self._cancelled = CancelledMoves(clock)
        self._receiving: set[str] = set()

    async def receive(self, state: MovedHandle) -> str:
        """Take over a handle; raises a ServiceError if its KV cannot be read here."""
        lease_ends_at = self._clock() + state.lease_seconds
        handle_id = state.file.handle
        await self._transfers.check_source(state.source)
        self._check(state)
        self._receiving.add(handle_id)
        try:
            slot = await self._slot(state)
            self._check_ready()
            handle = self._add(state, slot, lease_ends_at - self._clock())
            await self._take_over(state, handle)
        finally:
            self._receiving.discard(handle_id)
        return handle_id

    def cancel(self, handle_id: str) -> None:
        """Remove a handle whose source did not receive the response, and which is still there.

        A request with it that arrives later is refused. A load balancer may deliver the request to
        the source itself, which keeps the handle.
        """
        self._cancelled.add(handle_id)
        handle = self._prompt_kv.handles.find(handle_id)
        if handle is None or handle.source is None or handle.move_ended is not None:
            raise KvNotFound()
        self._prompt_kv.handles.return_to_source(handle)

    def _check(self, state: MovedHandle) -> None:
        handle_id = state.file.handle
        if self._prompt_kv.reason is not None:
            raise NotReady("prompt KV is not available", retry_after_seconds=RETRY_SECONDS)
        if handle_id in self._cancelled:
            raise InvalidRequest.of_parameter("file.handle", "the source has cancelled the move")
        if handle_id in self._receiving or self._prompt_kv.handles.find(handle_id) is not None:
            raise InvalidRequest.of_parameter("file.handle", "it is on this replica already")

    async def _slot(self, state: MovedHandle) -> Slot:
        """A slot with the file of a handle."""
        files = self._prompt_kv.received_files
        assert files is not None, "prompt KV is available"
        layout = files.layout(state.version, state.file.num_tokens, state.tokens_sha256)
        if state.file.start or layout.file_bytes != state.file.num_bytes:
            raise InvalidRequest.of_parameter("file", "the KV has another format here")
        seconds = min(state.seconds, MAX_SECONDS)
        deadline = Deadline(seconds)
        read = self._reader(state, deadline)
        try:
            return await files.slot(state.owner, layout, state.etag, read, seconds)
        except ArenaFull as error:
            log.warning("no room for a moved prompt-KV handle: %s", error)
            raise Overloaded("no room", retry_after_seconds=RETRY_SECONDS) from None
        except TimeoutError:
            raise Overloaded("too slow", retry_after_seconds=RETRY_SECONDS) from None
        except FetchFailed as error:
            log.warning("the KV of a moved handle was not fetched: %s", error)
            raise InvalidRequest.of_parameter("file", "it could not be fetched") from None
        finally:
            deadline.end()

    def _reader(self, state: MovedHandle, deadline: Deadline) -> ReadFile:
        def read(layout: Layout, data: memoryview) -> bytes:
            source = self._sources.open(state.source, state.boot_id, state.arena, PATH)
            try:
                header = read_checked(source, state.file, layout, data, deadline)
            finally:
                source.close()
            if etag(header) != state.etag:
                raise FetchFailed("the file has another ETag")
            return header

        return read

    def _add(self, state: MovedHandle, slot: Slot, lease_seconds: float) -> Handle:
        """Add the handle, whose slot has no other owner yet."""
        key = _cluster_key(state)
        return self._prompt_kv.handles.receive(
            state.file.handle,
            state.owner,
            slot,
            lease_seconds=max(lease_seconds, 0.0),
            lifetime_seconds=state.lifetime_seconds,
            source=state.source,
            on_end=lambda: self._cluster.release(key),
        )

    async def _take_over(self, state: MovedHandle, handle: Handle) -> None:
        """Take over the key of the handle, by which other replicas find it."""
        handles = self._prompt_kv.handles
        try:
            if handle.id in self._cancelled:
                raise KvGone("the source has cancelled the move")
            await self._transfers.take_over(_cluster_key(state), state.source)
            if handles.find(handle.id) is not handle:
                self._cluster.release(_cluster_key(state))
                raise KvGone("its lease has ended, or the source has cancelled the move")
            self._check_ready()
            handle.is_arriving = False
        except BaseException:
            handles.return_to_source(handle)
            raise


def _cluster_key(state: MovedHandle) -> str:
    return IdempotencyClaim.of_move(state.owner, state.file.handle).cluster_key
