"""In EngineCore: which prompts are complete after a step, and whether one version computed them.

A prompt is exported in the step that computes the last of its tokens asked for, so no block has to
outlive its request. It belongs to one epoch, the time between two activations, or it is mixed: a
request begins anew whenever it is scheduled for the first time or again after a preemption, and
finds no block of an earlier epoch then.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from engine.kv_transfer.cache_spec import CacheForm
from engine.kv_transfer.jobs import ExportJob
from engine.kv_transfer.params import Place
from engine.kv_types import ExportWord


@dataclass(slots=True)
class Tracked:
    place: Place
    epoch: int | None = None


class ExportPlanner:
    """Owns what is still to be exported. Called from EngineCore's loop only.

    `written` hears the name of whatever one version has computed, if it has one.
    """

    def __init__(self, form: CacheForm | None, *, written: Callable[[str], None]) -> None:
        self._form = form
        self._written = written
        self._epoch = 0
        self._tracked: dict[str, Tracked] = {}

    @property
    def num_tracked(self) -> int:
        return len(self._tracked)

    def add(self, request: Any) -> None:
        place = Place.carried(request.kv_transfer_params)
        if place is not None and self._form is not None:
            self._tracked[request.request_id] = Tracked(place)

    def forget(self, request_id: str) -> None:
        """It has ended: a word that is not written by now never will be."""
        self._tracked.pop(request_id, None)

    def start_epoch(self) -> None:
        self._epoch += 1

    def plan(self, output: Any) -> tuple[ExportJob, ...]:
        """The jobs of the step that `output` describes."""
        return tuple(self._jobs(output)) if self._tracked else ()

    def _jobs(self, output: Any) -> Iterator[ExportJob]:
        for request_id, num_computed, begins in _scheduled(output):
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            if begins:
                tracked.epoch = self._epoch
            after = num_computed + output.num_scheduled_tokens[request_id]
            if after >= tracked.place.num_tokens:
                del self._tracked[request_id]
                yield self._job(tracked, output.kv_connector_block_state.get_block_ids(request_id))

    def _job(self, tracked: Tracked, block_ids: Any) -> ExportJob:
        assert self._form is not None, "only supported caches are tracked"
        place = tracked.place
        num_blocks = -(-place.num_tokens // self._form.block_size)
        mixed = tracked.epoch != self._epoch
        if place.name is not None and not mixed:
            self._written(place.name)
        return ExportJob(
            place=place,
            block_ids=tuple(block_ids[self._form.group][:num_blocks]),
            word=ExportWord.MIXED_VERSION if mixed else ExportWord.COMMITTED,
        )


def _scheduled(output: Any) -> Iterator[tuple[str, int, bool]]:
    """Request, tokens computed before this step, and whether it begins now (anew)."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens, True
    cached = output.scheduled_cached_reqs
    for request_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield request_id, num_computed, request_id in cached.resumed_req_ids
