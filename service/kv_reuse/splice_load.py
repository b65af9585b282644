"""The links of a chain: where each ends, and what all of them load."""

from collections.abc import Mapping, Sequence

from engine.kv_types import ExportSlot, KvLoad, LoadPiece
from service.kv_reuse.layout import TokenRun


def prefill_lengths(runs: Sequence[TokenRun]) -> list[int]:
    """Of every link but the last, which is the sampled group: one for each run of computed tokens
    that others are placed behind."""
    return [run.end for run in runs[:-1] if run.span is None]


def build_load(
    runs: Sequence[TokenRun], segments: Mapping[int, ExportSlot], *, chain: str, num_requests: int
) -> KvLoad:
    """From the kept segments, by their part."""
    pieces = tuple(
        LoadPiece(
            source=segments[run.span],
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
