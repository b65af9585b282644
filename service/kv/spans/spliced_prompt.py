"""KV reuse by splicing: cached KV of spans is loaded at the spans' positions in a new prompt.

Spans that are not cached are prefilled alone first. vLLM prefills only the tail of a prompt, so
every other run of prefilled tokens is the tail of a separate engine request, which samples one
token. These requests form a chain that ends with the group's samples, and all are submitted
together. Each request finds the KV of the previous one in whole cache blocks, so a spliced run
starts at a block boundary, and the engine loads the spliced KV in between. The KV before the first
spliced token is exact and is cached like that of any prompt. If the spans cannot be provided, the
prompt is prefilled.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from coppice.wire.kv_reuse import KvReuseMode
from coppice.wire.rollouts import PromptSpan
from engine.protocol.generation import Generation
from engine.types.kv import ExportSlot, KvLoad, LoadPiece
from engine.types.samples import Completion, SampleRequest
from service.kv.prompt_source import GroupMonitor
from service.kv.spans.pinned_spans import ReuseFailed
from service.kv.spans.prompt_template import joined
from service.kv.spans.span_prompt import SpanPrompt

DEFAULT_RECOMPUTE_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRun:
    """Run of tokens [start, end) of a prompt that is either prefilled or spliced from a span.

    `span` is the index of the span whose cached KV is spliced in, and `origin` that span's position
    in the prompt. Without `span` the tokens are prefilled.
    """

    start: int
    end: int
    span: int | None = None
    origin: int = 0

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


def token_runs(spans: Sequence[PromptSpan], *, recompute_tokens: int, block: int) -> list[TokenRun]:
    """Divide a prompt into prefilled and spliced token runs; the last one is prefilled.

    The last run has at least one token. The first `recompute_tokens` tokens of a keyed span, and
    the tokens up to the next block boundary, are prefilled. The span is prefilled completely if
    less than one block would be spliced, or if the prompt starts with the span, which is then an
    ordinary and exact prefix.
    """
    spliced = [
        run
        for run in _spliced_runs(spans, recompute_tokens=recompute_tokens, block=block)
        if run.num_tokens >= block
    ]
    runs: list[TokenRun] = []
    at = 0
    for run in spliced:
        if run.start > at:
            runs.append(TokenRun(start=at, end=run.start))
        runs.append(run)
        at = run.end
    return [*runs, TokenRun(start=at, end=sum(len(span.token_ids) for span in spans))]


def _spliced_runs(
    spans: Sequence[PromptSpan], *, recompute_tokens: int, block: int
) -> list[TokenRun]:
    length = sum(len(span.token_ids) for span in spans)
    found, origin = [], 0
    for index, span in enumerate(spans):
        end = min(origin + len(span.token_ids), length - 1)
        start = -(-(origin + recompute_tokens) // block) * block
        if span.cache_key is not None and origin and start < end:
            found.append(TokenRun(start=start, end=end, span=index, origin=origin))
        origin += len(span.token_ids)
    return found


def prefill_lengths(runs: Sequence[TokenRun]) -> list[int]:
    """Prompt lengths of the requests that prefill a prompt up to each spliced token run.

    The last prefilled run is part of the group's samples.
    """
    return [run.end for run in runs[:-1] if run.span is None]


def build_load(
    runs: Sequence[TokenRun], slots: Mapping[int, ExportSlot], *, chain: str, num_requests: int
) -> KvLoad:
    """KvLoad of the spliced token runs; `slots` holds the cached KV of each span, by index."""
    pieces = tuple(
        LoadPiece(
            source=slots[run.span],
            token_offset=run.start - run.origin,
            num_tokens=run.num_tokens,
            start=run.start,
            shift=run.origin,
        )
        for run in runs
        if run.span is not None
    )
    exact = min((piece.start for piece in pieces), default=0)
    return KvLoad(chain=chain, num_requests=num_requests, exact_tokens=exact, pieces=pieces)


@dataclass(kw_only=True, eq=False)
class SplicedPrompt(SpanPrompt):
    """Prompt into which spans are spliced from the store."""

    mode: ClassVar[KvReuseMode] = "splice"
    recompute_tokens: int
    _any_spliced: bool = False
    _num_prefilled: int = 0

    async def _load(self, engine: Generation, monitor: GroupMonitor) -> KvLoad:
        """Have missing spans written; returns the KV that prefill requests and samples load."""
        runs = token_runs(
            self.spans, recompute_tokens=self.recompute_tokens, block=engine.info.block_size
        )
        ends = prefill_lengths(runs)
        if not ends:
            raise ReuseFailed("nothing_to_reuse")
        if monitor.ends:
            raise ReuseFailed("not_written")
        spliced = {run.span for run in runs if run.span is not None}
        entries = self.pinned.acquire({index: self.spans[index] for index in spliced})
        await self.pinned.write(engine, monitor)
        slots = {span: entry.slot for span, entry in entries.items()}
        num_requests = len(ends) + self.num_samples
        load = build_load(runs, slots, chain=uuid.uuid4().hex, num_requests=num_requests)
        prompt = joined(self.spans)
        self.prefills = [self.pinned.request(prompt[:end], load=load) for end in ends]
        return load

    async def on_completed(self, request: SampleRequest, done: Completion) -> None:
        if done.finish not in ("stop", "length"):
            return
        self.num_computed += len(request.prompt_token_ids) - done.num_cached_tokens
        if request is not self.prefills[0] and done.num_cached_tokens > self._num_prefilled:
            self._any_spliced = True  # more than earlier requests left in the cache: it has loaded
        self._num_prefilled = len(request.prompt_token_ids)

    def is_approximate(self, num_cached: int) -> bool:
        """True if a sample with `num_cached` cached tokens has used spliced KV.

        Blocks of the prefill requests may have been evicted before the sample started. The sample
        has then loaded the spliced KV itself, or prefilled.
        """
        behind_first = num_cached > len(self.prefills[0].prompt_token_ids)
        return behind_first and (self._any_spliced or num_cached > self._num_prefilled)
