"""One group's chain: segments computed alone where they are not kept, then, together with the
group's samples, a request of one token for every place where tokens are computed.

The links differ in where they end only: the engine lets each find what those before it left, and
loads what is placed in between. What lies in front of the first placed token is exact, and found
and left as any prompt's. Whatever keeps the segments from being there ends the chain, with a
reason, and the prompt is computed whole.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from coppice.wire.reuse import ReuseReason
from engine.kv_types import ExportSlot, KvLoad
from engine.protocol import Completion, Engine, SampleRequest
from service.kv_reuse.layout import PromptSpan, joined, token_runs
from service.kv_reuse.lease import SegmentLease
from service.kv_reuse.monitor import GroupMonitor, ReuseFailed
from service.kv_reuse.splice_load import build_load, prefill_lengths


@dataclass(slots=True, kw_only=True, eq=False)
class SplicePlan:
    """A Preparation for `num_samples` samples."""

    lease: SegmentLease
    spans: Sequence[PromptSpan]
    first_tokens: int
    num_samples: int
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    prefill_requests: list[SampleRequest] = field(default_factory=list)
    export: ExportSlot | None = None
    reason: ReuseReason | None = None
    num_anchors: int = 0
    num_computed: int = 0
    _any_spliced: bool = False
    _num_prefilled: int = 0

    async def prepare(self, engine: Engine, monitor: GroupMonitor) -> KvLoad:
        """What its links and the samples are to load."""
        if self.lease.store.reason is not None:
            raise ReuseFailed(self.lease.store.reason)
        runs = token_runs(self.spans, first_tokens=self.first_tokens, block=engine.info.block_size)
        ends = prefill_lengths(runs)
        if not ends:
            raise ReuseFailed("nothing_placed")
        if monitor.ends:
            raise ReuseFailed("not_written")
        spliced = {run.span for run in runs if run.span is not None}
        segments = self.lease.acquire({index: self.spans[index] for index in spliced})
        await self.lease.write(engine, monitor)
        sources = {span: cached.slot for span, cached in segments.items()}
        num_requests = len(ends) + self.num_samples
        load = build_load(runs, sources, chain=self.name, num_requests=num_requests)
        prompt = joined(self.spans)
        self.prefill_requests = [self.lease.request(prompt[:end], load=load) for end in ends]
        return load

    async def on_completed(self, request: SampleRequest, done: Completion) -> None:
        if done.finish not in ("stop", "length"):
            return
        self.num_computed += len(request.prompt_token_ids) - done.num_cached_tokens
        if request is not self.prefill_requests[0] and done.num_cached_tokens > self._num_prefilled:
            self._any_spliced = True  # more than those before it left: it has loaded
        self._num_prefilled = len(request.prompt_token_ids)

    def is_approximate(self, num_cached: int) -> bool:
        """What links left may have been evicted before it came: then it has loaded for itself, or
        computed."""
        behind_first = num_cached > len(self.prefill_requests[0].prompt_token_ids)
        return behind_first and (self._any_spliced or num_cached > self._num_prefilled)

    def is_loaded(self, num_cached: int) -> bool:
        return self.is_approximate(num_cached)

    def forget(self) -> None:
        self.lease.forget()

    def release(self, *, settled: bool) -> None:
        self.lease.release(settled=settled)
