"""Wire types by which a draining replica hands unfinished rollouts and sessions to another one.

A state has everything that is needed to go on, wherever it is read. An offer adds its sender.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from coppice.wire.base import (
    MAX_TOKENS,
    AnswerModel,
    JsonInteger,
    Label,
    RequestModel,
    TokenIds,
)
from coppice.wire.packed.results import GroupRecord, SampleRecord, SegmentRecord
from coppice.wire.rollouts import (
    MAX_GROUPS,
    MAX_SAMPLES_PER_GROUP,
    RolloutRequest,
    SampleAnswer,
    SegmentAnswer,
)
from coppice.wire.sessions import (
    MAX_SESSIONS,
    MAX_TURNS,
    SessionEndReason,
    SessionFinishRequest,
    SessionsRequest,
    SessionState,
    Turn,
)

STATE_VERSION: Literal[1] = 1
MAX_SEGMENTS = 65_536
ReplicaId = Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]
RolloutId = Annotated[str, Field(pattern=r"^[0-9a-f]{12}\.[0-9A-Za-z_-]{1,64}$")]
NumTokens = Annotated[int, Field(ge=0, le=MAX_TOKENS), JsonInteger()]
Index = Annotated[int, Field(ge=0, lt=MAX_GROUPS), JsonInteger()]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Count = Annotated[int, Field(ge=0, lt=2**31), JsonInteger()]
Sequence = Annotated[int, Field(ge=0, lt=2**53), JsonInteger()]
SessionIds = Annotated[list[RolloutId], Field(max_length=MAX_SESSIONS, fail_fast=True)]


class VersionedState(RequestModel):
    """Version of the form of a state, and the API key that the state belongs to."""

    state_version: Literal[1]
    owner: Annotated[str, Field(max_length=256)]

    @model_validator(mode="before")
    @classmethod
    def _known_version(cls, state: Any) -> Any:
        """Report an unknown version alone: the other fields may then be different ones."""
        version = state.get("state_version") if isinstance(state, dict) else None
        if isinstance(version, int) and version != STATE_VERSION:
            raise PydanticCustomError(
                "state_version",
                "this replica reads states of version {known}, and this one has version {version}",
                {"known": STATE_VERSION, "version": version},
            )
        return state


class KeyState(RequestModel):
    """Idempotency key of a rollout or group, with the digest of the request in hexadecimal."""

    key: Annotated[str, Field(min_length=1, max_length=255)]
    fingerprint: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class GroupState(RequestModel):
    """Group that has not ended: its prompt, and its unfinished samples with their tokens so far.

    Its samples began `elapsed_seconds` ago, and `sample_seconds` are the durations of the finished
    ones.
    """

    index: Index
    prompt_token_ids: Annotated[TokenIds, Field(min_length=1, max_length=MAX_TOKENS)]
    num_cached_tokens: NumTokens | None = None
    seconds_used: Seconds
    elapsed_seconds: Seconds
    sample_seconds: Annotated[list[Seconds], Field(max_length=MAX_SAMPLES_PER_GROUP)]
    samples: Annotated[list[SampleAnswer], Field(max_length=MAX_SAMPLES_PER_GROUP, fail_fast=True)]


class GivenTokens(RequestModel):
    """Number of tokens of a sample that the request's `continue_from` gave."""

    group: Index
    index: Annotated[int, Field(ge=0, lt=MAX_SAMPLES_PER_GROUP), JsonInteger()]
    num_tokens: NumTokens


class RolloutState(VersionedState):
    """State of a rollout whose samples do not run.

    `version` is the weights version that is active. `request` has no `continue_from`: the samples
    have its tokens. `adapter` is the label of the adapter, with its version. `records` are the
    results so far. With `awaits_fetch`, a caller is to fetch the result. If not `detached`, the
    rollout ends with the connection of the caller that follows it. With `stream_tokens`, the
    readers of the log receive tokens, except for the `given` ones.
    """

    id: RolloutId
    version: Label
    key: KeyState | None = None
    adapter: Annotated[str, Field(max_length=512)] | None = None
    awaits_fetch: bool
    detached: bool
    stream_tokens: bool
    given: Annotated[list[GivenTokens], Field(max_length=131_072, fail_fast=True)]
    request: RolloutRequest | None = None
    records: Annotated[
        list[Annotated[SampleRecord | SegmentRecord | GroupRecord, Field(discriminator="type")]],
        Field(max_length=131_072, fail_fast=True),
    ]
    groups: Annotated[list[GroupState], Field(max_length=MAX_GROUPS, fail_fast=True)]


class SegmentState(RequestModel):
    """Segment of a session's tree; `num_prompts` prompts of calls end with it."""

    segment: SegmentAnswer
    num_prompts: Count
    num_cached_tokens: NumTokens


class ResponseState(RequestModel):
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


class AgentSessionState(RequestModel):
    """State of one session without running calls: its tree, its turns and its responses.

    Parents precede their children in `segments`. `sequence` is that of a session that ended before
    its group was offered.
    """

    id: RolloutId
    state: SessionState
    end_reason: SessionEndReason | None = None
    sequence: Sequence | None = None
    seconds_left: Seconds
    outcome: SessionFinishRequest
    num_segment_ids: Count
    segments: Annotated[list[SegmentState], Field(max_length=MAX_SEGMENTS, fail_fast=True)]
    turns: Annotated[list[Turn], Field(max_length=MAX_TURNS, fail_fast=True)]
    versions: Annotated[list[Label], Field(max_length=MAX_TURNS, fail_fast=True)]
    responses: Annotated[list[ResponseState], Field(max_length=3 * MAX_TURNS, fail_fast=True)]


class SessionGroupState(RequestModel):
    """Group of sessions.

    In the first offer of a group, `session_ids` are all of its sessions, with their `keys`, and the
    sender offers those in `remaining_ids` later. In further offers, `session_ids` are those of the
    offer. `num_finished` counts the finished sessions, except for those that remain.
    `last_sequence` is the highest sequence of the sender.
    """

    id: RolloutId
    key: KeyState | None = None
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


class SessionsState(VersionedState):
    """State of some sessions of one group.

    The first offer of a group has its sessions that have ended, and one that is open if there is
    one. Each further offer has one session.
    """

    group: SessionGroupState
    sessions: Annotated[
        list[AgentSessionState], Field(min_length=1, max_length=MAX_SESSIONS, fail_fast=True)
    ]


class RolloutOffer(RolloutState):
    """Body of POST /v1/handoff/rollouts: a rollout that the replica `source` offers."""

    source: ReplicaId


class SessionsOffer(SessionsState):
    """Body of POST /v1/handoff/sessions: sessions that the replica `source` offers."""

    source: ReplicaId


class HandoffAnswer(AnswerModel):
    """Id of a rollout or a first session that is now on the replica that received it."""

    id: str
