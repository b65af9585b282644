"""State of a session and its group, as it is sent to another replica and restored there."""

from collections.abc import Iterator

import numpy as np

from coppice.wire.columns.token_columns import TABLES, column_bytes
from coppice.wire.moves import FORMAT, MovedKey
from coppice.wire.session_moves import (
    MovedResponse,
    MovedSegment,
    MovedSession,
    MovedSessionGroup,
    MovedSessions,
)
from service.errors import InvalidRequest
from service.moves.state import TOKEN_BYTES
from service.moves.token_tables import check_ids, invalid, sampled_tokens
from service.rollouts.trees.segment import Segment
from service.rollouts.trees.token_tree import TokenTree
from service.rollouts.trees.tree_answer import segment_answer
from service.sessions.history import RecordedCall, RecordedResponse
from service.sessions.session import CONTEXT_TOKEN_BYTES, TURN_BYTES, Session
from service.sessions.session_group import SessionGroup

RESOURCE = "sessions"
"""Resource of the idempotency keys of groups."""
WHERE = "sessions"
"""Field of the request that errors name."""
TABLE_FACTOR = 4
"""Characters of a number in JSON per byte of it in a table of logprobs."""


def moved_group(
    group: SessionGroup, session_ids: list[str], last_sequence: int, now: float
) -> MovedSessionGroup:
    """State of a group for a request with some of its sessions."""
    claim = group.claim
    return MovedSessionGroup.model_construct(
        id=group.id,
        key=None
        if claim is None
        else MovedKey(
            key=claim.key.removeprefix(f"{RESOURCE}\n"), fingerprint=claim.fingerprint.hex()
        ),
        options=group.options,
        session_ids=session_ids,
        keys=[],
        remaining_ids=[],
        seconds_left=None if group.deadline is None else max(0.0, group.deadline - now),
        num_finished=group.num_finished,
        last_sequence=last_sequence,
    )


def encoded(
    source: str,
    owner: str,
    group: MovedSessionGroup,
    sessions: list[Session],
    now: float,
) -> bytes:
    """Body of the request; it may be large and is built in a thread."""
    moved = [_moved_session(session, now) for session in sessions]
    state = MovedSessions.model_construct(
        format=FORMAT, source=source, owner=owner, group=group, sessions=moved
    )
    return state.model_dump_json().encode()


def estimated_bytes(session: Session) -> int:
    """Estimated size of a session's state as JSON, in bytes."""
    tree = session.tree
    return (
        TOKEN_BYTES * tree.num_sampled_tokens
        + CONTEXT_TOKEN_BYTES * tree.num_context_tokens
        + TURN_BYTES * len(session.turns)
        + TABLE_FACTOR * session.num_table_bytes
    )


def _moved_session(session: Session, now: float) -> MovedSession:
    """Constructed without validation, which takes long for many tokens."""
    return MovedSession.model_construct(
        id=session.id,
        state=session.state,
        end_reason=session.end_reason,
        sequence=session.sequence,
        seconds_left=max(0.0, session.expires_at - now),
        outcome=session.outcome,
        num_segment_ids=session.tree.num_ids,
        segments=[_moved_segment(each) for each in session.tree.segments()],
        turns=session.turns,
        versions=list(session.versions),
        responses=[_moved_response(each) for each in session.conversations.responses()],
    )


def _moved_segment(segment: Segment) -> MovedSegment:
    return MovedSegment.model_construct(
        segment=segment_answer(segment),
        num_prompts=segment.num_prompts,
        num_cached_tokens=segment.num_cached_tokens,
    )


def _moved_response(response: RecordedResponse) -> MovedResponse:
    call, ids = response.call, response.tool_call_ids
    return MovedResponse.model_construct(
        digest=response.digest.hex(),
        tool_call_ids=None if ids is None else list(ids),
        num_chars=response.num_chars,
        segment=call.segment.id,
        reasoning=call.reasoning,
        num_hidden_tokens=call.num_hidden,
        rest=call.rest,
    )


def restore(session: Session, moved: MovedSession, *, vocab_size: int) -> None:
    """Give a new session the state of a moved one; raises InvalidRequest if it is inconsistent.

    It may take long and is called in a thread.
    """
    prefix = session.tree.prefix
    found = {segment.id: segment for segment in _segments(moved, prefix, vocab_size)}
    session.tree = TokenTree.restored(prefix, found.values(), num_ids=moved.num_segment_ids)
    for response in moved.responses:
        session.conversations.restore(_response(response, found))
    if any(turn.segment not in found for turn in moved.turns):
        raise _invalid("turns", "of segments that the session does not have")
    session.turns = list(moved.turns)
    session.versions = dict.fromkeys(moved.versions)
    session.state, session.end_reason = moved.state, moved.end_reason
    session.sequence, session.outcome = moved.sequence, moved.outcome
    session.num_table_bytes = sum(column_bytes(each.segment, TABLES) for each in moved.segments)
    if (session.end_reason is None) != session.is_open:
        raise _invalid("end_reason", "needed for a session that has ended, and only then")


def _segments(moved: MovedSession, prefix: str, vocab_size: int) -> Iterator[Segment]:
    """Segments of a tree, each after its parent."""
    answers = [part.segment for part in moved.segments]
    check_ids(answers, prefix, moved.num_segment_ids, WHERE)
    found: dict[str | None, Segment] = {}
    for part in moved.segments:
        parent = found.get(part.segment.parent)
        yield found.setdefault(part.segment.id, _segment(part, parent, vocab_size))


def _segment(part: MovedSegment, parent: Segment | None, vocab_size: int) -> Segment:
    answer = part.segment
    if not answer.token_ids or min(answer.token_ids) < 0 or max(answer.token_ids) >= vocab_size:
        raise _invalid("segments", "a segment needs tokens of the vocabulary")
    return Segment(
        id=answer.id,
        token_ids=np.asarray(answer.token_ids, np.int32),
        parent=parent,
        sample=sampled_tokens(answer, WHERE, vocab_size) if answer.sampled else None,
        finish=answer.finish_reason,
        stop_reason=answer.stop_reason,
        num_cached_tokens=part.num_cached_tokens,
        num_prompts=part.num_prompts,
    )


def _response(moved: MovedResponse, segments: dict[str, Segment]) -> RecordedResponse:
    segment = segments.get(moved.segment)
    if segment is None or segment.sample is None:
        raise _invalid("responses", "a response is not a sample of the session")
    if (moved.tool_call_ids is None) == (moved.num_chars is None):
        raise _invalid("responses", "needs either tool_call_ids or num_chars")
    call = RecordedCall(
        segment=segment,
        reasoning=moved.reasoning,
        num_hidden=moved.num_hidden_tokens,
        rest=moved.rest,
    )
    ids = None if moved.tool_call_ids is None else tuple(moved.tool_call_ids)
    return RecordedResponse(
        digest=bytes.fromhex(moved.digest),
        call=call,
        tool_call_ids=ids,
        num_chars=moved.num_chars,
    )


def _invalid(name: str, message: str) -> InvalidRequest:
    return invalid(WHERE, name, message)
