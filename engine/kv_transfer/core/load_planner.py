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

from engine.kv_transfer.cache_spec import CacheForm
from engine.kv_transfer.core.private_block_hash import part_ways
from engine.kv_transfer.jobs import LoadJob
from engine.kv_transfer.params import Piece, Pieces

MOST_NAMES: Final = 2**16
LONGEST_WAIT_SECONDS: Final = 0.05


@dataclass(slots=True)
class Asking:
    """A request that loads; its first `num_shared` blocks are everybody's."""

    request: Any
    pieces: Pieces
    num_shared: int


@dataclass(slots=True)
class Gathering:
    """A chain that is not whole yet: who came first, how many are to come, and until when."""

    first: str
    missing: int
    until: float


class LoadPlanner:
    """Owns which exports can be loaded, and the loads of the step that is being scheduled. Called
    from EngineCore's loop only."""

    def __init__(
        self, form: CacheForm | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._form = form
        self._clock = clock
        self._names: dict[str, None] = {}
        self._asked: dict[str, Asking] = {}
        self._gathering: dict[str, Gathering] = {}
        self._claimed: dict[str, tuple[Piece, ...]] = {}
        self._jobs: list[LoadJob] = []

    @property
    def num_asked(self) -> int:
        return len(self._asked) + len(self._gathering) + len(self._claimed)

    def add(self, request: Any) -> None:
        """Nothing is ever loaded for a request whose blocks others would find."""
        asked = Pieces.carried(request.kv_transfer_params)
        if asked is None or self._form is None:
            return
        num_shared = asked.exact_tokens // self._form.block_size
        part_ways(request, num_shared, asked.chain)
        self._asked[request.request_id] = Asking(request, asked, num_shared)
        chain = self._gathering.get(asked.chain)
        if chain is None:
            until = self._clock() + LONGEST_WAIT_SECONDS
            chain = Gathering(request.request_id, asked.num_requests, until)
            self._gathering[asked.chain] = chain
        chain.missing -= 1
        if not chain.missing:
            del self._gathering[asked.chain]

    def forget(self, request_id: str) -> None:
        self._claimed.pop(request_id, None)
        asked = self._asked.pop(request_id, None)
        if asked is not None:
            self._gathering.pop(asked.pieces.chain, None)

    def written(self, name: str) -> None:
        """What was written or loaded longest ago is forgotten first, and computed again then."""
        self._names.pop(name, None)
        self._names[name] = None
        while len(self._names) > MOST_NAMES:
            del self._names[next(iter(self._names))]

    def start_epoch(self) -> None:
        self._names.clear()

    def claim(self, request: Any, num_computed: int) -> int | None:
        """How many tokens after those that are cached come from outside; None: not to be scheduled
        yet. Called as often as vLLM likes; at least one token has to be left to compute."""
        self._claimed.pop(request.request_id, None)
        asked = self._asked.get(request.request_id)
        if asked is None:
            return 0
        pieces = asked.pieces
        if self._waits(request.request_id, pieces.chain):
            return None
        claimed = tuple(self._loadable(pieces.pieces, num_computed, request.num_tokens))
        if not claimed:
            return 0
        self._part_ways(pieces.chain, num_computed)
        self._claimed[request.request_id] = claimed
        return claimed[-1].end - num_computed

    def allocated(self, request: Any, blocks: Any, num_external: int) -> None:
        """vLLM has taken the claim, and the step that it schedules has to fill the blocks."""
        if not num_external:
            return
        assert self._form is not None, "only supported caches are loaded"
        claimed = self._claimed.pop(request.request_id)
        assert claimed[-1].end - claimed[0].start == num_external, "claimed as a whole"
        self._jobs.append(self._job(claimed, blocks.get_block_ids()[self._form.group]))

    def take(self) -> tuple[LoadJob, ...]:
        """The loads of the step; the next one begins."""
        jobs, self._jobs = tuple(self._jobs), []
        return jobs

    def _waits(self, request_id: str, chain: str) -> bool:
        """Time is up for all of them in one step, from the first on: none overtakes those that it
        stands on."""
        gathering = self._gathering.get(chain)
        if gathering is None:
            return False
        if gathering.first != request_id or self._clock() < gathering.until:
            return True
        del self._gathering[chain]
        return False

    def _part_ways(self, chain: str, num_computed: int) -> None:
        """What is loaded is the chain's own, also where it is exact: of all that do not run, so
        that one finds what another has loaded."""
        assert self._form is not None, "only supported caches are loaded"
        num_shared = num_computed // self._form.block_size
        for asked in self._asked.values():
            waits = asked.pieces.chain == chain and not asked.request.num_computed_tokens
            if waits and asked.num_shared > num_shared:
                part_ways(asked.request, num_shared, chain)
                asked.num_shared = num_shared

    def _loadable(self, pieces: Sequence[Piece], position: int, num_tokens: int) -> Iterator[Piece]:
        """Those that follow one another from there on, if a block begins there."""
        assert self._form is not None, "only supported caches are loaded"
        if position % self._form.block_size:
            return
        for piece in pieces:
            if not piece.start <= position < piece.end:
                continue
            known = all(name in self._names for name in piece.names)
            if not known or piece.end >= num_tokens:
                return
            yield piece.behind(position)
            position = piece.end

    def _job(self, pieces: tuple[Piece, ...], block_ids: Sequence[int]) -> LoadJob:
        assert self._form is not None, "it was claimed"
        for name in (name for piece in pieces for name in piece.names if name is not None):
            self.written(name)
        size = self._form.block_size
        blocks = slice(pieces[0].start // size, -(-pieces[-1].end // size))
        return LoadJob(pieces=pieces, block_ids=tuple(block_ids[blocks]))
