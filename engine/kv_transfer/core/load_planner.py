"""Scheduler side of KV loads in EngineCore: parts of a prompt to load and not prefill.

A span is loaded if everything before it is cached, and only from exports written under the current
weights version: names are recorded when their export is scheduled, and cleared when the weights
change. vLLM receives the number of external tokens, allocates their blocks, and the workers fill
them in the same step, before the forward pass. All other tokens are prefilled.

The requests of a chain run in one step. Each finds the blocks that the previous one computes in
that step, because every layer writes its KV before attending. So none is scheduled before all have
arrived from the service. If the chain is still incomplete after MAX_WAIT_SECONDS, its requests
proceed and prefill what they do not find.
"""

import functools
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from engine.kv_transfer.cache_layout import CacheLayout
from engine.kv_transfer.jobs import LoadJob
from engine.types.kv import KvLoad, LoadPiece

Hasher = Callable[[Any], list[bytes]]
MAX_NAMES: Final = 2**16
MAX_WAIT_SECONDS: Final = 0.05


@dataclass(slots=True)
class PendingLoad:
    """A tracked request with KV to load from exports.

    Its first `num_public_blocks` blocks are shared with other requests.
    """

    request: Any
    load: KvLoad
    num_public_blocks: int


@dataclass(slots=True)
class IncompleteChain:
    """A chain (requests that make up one prompt) of which some requests have not arrived yet.

    `first` is the request that arrived first, `missing` the number of requests that have not
    arrived, and `until` the time when the others stop waiting for them.
    """

    first: str
    missing: int
    until: float


class LoadPlanner:
    """Decides which KV is loaded in the step being scheduled; knows the loadable exports.

    Called from EngineCore's loop only.
    """

    def __init__(
        self, layout: CacheLayout | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._layout = layout
        self._clock = clock
        self._names: dict[str, None] = {}
        self._pending: dict[str, PendingLoad] = {}
        self._incomplete: dict[str, IncompleteChain] = {}
        self._matched: dict[str, tuple[LoadPiece, ...]] = {}
        self._jobs: list[LoadJob] = []

    @property
    def num_pending(self) -> int:
        return len(self._pending) + len(self._incomplete) + len(self._matched)

    def add(self, request: Any, load: KvLoad | None) -> None:
        """Track a request with KV to load, and make its blocks private to its chain of requests."""
        if load is None or self._layout is None:
            return
        num_public_blocks = load.exact_tokens // self._layout.block_size
        privatize_blocks(request, num_public_blocks, load.chain)
        self._pending[request.request_id] = PendingLoad(request, load, num_public_blocks)
        chain = self._incomplete.get(load.chain)
        if chain is None:
            until = self._clock() + MAX_WAIT_SECONDS
            chain = IncompleteChain(request.request_id, load.num_requests, until)
            self._incomplete[load.chain] = chain
        chain.missing -= 1
        if not chain.missing:
            del self._incomplete[load.chain]

    def forget(self, request_id: str) -> None:
        self._matched.pop(request_id, None)
        pending = self._pending.pop(request_id, None)
        if pending is not None:
            self._incomplete.pop(pending.load.chain, None)

    def on_exported(self, name: str) -> None:
        """Record an export as loadable.

        The least recently used one is dropped when there are too many.
        """
        self._names.pop(name, None)
        self._names[name] = None
        while len(self._names) > MAX_NAMES:
            del self._names[next(iter(self._names))]

    def start_epoch(self) -> None:
        self._names.clear()

    def match(self, request: Any, num_computed: int) -> int | None:
        """The number of loadable tokens after the cached ones, or None if the request must wait.

        vLLM may call it repeatedly. At least one token must be left to prefill.
        """
        self._matched.pop(request.request_id, None)
        pending = self._pending.get(request.request_id)
        if pending is None:
            return 0
        load = pending.load
        if self._must_wait(request.request_id, load.chain):
            return None
        matched = tuple(self._loadable(load.pieces, num_computed, request.num_tokens))
        if not matched:
            return 0
        self._privatize_chain(load.chain, num_computed)
        self._matched[request.request_id] = matched
        return matched[-1].end - num_computed

    def on_allocated(self, request: Any, blocks: Any, num_external: int) -> None:
        """Schedule the load of matched tokens after vLLM has allocated their blocks."""
        if not num_external:
            return
        assert self._layout is not None, "only supported caches are loaded"
        matched = self._matched.pop(request.request_id)
        assert matched[-1].end - matched[0].start == num_external, "all or nothing is allocated"
        self._jobs.append(self._job(matched, blocks.get_block_ids()[self._layout.group]))

    def take_jobs(self) -> tuple[LoadJob, ...]:
        """Return and clear the load jobs of the step being scheduled."""
        jobs, self._jobs = tuple(self._jobs), []
        return jobs

    def _must_wait(self, request_id: str, chain: str) -> bool:
        """True if a request must wait until its whole chain has arrived, or a deadline passes.

        The first request checks the deadline for the whole chain, so that no request overtakes
        those that it depends on.
        """
        incomplete = self._incomplete.get(chain)
        if incomplete is None:
            return False
        if incomplete.first != request_id or self._clock() < incomplete.until:
            return True
        del self._incomplete[chain]
        return False

    def _privatize_chain(self, chain: str, num_computed: int) -> None:
        """Make the blocks of a chain of requests that will be loaded private to the chain.

        This applies to all waiting requests of the chain, even to exact KV, so that one finds the
        blocks that another has loaded.
        """
        assert self._layout is not None, "only supported caches are loaded"
        num_public_blocks = num_computed // self._layout.block_size
        for pending in self._pending.values():
            waits = pending.load.chain == chain and not pending.request.num_computed_tokens
            if waits and pending.num_public_blocks > num_public_blocks:
                privatize_blocks(pending.request, num_public_blocks, chain)
                pending.num_public_blocks = num_public_blocks

    def _loadable(
        self, pieces: Sequence[LoadPiece], position: int, num_tokens: int
    ) -> Iterator[LoadPiece]:
        """Consecutive loadable spans from `position` on; none unless it is a block boundary."""
        assert self._layout is not None, "only supported caches are loaded"
        if position % self._layout.block_size:
            return
        for piece in pieces:
            if not piece.start <= position < piece.end:
                continue
            is_loadable = all(name in self._names for name in piece.names)
            if not is_loadable or piece.end >= num_tokens:
                return
            yield piece.suffix_from(position)
            position = piece.end

    def _job(self, pieces: tuple[LoadPiece, ...], block_ids: Sequence[int]) -> LoadJob:
        assert self._layout is not None, "only supported caches are loaded"
        for name in (name for piece in pieces for name in piece.names if name is not None):
            self.on_exported(name)
        size = self._layout.block_size
        blocks = slice(pieces[0].start // size, -(-pieces[-1].end // size))
        return LoadJob(pieces=pieces, block_ids=tuple(block_ids[blocks]))


def privatize_blocks(request: Any, num_public_blocks: int, chain: str) -> None:
    """Make all but the first `num_public_blocks` blocks of a waiting request private to its chain.

    vLLM finds a block by a hash of its tokens, its salt and all blocks before it. KV computed after
    spliced spans differs from the exact KV of the same tokens, so its hash must differ. A load may
    also fail after vLLM has assigned hashes to its blocks, so loaded blocks must not match other
    requests.

    A later call may only lower `num_public_blocks`. No token is hashed again: the private hashes
    are derived from the `plain` ones that vLLM computes. So blocks that are sampled have the same
    hashes as in the prompt of a later request of the chain.
    """
    hasher, num_plain = request._block_hasher, len(request.block_hashes)
    hashes = list(request.block_hashes)
    if isinstance(hasher, functools.partial) and hasher.func is _block_hashes:
        num_plain, hashes = hasher.keywords["num_public_blocks"], hasher.keywords["plain"]
        hasher = hasher.keywords["hasher"]
        assert num_public_blocks <= num_plain, "private blocks cannot become public"
    chain_bytes = chain.encode()
    request._block_hasher = functools.partial(
        _block_hashes,
        hasher=hasher,
        num_public_blocks=num_public_blocks,
        chain=chain_bytes,
        plain=hashes,
    )
    plain = request.block_hashes[num_public_blocks:num_plain]
    request.block_hashes[num_public_blocks:num_plain] = [
        _private_hash(block_hash, chain_bytes) for block_hash in plain
    ]


class _PlainRequest:
    """A request with the hashes that it would have without a chain."""

    def __init__(self, request: Any, block_hashes: list[bytes]) -> None:
        self._request = request
        self.block_hashes = block_hashes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def _block_hashes(
    request: Any, *, hasher: Hasher, num_public_blocks: int, chain: bytes, plain: list[bytes]
) -> list[bytes]:
    first = len(request.block_hashes)
    added = hasher(_PlainRequest(request, plain))
    plain += added
    return [
        block_hash if index < num_public_blocks else _private_hash(block_hash, chain)
        for index, block_hash in enumerate(added, start=first)
    ]


def _private_hash(block_hash: bytes, chain: bytes) -> bytes:
    return hashlib.sha256(block_hash + chain).digest()
