"""Agent sessions in the snapshots of the live page: their trees, running calls and pauses."""

import heapq
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from engine.protocol.generation import Generation
from service.rollouts.trees.segment import Segment
from service.sessions.session import RunningCall, Session

MAX_SESSIONS = 12
MAX_SEGMENTS = 256  # of one session, running calls included

TakeRows = Callable[[int], int]
Spans = Callable[[Iterator[tuple[str, int]]], list[dict[str, Any]]]


def session_snapshots(
    sessions: list[Session], engine: Generation, now: float, *, take_rows: TakeRows, spans: Spans
) -> list[dict[str, Any]]:
    """Live-page data of the sessions that were active last; those with running calls come first."""
    shown = heapq.nlargest(MAX_SESSIONS, sessions, key=lambda s: (bool(s.calls), _active_at(s)))
    return [_session(session, engine, now, take_rows, spans) for session in shown]


def _active_at(session: Session) -> float:
    """Time of the last beginning or end of a call."""
    return session.expires_at - session.options.ttl_seconds


def _session(
    session: Session, engine: Generation, now: float, take_rows: TakeRows, spans: Spans
) -> dict[str, Any]:
    tree = session.tree
    segments = list(islice(tree.segments(), take_rows(min(MAX_SEGMENTS, tree.num_segments))))
    shown = {segment.id for segment in segments}
    running = [path for call in session.calls for path in _running(call, engine, spans)]
    running = [path for path in running if path["parent"] in shown]
    running = running[: take_rows(min(MAX_SEGMENTS - len(segments), len(running)))]
    return {
        "id": session.id,
        "owner": session.owner,
        "group": session.group_id,
        "turns": len(session.turns),
        "max_turns": session.options.max_turns,
        "sampled_tokens": tree.num_sampled_tokens,
        "context_tokens": tree.num_context_tokens,
        "running_calls": len(session.calls),
        "pause_seconds": None if session.calls else max(0.0, now - _active_at(session)),
        "num_segments": tree.num_segments,
        "segments": [_segment(segment, spans) for segment in segments],
        "running": running,
    }


def _segment(segment: Segment, spans: Spans) -> dict[str, Any]:
    return {
        "id": segment.id,
        "parent": segment.parent_id,
        "tokens": len(segment.token_ids),
        "finish_reason": segment.finish if segment.sample else "context",
        "versions": spans((span.version, span.end - span.start) for span in segment.versions),
        "kv": False,
    }


def _running(call: RunningCall, engine: Generation, spans: Spans) -> Iterator[dict[str, Any]]:
    """Running samples of a call, each below the segment that its prompt ends with."""
    if call.rollout is None:
        return
    [group] = call.rollout.groups
    indices = list(group.running_indices())
    progress = engine.progress([group.sample_ids[index] for index in indices])
    for index, found in zip(indices, progress, strict=True):
        yield {
            "path": group.sample_ids[index],
            "parent": call.attachments[index].parent.id,
            "tokens": found[-1].end if found else 0,
            "limit": group.options.sampling.max_tokens,
            "versions": spans((span.version, span.end - span.start) for span in found),
        }
