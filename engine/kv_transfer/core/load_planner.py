"""In EngineCore: what of a prompt is loaded instead of computed.

Pieces are loaded where everything before them is cached, and only from what was written under the
weights that serve now: names are remembered when their export is ordered, and forgotten with the
weights. vLLM is told how many tokens come from outside, allocates their blocks, and they are filled
in the same step, before the forward. What is not claimed is computed, and right.

The requests of a chain share a step: what one computes lies in the blocks that the next one finds,
and every layer writes its keys and values before it attends. So none is scheduled before all have
come, which takes as long as the way from the service does; a request whose chain is not whole by
then goes on, and computes what it does not find.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from engine.kv_transfer.cache_spec import CacheLayout
from engine.kv_transfer.core.private_block_hash import privatize_blocks
from engine.kv_transfer.jobs import LoadJob
from engine.kv_transfer.params import KvLoadParams, LoadPieceParams

MAX_NAMES: Final = 2**16
MAX_WAIT_SECONDS: Final = 0.05


@dataclass(slots=True)
class PendingLoad:
    """A request that loads; its first `num_public_blocks` blocks are everybody's."""

    request: Any
    pieces: KvLoadParams
    num_public_blocks: int


@dataclass(slots=True)
class IncompleteChain:
    """A chain that is not whole yet: who came first, how many are to come, and until when."""

    first: str
    missing: int
    until: float


class LoadPlanner:
    """Owns which exports can be loaded, and the loads of the step that is being scheduled. Called
    from EngineCore's loop only."""

    def __init__(
        self, layout: CacheLayout | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._layout = layout
        self._clock = clock
        self._names: dict[str, None] = {}
        self._pending: dict[str, PendingLoad] = {}
        self._incomplete: dict[str, IncompleteChain] = {}
        self._matched: dict[str, tuple[LoadPieceParams, ...]] = {}
        self._jobs: list[LoadJob] = []

    @property
    def num_pending(self) -> int:
        return len(self._pending) + len(self._incomplete) + len(self._matched)

    def add(self, request: Any) -> None:
        """Nothing is ever loaded for a request whose blocks others would find."""
        asked = KvLoadParams.from_params(request.kv_transfer_params)
        if asked is None or self._layout is None:
            return
        num_public_blocks = asked.exact_tokens // self._layout.block_size
        privatize_blocks(request, num_public_blocks, asked.chain)
        self._pending[request.request_id] = PendingLoad(request, asked, num_public_blocks)
        chain = self._incomplete.get(asked.chain)
        if chain is None:
            until = self._clock() + MAX_WAIT_SECONDS
            chain = IncompleteChain(request.request_id, asked.num_requests, until)
            self._incomplete[asked.chain] = chain
        chain.missing -= 1
        if not chain.missing:
            del self._incomplete[asked.chain]

    def forget(self, request_id: str) -> None:
        self._matched.pop(request_id, None)
        asked = self._pending.pop(request_id, None)
        if asked is not None:
            self._incomplete.pop(asked.pieces.chain, None)

    def on_exported(self, name: str) -> None:
        """What was written or loaded longest ago is forgotten first, and computed again then."""
        self._names.pop(name, None)
        self._names[name] = None
        while len(self._names) > MAX_NAMES:
            del self._names[next(iter(self._names))]

    def start_epoch(self) -> None:
        self._names.clear()

    def match(self, request: Any, num_computed: int) -> int | None:
        """How many tokens after those that are cached come from outside; None: not to be scheduled
        yet. Called as often as vLLM likes; at least one token has to be left to compute."""
        self._matched.pop(request.request_id, None)
        asked = self._pending.get(request.request_id)
        if asked is None:
            return 0
        pieces = asked.pieces
        if self._must_wait(request.request_id, pieces.chain):
            return None
        matched = tuple(self._loadable(pieces.pieces, num_computed, request.num_tokens))
        if not matched:
            return 0
        self._privatize_chain(pieces.chain, num_computed)
        self._matched[request.request_id] = matched
        return matched[-1].end - num_computed

    def on_allocated(self, request: Any, blocks: Any, num_external: int) -> None:
        """vLLM has taken the claim, and the step that it schedules has to fill the blocks."""
        if not num_external:
            return
        assert self._layout is not None, "only supported caches are loaded"
        matched = self._matched.pop(request.request_id)
        assert matched[-1].end - matched[0].start == num_external, "claimed as a whole"
        self._jobs.append(self._job(matched, blocks.get_block_ids()[self._layout.group]))

    def take_jobs(self) -> tuple[LoadJob, ...]:
        """The loads of the step; the next one begins."""
        jobs, self._jobs = tuple(self._jobs), []
        return jobs

    def _must_wait(self, request_id: str, chain: str) -> bool:
        """Time is up for all of them in one step, from the first on: none overtakes those that it
        stands on."""
        incomplete = self._incomplete.get(chain)
        if incomplete is None:
            return False
        if incomplete.first != request_id or self._clock() < incomplete.until:
            return True
        del self._incomplete[chain]
        return False

    def _privatize_chain(self, chain: str, num_computed: int) -> None:
        """What is loaded is the chain's own, also where it is exact: of all that do not run, so
        that one finds what another has loaded."""
        assert self._layout is not None, "only supported caches are loaded"
        num_public_blocks = num_computed // self._layout.block_size
        for asked in self._pending.values():
            waits = asked.pieces.chain == chain and not asked.request.num_computed_tokens
            if waits and asked.num_public_blocks > num_public_blocks:
                privatize_blocks(asked.request, num_public_blocks, chain)
                asked.num_public_blocks = num_public_blocks

    def _loadable(
        self, pieces: Sequence[LoadPieceParams], position: int, num_tokens: int
    ) -> Iterator[LoadPieceParams]:
        """Those that follow one another from there on, if a block begins there."""
        assert self._layout is not None, "only supported caches are loaded"
        if position % self._layout.block_size:
            return
        for piece in pieces:
            if not piece.start <= position < piece.end:
                continue
            known = all(name in self._names for name in piece.names)
            if not known or piece.end >= num_tokens:
                return
            yield piece.suffix_from(position)
            position = piece.end

    def _job(self, pieces: tuple[LoadPieceParams, ...], block_ids: Sequence[int]) -> LoadJob:
        assert self._layout is not None, "it was claimed"
        for name in (name for piece in pieces for name in piece.names if name is not None):
            self.on_exported(name)
        size = self._layout.block_size
        blocks = slice(pieces[0].start // size, -(-pieces[-1].end // size))
        return LoadJob(pieces=pieces, block_ids=tuple(block_ids[blocks]))
