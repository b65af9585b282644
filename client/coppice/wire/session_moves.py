"""Wire types of POST /v1/moves/sessions: agent sessions that move to another replica.

A session's state is its trees, its turns, and the digests by which the responses of its calls are
found in later prompts. No call of it runs.
"""

from typing import Annotated, Literal

from pydantic import Field

from coppice.wire.base import JsonInteger, Label, RequestModel
from coppice.wire.moves import (
    FORMAT,
    MovedKey,
    NumTokens,
    ReplicaId,
    RolloutId,
    Seconds,
)
from coppice.wire.rollouts import SegmentAnswer
from coppice.wire.sessions import (
    MAX_SESSIONS,
    MAX_TURNS,
    SessionEndReason,
    SessionFinishRequest,
    SessionsRequest,
    SessionState,
    Turn,
)

MAX_SEGMENTS = 65_536
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Count = Annotated[int, Field(ge=0, lt=2**31), JsonInteger()]
Sequence = Annotated[int, Field(ge=0, lt=2**53), JsonInteger()]
SessionIds = Annotated[list[RolloutId], Field(max_length=MAX_SESSIONS, fail_fast=True)]


class MovedSegment(RequestModel):
    """Segment of a session's tree; `num_prompts` prompts of calls end with it."""

    segment: SegmentAnswer
    num_prompts: Count
    num_cached_tokens: NumTokens


class MovedResponse(RequestModel):
    """Digest of a conversation or text that ends with a response, and the response's segment.

    A conversation has the `tool_call_ids` of its last message, a text its length, `num_chars`. The
    last `num_hidden_tokens` of the sample are not in the text that the agent has received, except
    for `rest`.
    """

    digest: Digest
    tool_call_ids: Annotated[list[str] | None, Field(max_length=1024)] = None
    num_chars: Count | None = None
    segment: str
    reasoning: str | None = None
    num_hidden_tokens: NumTokens
    rest: str


class MovedSession(RequestModel):
    """State of one session, whose parents precede their children in `segments`.

    `sequence` is that of a session that ended before its group was moved.
    """

    id: RolloutId
    state: SessionState
    end_reason: SessionEndReason | None = None
    sequence: Sequence | None = None
    seconds_left: Seconds
    outcome: SessionFinishRequest
    num_segment_ids: Count
    segments: Annotated[list[MovedSegment], Field(max_length=MAX_SEGMENTS, fail_fast=True)]
    turns: Annotated[list[Turn], Field(max_length=MAX_TURNS, fail_fast=True)]
    versions: Annotated[list[Label], Field(max_length=MAX_TURNS, fail_fast=True)]
    responses: Annotated[list[MovedResponse], Field(max_length=3 * MAX_TURNS, fail_fast=True)]


class MovedSessionGroup(RequestModel):
    """Group of the sessions that move.

    In the first request for a group, `session_ids` are all of its sessions, with their `keys`, and
    the sender sends those in `remaining_ids` later. In further requests, `session_ids` are those of
    the request. `num_finished` counts the finished sessions, except for those that remain.
    `last_sequence` is the highest sequence of the sender.
    """

    id: RolloutId
    key: MovedKey | None = None
    options: SessionsRequest
    session_ids: Annotated[SessionIds, Field(min_length=1)]
    keys: Annotated[
        list[Annotated[str, Field(pattern=r"^[\x21-\x7e]{32,128}$")]],
        Field(max_length=MAX_SESSIONS, fail_fast=True),
    ]
    remaining_ids: SessionIds
    seconds_left: Seconds | None = None
    num_finished: Annotated[int, Field(ge=0, le=MAX_SESSIONS), JsonInteger()]
    last_sequence: Sequence


class MovedSessions(RequestModel):
    """Body of POST /v1/moves/sessions: sessions of one group of the replica `source`.

    The first request for a group has its sessions that have ended, and one that is open if there is
    one. Each further request has one session.
    """

    format: Literal[1] = FORMAT
    source: ReplicaId
    owner: Annotated[str, Field(max_length=256)]
    group: MovedSessionGroup
    sessions: Annotated[
        list[MovedSession], Field(min_length=1, max_length=MAX_SESSIONS, fail_fast=True)
    ]
