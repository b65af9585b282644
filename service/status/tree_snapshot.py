"""Token trees in the snapshot for the live page: segments and running paths."""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, NamedTuple

from engine.protocol.generation import Generation
from service.rollouts.trees.segment import Segment

MAX_SEGMENTS = 256  # of one tree, running paths included
MAX_SPANS = 16  # of one sample or segment
TakeRows = Callable[[int], int]


class RunningPath(NamedTuple):
    """An engine request that continues a segment, or the prompt, by at most `limit` tokens."""

    request_id: str
    name: str
    parent: str | None
    limit: int


def tree_snapshot(
    engine: Generation,
    segments: Iterable[Segment],
    num_segments: int,
    running: Iterable[RunningPath],
    take_rows: TakeRows,
    has_kv: Callable[[Segment], bool] = lambda segment: False,
) -> dict[str, Any]:
    """Live-page data of a tree; `segments` are in an order in which parents precede children."""
    shown = list(islice(segments, take_rows(min(MAX_SEGMENTS, num_segments))))
    known = {segment.id for segment in shown} | {None}
    listed = [path for path in running if path.parent in known]
    listed = listed[: take_rows(min(MAX_SEGMENTS - len(shown), len(listed)))]
    progress = engine.progress([path.request_id for path in listed])
    return {
        "num_segments": num_segments,
        "segments": [
            {
                "id": segment.id,
                "parent": segment.parent_id,
                "tokens": len(segment.token_ids),
                "finish_reason": segment.finish if segment.sample else "context",
                "versions": spans_of((s.version, s.end - s.start) for s in segment.versions),
                "kv": has_kv(segment),
            }
            for segment in shown
        ],
        "running": [
            {
                "path": path.name,
                "parent": path.parent,
                "tokens": spans[-1].end if spans else 0,
                "limit": path.limit,
                "versions": spans_of((s.version, s.end - s.start) for s in spans),
            }
            for path, spans in zip(listed, progress, strict=True)
        ],
    }


def spans_of(spans: Iterable[tuple[str, int]]) -> list[dict[str, Any]]:
    """The first spans; the tokens of those beyond `MAX_SPANS` are one span without a version."""
    whole = list(spans)
    shown = [{"version": version, "tokens": tokens} for version, tokens in whole[:MAX_SPANS]]
    rest = sum(tokens for _, tokens in whole[MAX_SPANS:])
    return [*shown, {"version": None, "tokens": rest}] if rest else list[dict[str, Any]](shown)
