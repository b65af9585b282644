"""Prefill requests of a spliced prompt and the KV load that they share with the samples."""

from collections.abc import Mapping, Sequence

from engine.kv_types import ExportSlot, KvLoad, LoadPiece
from service.kv_reuse.layout import TokenRun


def prefill_lengths(runs: Sequence[TokenRun]) -> list[int]:
    """Prompt lengths of the prefill requests: one per prefilled run with a spliced run after it.

    The last prefilled run is part of the group's samples.
    """
    return [run.end for run in runs[:-1] if run.span is None]


def build_load(
    runs: Sequence[TokenRun], segments: Mapping[int, ExportSlot], *, chain: str, num_requests: int
) -> KvLoad:
    """KV load of the spliced runs; `segments` are the cached spans by index."""
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
