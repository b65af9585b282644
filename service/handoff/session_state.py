"""Serialization of agent sessions and their group to their wire state, and restoring of it."""

from collections.abc import Iterator, Sequence

import numpy as np

from coppice.wire.columns.token_columns import TABLES, TokenLists, column_bytes
from coppice.wire.handoff import (
    AgentSessionState,
    ResponseState,
    SegmentState,
    SessionGroupState,
)
from coppice.wire.rollouts import SegmentAnswer
from service.errors import InvalidRequest
from service.handoff.rollout_state import TOKEN_BYTES, check_ids, checked_tokens, invalid, key_state
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


def group_state(
    group: SessionGroup,
    sent: Sequence[Session],
    left: Sequence[Session],
    keys: list[str],
    *,
    last_sequence: int,
    now: float,
) -> SessionGroupState:
    """State of a group for its first offer, or for a further one without `keys`.

    The sessions that are `left` are not counted yet.
    """
    return SessionGroupState(
        id=group.id,
        key=None if group.claim is None else key_state(group.claim),
        options=group.options,
        session_ids=group.session_ids if keys else [session.id for session in sent],
        keys=keys,
        remaining_ids=[session.id for session in left],
        seconds_left=None if group.deadline is None else max(0.0, group.deadline - now),
        num_finished=group.num_finished - sum(each.state == "finished" for each in left),
        last_sequence=last_sequence,
    )


def estimated_bytes(session: Session) -> int:
    """Estimated size of a session's state as JSON, in bytes."""
    tree = session.tree
    return (
        TOKEN_BYTES * tree.num_sampled_tokens
        + CONTEXT_TOKEN_BYTES * tree.num_context_tokens
        + TURN_BYTES * len(session.turns)
        + TABLE_FACTOR * session.num_table_bytes
    )


def session_state(session: Session, now: float) -> AgentSessionState:
    return AgentSessionState(
        id=session.id,
        state=session.state,
        end_reason=session.end_reason,
        sequence=session.sequence,
        seconds_left=max(0.0, session.expires_at - now),
        outcome=session.outcome,
        num_segment_ids=session.tree.num_ids,
        segments=[_segment_state(each) for each in session.tree.segments()],
        turns=session.turns,
        versions=list(session.versions),
        responses=[_response_state(each) for each in session.conversations.responses()],
    )


def _segment_state(segment: Segment) -> SegmentState:
    return SegmentState(
        segment=segment_answer(segment),
        num_prompts=segment.num_prompts,
        num_cached_tokens=segment.num_cached_tokens,
    )


def _response_state(response: RecordedResponse) -> ResponseState:
    call, ids = response.call, response.tool_call_ids
    return ResponseState(
        digest=response.digest.hex(),
        tool_call_ids=None if ids is None else list(ids),
        num_chars=response.num_chars,
        segment=call.segment.id,
        reasoning=call.reasoning,
        num_hidden_tokens=call.num_hidden,
        rest=call.rest,
    )


def restore(session: Session, state: AgentSessionState, *, vocab_size: int) -> None:
    """Give a new session its state; raises InvalidRequest if it is inconsistent.

    It may take long and is called in a thread.
    """
    prefix = session.tree.prefix
    found = {segment.id: segment for segment in _segments(state, prefix, vocab_size)}
    session.tree = TokenTree.restored(prefix, found.values(), num_ids=state.num_segment_ids)
    for response in state.responses:
        session.conversations.restore(_response(response, found))
    if any(turn.segment not in found for turn in state.turns):
        raise _invalid("turns", "of segments that the session does not have")
    session.turns = list(state.turns)
    session.versions = dict.fromkeys(state.versions)
    session.state, session.end_reason = state.state, state.end_reason
    session.sequence, session.outcome = state.sequence, state.outcome
    session.num_table_bytes = sum(column_bytes(each.segment, TABLES) for each in state.segments)
    if (session.end_reason is None) != session.is_open:
        raise _invalid("end_reason", "needed for a session that has ended, and only then")


def _segments(state: AgentSessionState, prefix: str, vocab_size: int) -> Iterator[Segment]:
    """Segments of a tree, each after its parent."""
    answers = [part.segment for part in state.segments]
    check_ids(answers, prefix, state.num_segment_ids, WHERE)
    found: dict[str | None, Segment] = {}
    for part in state.segments:
        parent = found.get(part.segment.parent)
        yield found.setdefault(part.segment.id, _segment(part, parent, vocab_size))


def _segment(part: SegmentState, parent: Segment | None, vocab_size: int) -> Segment:
    answer = part.segment
    if not answer.token_ids or min(answer.token_ids) < 0 or max(answer.token_ids) >= vocab_size:
        raise _invalid("segments", "a segment needs tokens of the vocabulary")
    return Segment(
        id=answer.id,
        token_ids=np.asarray(answer.token_ids, np.int32),
        parent=parent,
        sample=_sampled_tokens(answer, vocab_size) if answer.sampled else None,
        finish=answer.finish_reason,
        stop_reason=answer.stop_reason,
        num_cached_tokens=part.num_cached_tokens,
        num_prompts=part.num_prompts,
    )


def _sampled_tokens(answer: SegmentAnswer, vocab_size: int) -> TokenLists:
    tokens = checked_tokens(answer, WHERE, vocab_size)
    if tokens.kv_versions and tokens.kv_versions[0].first_token:
        raise _invalid("kv_versions", "they must begin with the first token")
    return tokens


def _response(state: ResponseState, segments: dict[str, Segment]) -> RecordedResponse:
    segment = segments.get(state.segment)
    if segment is None or segment.sample is None:
        raise _invalid("responses", "a response is not a sample of the session")
    if (state.tool_call_ids is None) == (state.num_chars is None):
        raise _invalid("responses", "needs either tool_call_ids or num_chars")
    call = RecordedCall(
        segment=segment,
        reasoning=state.reasoning,
        num_hidden=state.num_hidden_tokens,
        rest=state.rest,
    )
    ids = None if state.tool_call_ids is None else tuple(state.tool_call_ids)
    return RecordedResponse(
        digest=bytes.fromhex(state.digest),
        call=call,
        tool_call_ids=ids,
        num_chars=state.num_chars,
    )


def _invalid(name: str, message: str) -> InvalidRequest:
    return invalid(WHERE, name, message)
