"""Plan of a prompt whose spans are spliced from the cache.

Spans that are not cached are prefilled alone. Then the samples are submitted together with one
request of one token for every other run of prefilled tokens. These requests form a chain and differ
only in their length: each finds the blocks of the previous ones in the prefix cache, and the engine
loads the spliced KV in between. The KV before the first spliced token is exact and is cached like
that of any prompt. If the spans cannot be provided, the plan fails with a reason and the prompt is
prefilled.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from coppice.wire.reuse import ReuseReason
from engine.kv_types import ExportSlot, KvLoad
from engine.protocol import Engine
from engine.types import Completion, SampleRequest
from service.kv_reuse.layout import PromptSpan, joined, token_runs
from service.kv_reuse.lease import SegmentLease
from service.kv_reuse.monitor import GroupMonitor, ReuseFailed
from service.kv_reuse.splice_load import build_load, prefill_lengths


@dataclass(slots=True, kw_only=True, eq=False)
class SplicePlan:
    """PromptPlan of a group with `num_samples` samples that splices spans."""

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
        """KV that the prefill requests and the samples load."""
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
            self._any_spliced = True  # more than earlier requests left in the cache: it has loaded
        self._num_prefilled = len(request.prompt_token_ids)

    def is_approximate(self, num_cached: int) -> bool:
        """True if a sample with `num_cached` cached tokens has used spliced KV.

        Blocks of the prefill requests may have been evicted before it started: then it has loaded
        the KV itself or prefilled.
        """
        behind_first = num_cached > len(self.prefill_requests[0].prompt_token_ids)
        return behind_first and (self._any_spliced or num_cached > self._num_prefilled)

    def is_loaded(self, num_cached: int) -> bool:
        return self.is_approximate(num_cached)

    def forget(self) -> None:
        self.lease.forget()

    def release(self, *, settled: bool) -> None:
        self.lease.release(settled=settled)
