"""Agent sessions in the snapshot for the live page: trees, running calls and pauses."""

import heapq
from collections.abc import Iterator
from typing import Any

from engine.protocol.generation import Generation
from service.sessions.session import RunningCall, Session
from service.status.tree_snapshot import RunningPath, TakeRows, tree_snapshot

MAX_SESSIONS = 12


def session_snapshots(
    sessions: list[Session], engine: Generation, now: float, take_rows: TakeRows
) -> list[dict[str, Any]]:
    """Live-page data of the sessions that were active last; those with running calls come first."""
    shown = heapq.nlargest(MAX_SESSIONS, sessions, key=lambda s: (bool(s.calls), _active_at(s)))
    return [_session(session, engine, now, take_rows) for session in shown]


def _active_at(session: Session) -> float:
    """Time of the last beginning or end of a call."""
    return session.expires_at - session.options.ttl_seconds


def _session(
    session: Session, engine: Generation, now: float, take_rows: TakeRows
) -> dict[str, Any]:
    tree = session.tree
    running = [path for call in session.calls for path in _running(call)]
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
        **tree_snapshot(engine, tree.segments(), tree.num_segments, running, take_rows),
    }


def _running(call: RunningCall) -> Iterator[RunningPath]:
    """Running samples of a call, each below the segment that its prompt ends with."""
    if call.rollout is None:
        return
    [group] = call.rollout.groups
    for index in group.running_indices():
        sample_id, parent = group.sample_ids[index], call.attachments[index].parent.id
        yield RunningPath(sample_id, sample_id, parent, group.options.sampling.max_tokens)
