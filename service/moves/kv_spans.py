"""Spans of moved samples whose KV is fetched: their validation, their copies and their loads."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from coppice.wire.moves import MovedGroup, MovedGroupKv, MovedSpan
from engine.kv_types import KvLoad, LoadPiece
from service.kv_reuse.span_cache import CacheEntry


@dataclass(frozen=True, slots=True)
class SpanCopy:
    """Span of a moved sample with this prompt and these tokens, and its copy on this replica."""

    span: MovedSpan
    prompt: list[int]
    tokens: list[int]
    entry: CacheEntry

    @property
    def token_ids(self) -> list[int]:
        """Tokens up to the end of the span."""
        return [*self.prompt, *self.tokens][: self.span.start + self.span.num_tokens]

    @property
    def piece(self) -> LoadPiece:
        return LoadPiece(
            source=self.entry.slot,
            token_offset=0,
            num_tokens=self.span.num_tokens,
            start=self.span.start,
            shift=0,
        )


def is_valid(moved: MovedGroup, kv: MovedGroupKv, block_size: int) -> bool:
    """True if a group's spans start at blocks, follow each other and leave a token to compute.

    Each has a handle of its own, as its file is compared with the tokens of one sample only.
    """
    prompt_end = 0 if kv.prompt is None else kv.prompt.num_tokens
    num_prompt = len(moved.prompt_token_ids)
    handles = [span.handle for span in (kv.prompt, *kv.samples) if span is not None]
    if len(set(handles)) < len(handles):
        return False
    if len(kv.samples) != len(moved.samples) or prompt_end > num_prompt or prompt_end % block_size:
        return False
    if kv.prompt is not None and (kv.prompt.start or not kv.prompt.num_tokens):
        return False
    return all(
        span.start == prompt_end
        and 0 < span.num_tokens < num_prompt + len(sample.token_ids) - span.start
        for span, sample in zip(kv.samples, moved.samples, strict=True)
        if span is not None
    )


def loads_of(
    moved: MovedGroup, kv: MovedGroupKv, copies: Mapping[str, SpanCopy]
) -> dict[int, KvLoad]:
    """KV that each sample of a group loads; they share that of the prompt.

    All its blocks are private to their chain, so that one request finds them all if the samples are
    moved again.
    """
    spans = [[span for span in (kv.prompt, own) if span is not None] for own in kv.samples]
    chain, number = uuid.uuid4().hex, sum(map(bool, spans))
    return {
        sample.index: KvLoad(
            chain=chain,
            num_requests=number,
            exact_tokens=0,
            pieces=tuple(copies[span.handle].piece for span in own),
        )
        for sample, own in zip(moved.samples, spans, strict=True)
        if own
    }
