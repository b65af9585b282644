"""In EngineCore: what of a prompt is loaded instead of computed.

A load is taken whole or not at all, and only from what was written under the weights that serve
now: names are remembered when their export is ordered, and forgotten with the weights. vLLM is told
how many tokens come from outside, allocates their blocks, and they are filled in the same step,
before the forward; a sample that is preempted loads again when it is resumed.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final

from engine.kv.form import CacheForm
from engine.kv.jobs import LoadJob
from engine.kv.place import Piece, carried_pieces

MOST_NAMES: Final = 2**16


class LoadPlanner:
    """Owns which exports can be loaded, and the loads of the step that is being scheduled. Called
    from EngineCore's loop only."""

    def __init__(self, form: CacheForm | None) -> None:
        self._form = form
        self._names: dict[str, None] = {}
        self._asked: dict[str, tuple[Piece, ...]] = {}
        self._jobs: list[LoadJob] = []

    @property
    def num_asked(self) -> int:
        return len(self._asked)

    def add(self, request: Any) -> None:
        pieces = carried_pieces(request.kv_transfer_params)
        if pieces and self._form is not None:
            self._asked[request.request_id] = pieces

    def forget(self, request_id: str) -> None:
        self._asked.pop(request_id, None)

    def written(self, name: str) -> None:
        """What was written or loaded longest ago is forgotten first, and computed again then."""
        self._names.pop(name, None)
        self._names[name] = None
        while len(self._names) > MOST_NAMES:
            del self._names[next(iter(self._names))]

    def start_epoch(self) -> None:
        self._names.clear()

    def claim(self, request: Any, num_computed: int) -> int:
        """How many tokens after those that are cached come from outside. Called as often as vLLM
        likes; at least one token has to be left to compute."""
        pieces = self._asked.get(request.request_id)
        if pieces is None or any(piece.source.name not in self._names for piece in pieces):
            return 0
        num_tokens = sum(piece.num_tokens for piece in pieces)
        if num_tokens >= request.num_tokens:
            return 0
        return max(0, num_tokens - num_computed)

    def allocated(self, request: Any, blocks: Any, num_external: int) -> None:
        """vLLM has taken the claim, and the step that it schedules has to fill the blocks."""
        if not num_external:
            return
        assert self._form is not None, "only supported caches are loaded"
        pieces = self._asked[request.request_id]
        for piece in pieces:
            assert piece.source.name is not None, "claimed by their names"
            self.written(piece.source.name)
        end = sum(piece.num_tokens for piece in pieces)
        size = self._form.block_size
        start = end - num_external
        assert start % size == 0, "vLLM caches whole blocks"
        ids = blocks.get_block_ids()[self._form.group][start // size : -(-end // size)]
        self._jobs.append(LoadJob(pieces=tuple(_after(pieces, start)), block_ids=tuple(ids)))

    def take(self) -> tuple[LoadJob, ...]:
        """The loads of the step; the next one begins."""
        jobs, self._jobs = tuple(self._jobs), []
        return jobs


def _after(pieces: Iterable[Piece], start: int) -> Iterator[Piece]:
    """What of them fills the tokens from `start` on."""
    at = 0
    for piece in pieces:
        end = at + piece.num_tokens
        if end > start:
            yield piece.part(max(start - at, 0), piece.num_tokens)
        at = end
