"""POST /v1/rollouts: groups of prompts in, groups of samples out."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from coppice.wire.base import (
    AdapterLabel,
    AdapterName,
    AnswerModel,
    JsonInteger,
    Label,
    RequestModel,
    TokenIds,
)
from coppice.wire.branching import Branching
from coppice.wire.kv import Kv, KvHandle, KvReason
from coppice.wire.reuse import Reuse, ReuseAnswer

MAX_GROUPS = 4096
MAX_SAMPLES_PER_GROUP = 1024
MAX_TOKENS = 1_048_576

Logprob = Annotated[float, Field(le=0.0, allow_inf_nan=False)]

FinishReason = Literal[
    "stop", "length", "aborted", "deadline", "surplus", "version_changed", "error"
]
SegmentFinish = Literal[
    "cut",
    "budget",
    "stop",
    "length",
    "aborted",
    "deadline",
    "surplus",
    "version_changed",
    "error",
]
Outcome = Literal["done", "partial", "failed", "cancelled"]


class Message(RequestModel):
    """One turn of a conversation, rendered by the model's own chat template."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[str, Field(max_length=16 * 2**20)]


class PromptSegment(RequestModel):
    """A piece of a prompt. With a name in `reuse` it stands in other prompts too."""

    token_ids: Annotated[TokenIds, Field(min_length=1, max_length=MAX_TOKENS)]
    reuse: Annotated[str, Field(min_length=1, max_length=256)] | None = None


class Prompt(RequestModel):
    """Exactly one of token ids, text, messages or segments, which follow one another."""

    token_ids: Annotated[TokenIds, Field(min_length=1, max_length=MAX_TOKENS)] | None = None
    text: Annotated[str, Field(min_length=1, max_length=16 * 2**20)] | None = None
    messages: (
        Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)] | None
    ) = None
    segments: (
        Annotated[list[PromptSegment], Field(min_length=1, max_length=1024, fail_fast=True)] | None
    ) = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        ways = (self.token_ids, self.text, self.messages, self.segments)
        if sum(way is not None for way in ways) != 1:
            raise ValueError("give exactly one of token_ids, text, messages and segments")
        return self


class GroupRequest(RequestModel):
    """One prompt and the n samples wanted from it."""

    prompt: Prompt
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES_PER_GROUP), JsonInteger()] = 1
    id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**62), JsonInteger()] | None = None


class Sampling(RequestModel):
    """The distribution that tokens are drawn from, and where a sample ends.

    At temperature 0 the likeliest token is taken, and logprobs are the model's own, untruncated.
    """

    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS), JsonInteger()] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1), JsonInteger()] = 0
    stop_token_ids: Annotated[TokenIds, Field(max_length=256)] = []
    ignore_eos: bool = False


class Policy(RequestModel):
    """Which weights may answer: exactly one version, or any from one version on."""

    exact_version: Label | None = None
    min_version: Label | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.exact_version is None) == (self.min_version is None):
            raise ValueError("give exactly one of exact_version and min_version")
        return self


class Finish(RequestModel):
    """When a group is done before all its samples have ended by themselves.

    With `samples`, so many are enough, which of them says the policy; what still runs then ends as
    `surplus`. With `deadline_seconds`, what still runs then ends as `deadline`. Tokens so far are
    kept.
    """

    samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES_PER_GROUP), JsonInteger()] | None = None
    deadline_seconds: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] | None = None
    policy: Literal["first", "random_k", "balanced_length"] = "first"


class GivenSpan(RequestModel):
    """Tokens start..end (end excluded) were sampled under this weights version, and adapter."""

    version: Label
    start: Annotated[int, Field(ge=0, le=MAX_TOKENS), JsonInteger()]
    end: Annotated[int, Field(ge=0, le=MAX_TOKENS), JsonInteger()]
    adapter: AdapterName | None = None


class UnfinishedSample(RequestModel):
    """What an earlier rollout answered of a sample that it did not finish."""

    group: Annotated[int, Field(ge=0, lt=MAX_GROUPS), JsonInteger()] = 0
    token_ids: Annotated[TokenIds, Field(min_length=1, max_length=MAX_TOKENS)]
    logprobs: Annotated[list[Logprob], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True)]
    versions: Annotated[list[GivenSpan], Field(min_length=1, max_length=4096, fail_fast=True)]


class ContinueFrom(RequestModel):
    """Samples to go on with. Those of a group are its first samples, in this order."""

    samples: Annotated[
        list[UnfinishedSample], Field(min_length=1, max_length=65_536, fail_fast=True)
    ]


class RolloutRequest(RequestModel):
    """The body of POST /v1/rollouts."""

    groups: Annotated[
        list[GroupRequest], Field(min_length=1, max_length=MAX_GROUPS, fail_fast=True)
    ]
    sampling: Sampling = Sampling()
    kv: Kv | None = None
    policy: Policy | None = None
    finish: Finish | None = None
    branching: Branching | None = None
    continue_from: ContinueFrom | None = None
    reuse: Reuse | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31), JsonInteger()] = 0
    speculation: bool = True
    adapter: AdapterName | None = None
    stream: bool = False


class VersionSpan(AnswerModel):
    """Tokens start..end (end excluded) were sampled under this weights version.

    Where an adapter was over it, `adapter` is that one's `name@version`.
    """

    version: str
    start: int
    end: int
    adapter: AdapterLabel = None


class SampleAnswer(AnswerModel):
    """One finished sample. logprobs[i] belongs to token_ids[i]."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    text: str | None = None
    finish_reason: FinishReason
    versions: list[VersionSpan]


class SegmentAnswer(AnswerModel):
    """One piece of a tree, between two cuts. logprobs[i] belongs to token_ids[i].

    Without a parent it begins at the prompt. `versions` count from the segment's own first token.
    `num_leaves`, the leaves that it is shared by, is not known before the tree is whole. `kv`, the
    keys and values of the whole path to its end, comes with the first path that goes on from there.
    """

    id: str
    parent: str | None = None
    depth: int
    token_ids: list[int]
    logprobs: list[float]
    entropy: list[float] | None = None
    finish_reason: SegmentFinish
    num_leaves: int | None = None
    versions: list[VersionSpan]
    kv: KvHandle | None = None
    kv_reason: KvReason | None = None


class GroupHead(AnswerModel):
    """What there is to say of a group beside its samples.

    Unless `exact`, keys and values of its prompt were approximate: log-probabilities are those of
    what was sampled from, not of the model. `chosen` are the samples that were enough, where
    `finish.samples` was asked for and reached. Of a tree, `leaves` are the segments where its paths
    end; `num_dropped` segments were taken out by whoever grew it.
    """

    id: str
    index: int
    outcome: Outcome
    exact: bool = True
    num_prompt_tokens: int
    num_cached_tokens: int
    num_continued_tokens: int = 0
    chosen: list[int] | None = None
    leaves: list[str] | None = None
    num_dropped: int = 0
    kv: KvHandle | None = None
    kv_reason: KvReason | None = None
    """Why there is no handle, where one was asked for."""
    reuse: ReuseAnswer | None = None
    """What was computed of a prompt that came in segments."""


class GroupAnswer(GroupHead):
    """One prompt's samples, in order of their index, or the segments of its tree.

    Parents come before their children. A tree that was asked for flattened has both; its samples
    are then its leaves' whole paths.
    """

    samples: list[SampleAnswer]
    segments: list[SegmentAnswer] | None = None

    @property
    def num_completion_tokens(self) -> int:
        """Those sampled here: what paths share counts once, what came along not at all."""
        parts = self.samples if self.segments is None else self.segments
        return sum(len(part.token_ids) for part in parts) - self.num_continued_tokens

    @property
    def num_samples(self) -> int:
        return len(self.samples if self.leaves is None else self.leaves)


class RunningAnswer(AnswerModel):
    """A rollout that was asked for asynchronously and has not ended.

    A tree's samples are its leaves, and `samples` the most that it may come to.
    """

    id: str
    status: Literal["running"] = "running"
    samples: int
    samples_done: int


class Usage(AnswerModel):
    """Token counts of a whole rollout; a group's prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    samples: int


class RolloutAnswer(AnswerModel):
    """The answer of POST /v1/rollouts in its default mode."""

    id: str
    outcome: Outcome
    groups: list[GroupAnswer]
    usage: Usage


class BranchAnswer(AnswerModel):
    """What grew, in no order, and until when the tree stays open without further use."""

    segments: list[SegmentAnswer]
    lease_seconds: float


class DropAnswer(AnswerModel):
    """The segments that are gone: the one that was named, and all below it."""

    dropped: list[str]
    lease_seconds: float
