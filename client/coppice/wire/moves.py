"""Wire types of POST /v1/moves: a rollout that moves to another replica.

The state of a rollout has everything that the groups still need: the request, the results so far,
and the tokens of the samples that have not finished.
"""

from typing import Annotated, Literal

from pydantic import Field

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
)

FORMAT: Literal[1] = 1
ReplicaId = Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]
RolloutId = Annotated[str, Field(pattern=r"^[0-9a-f]{12}\.[0-9A-Za-z_-]{1,64}$")]
NumTokens = Annotated[int, Field(ge=0, le=MAX_TOKENS), JsonInteger()]
Index = Annotated[int, Field(ge=0, lt=MAX_GROUPS), JsonInteger()]

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class MovedKey(RequestModel):
    """Idempotency key of a rollout, with the digest of the request in hexadecimal."""

    key: Annotated[str, Field(min_length=1, max_length=255)]
    fingerprint: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class MovedGroup(RequestModel):
    """Group that has not ended: its prompt, and its unfinished samples with their tokens so far.

    `num_given_tokens` are those of its samples that the request's `continue_from` gave. Its samples
    began `elapsed_seconds` ago, and `sample_seconds` are the durations of the finished ones.
    """

    index: Index
    prompt_token_ids: Annotated[TokenIds, Field(min_length=1, max_length=MAX_TOKENS)]
    num_given_tokens: Annotated[list[NumTokens], Field(max_length=MAX_SAMPLES_PER_GROUP)]
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


class MoveAnswer(AnswerModel):
    """Id of a rollout or a first session that is now on the replica that received it."""

    id: str


class MovedRollout(RequestModel):
    """Body of POST /v1/moves: a rollout of the replica `source`, which another one continues.

    `version` is the weights version that is active on the source. `request` has no `continue_from`:
    the samples have its tokens. `adapter` is the label of the adapter, with its version. `records`
    are the results so far. With `awaits_fetch`, a caller is to fetch the result. If not `detached`,
    the rollout ends with the connection of the caller that follows it. With `stream_tokens`, the
    readers of the log receive tokens, except for the `given` ones.
    """

    format: Literal[1] = FORMAT
    id: RolloutId
    source: ReplicaId
    owner: Annotated[str, Field(max_length=256)]
    version: Label
    key: MovedKey | None = None
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
    groups: Annotated[list[MovedGroup], Field(max_length=MAX_GROUPS, fail_fast=True)]
