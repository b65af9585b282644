"""Wire types of POST /v1/rollouts: prompts and options, samples and tree segments, token usage."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from coppice.wire.base import (
    ABSENT,
    MAX_TOKENS,
    UNUSED,
    AdapterName,
    AnswerModel,
    JsonInteger,
    Label,
    RequestModel,
    TokenIds,
)
from coppice.wire.branching import Branching
from coppice.wire.chat import Message, ParsedMessage, Tool
from coppice.wire.columns.kv_version_spans import ChainKeepKv
from coppice.wire.columns.logprobs import NumTopLogprobs, OptionalPromptLogprobs, PositionTokenIds
from coppice.wire.columns.routed_experts import OptionalExperts
from coppice.wire.columns.token_columns import GivenTokenFields, TokenFields
from coppice.wire.kv_reuse import KvReuse, KvReuseAnswer
from coppice.wire.prompt_kv import Kv, KvHandle, KvReason
from coppice.wire.sampling import Sampling

MAX_GROUPS = 4096
MAX_SAMPLES_PER_GROUP = 1024

Seed = Annotated[int, Field(ge=0, lt=2**62), JsonInteger()]
FinishReason = Literal[
    "stop", "length", "aborted", "deadline", "surplus", "version_changed", "error"
]
SegmentFinish = Literal["cut", "budget", FinishReason]
StopReason = Annotated[int | str | None, ABSENT]
"""In answers: the stop token id or stop string that ended the sample; else absent."""
Option = Annotated[bool, UNUSED]
LogprobsMode = Literal["processed_logprobs", "raw_logprobs"]
Outcome = Literal["done", "partial", "failed", "cancelled"]


class PromptSpan(RequestModel):
    """Token ids of a part of a prompt. With a `cache_key` the KV can be reused in other prompts."""

    token_ids: Annotated[TokenIds, Field(min_length=1, max_length=MAX_TOKENS)]
    cache_key: Annotated[str, Field(min_length=1, max_length=256)] | None = None


class Prompt(RequestModel):
    """Prompt, as exactly one of token ids, text, chat messages or spans; spans are concatenated.

    With `truncate_prompt_tokens` only that many last tokens are kept, or first tokens with
    `truncation_side: right`. The fields after these belong to messages.
    """

    token_ids: Annotated[TokenIds, Field(min_length=1, max_length=MAX_TOKENS)] | None = None
    text: Annotated[str, Field(min_length=1, max_length=16 * 2**20)] | None = None
    messages: (
        Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)] | None
    ) = None
    spans: (
        Annotated[list[PromptSpan], Field(min_length=1, max_length=1024, fail_fast=True)] | None
    ) = None

    truncate_prompt_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS), JsonInteger()] | None = None
    truncation_side: Annotated[
        Literal["left", "right"], Field(exclude_if=lambda side: side == "left")
    ] = "left"
    tools: Annotated[list[Tool], Field(max_length=1024, fail_fast=True), UNUSED] = []
    chat_template_kwargs: Annotated[dict[str, Any], UNUSED] = {}
    add_generation_prompt: Annotated[bool, Field(exclude_if=bool)] = True
    continue_final_message: Option = False

    @property
    def num_images(self) -> int:
        return sum(message.num_images for message in self.messages or ())

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        ways = (self.token_ids, self.text, self.messages, self.spans)
        if sum(way is not None for way in ways) != 1:
            raise ValueError("give exactly one of token_ids, text, messages and spans")
        chat = (self.tools, self.chat_template_kwargs, self.continue_final_message)
        if self.messages is None and (any(chat) or not self.add_generation_prompt):
            raise ValueError("the options of a chat need messages")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message needs add_generation_prompt: false")
        if self.truncate_prompt_tokens is not None and self.spans is not None:
            raise ValueError("spans cannot be truncated")
        return self


class GroupRequest(RequestModel):
    """One prompt and the number n of samples to generate from it; `seeds` has one per sample."""

    prompt: Prompt
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES_PER_GROUP), JsonInteger()] = 1
    id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    seed: Seed | None = None
    seeds: Annotated[list[Seed], Field(max_length=MAX_SAMPLES_PER_GROUP)] | None = None

    @model_validator(mode="after")
    def _one_seed_per_sample(self) -> Self:
        if self.seeds is not None and (self.seed is not None or len(self.seeds) != self.n):
            raise ValueError("seeds needs n seeds, and no seed")
        return self


class WeightsConstraint(RequestModel):
    """Weights version that a rollout requires: exactly one version, or a minimum version."""

    exact_version: Label | None = None
    min_version: Label | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.exact_version is None) == (self.min_version is None):
            raise ValueError("give exactly one of exact_version and min_version")
        return self


class Finish(RequestModel):
    """Rollout option: conditions for ending a group before all of its samples have completed.

    With `num_samples`, the group is done when that many samples have completed; `select` determines
    which ones count. The rest end as `surplus`. With `deadline_seconds`, samples that still run at
    the deadline end as `deadline`. Tokens generated so far are kept.
    """

    num_samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES_PER_GROUP), JsonInteger()] | None = None
    deadline_seconds: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] | None = None
    select: Literal["first", "random", "balanced_length"] = "first"


class UnfinishedSample(GivenTokenFields):
    """Sample to resume, which an earlier rollout returned unfinished."""

    group: Annotated[int, Field(ge=0, lt=MAX_GROUPS), JsonInteger()] = 0


class ContinueFrom(RequestModel):
    """Rollout option: unfinished samples to resume, which become the first of their group.

    Their order is preserved.
    """

    samples: Annotated[
        list[UnfinishedSample], Field(min_length=1, max_length=65_536, fail_fast=True)
    ]


class RolloutRequest(RequestModel):
    """Body of POST /v1/rollouts.

    With `return_support`, each token is returned with the set of token ids that it was sampled
    from. `logprob_token_ids` are tokens whose logprobs are returned at each sampled token. With
    `logprobs_mode: raw_logprobs`, their logprobs and those of `top_logprobs` are the model's own,
    and the samples have `raw_logprobs`, too. With `keep_kv`, the rollout may read KV of its chain
    that older weights computed, if the activation kept it.
    """

    groups: Annotated[
        list[GroupRequest], Field(min_length=1, max_length=MAX_GROUPS, fail_fast=True)
    ]
    sampling: Sampling = Sampling()
    kv: Kv | None = None
    weights: WeightsConstraint | None = None
    finish: Finish | None = None
    branching: Branching | None = None
    continue_from: ContinueFrom | None = None
    kv_reuse: KvReuse | None = None
    keep_kv: Annotated[ChainKeepKv | None, UNUSED] = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31), JsonInteger()] = 0
    speculation: bool = True
    return_support: Option = False
    adapter: AdapterName | None = None
    top_logprobs: NumTopLogprobs | None = None
    logprob_token_ids: Annotated[PositionTokenIds | None, UNUSED] = None
    logprobs_mode: Annotated[
        LogprobsMode, Field(exclude_if=lambda mode: mode == "processed_logprobs")
    ] = "processed_logprobs"
    prompt_logprobs: NumTopLogprobs | None = None
    echo: Option = False
    return_message: Option = False
    return_routed_experts: bool | None = None
    stream: bool = False
    stream_tokens: Option = False


class SampleAnswer(TokenFields):
    """One finished sample of a rollout."""

    index: int
    text: str | None = None
    finish_reason: FinishReason
    stop_reason: StopReason = None
    message: Annotated[ParsedMessage | None, ABSENT] = None
    routed_experts: OptionalExperts = None
    """Experts of the tokens that the model has read, if they were requested."""


class SegmentAnswer(TokenFields):
    """One segment of a tree, between two branch points.

    Without a parent a segment starts at the prompt. Token indices in `versions` start at its
    first token; positions in `kv_versions` start with the prompt. `num_leaves`, the number of
    leaves below, is known only when the tree is complete. `kv`, a handle to the KV of the whole
    path to its end, is available once a child segment starts. If `sampled` is false, the tokens are
    context of an agent session, such as a tool's result: they have neither logprobs nor versions
    and are not trained.
    """

    id: str
    parent: str | None = None
    depth: int
    entropy: list[float] | None = None
    finish_reason: SegmentFinish
    stop_reason: StopReason = None
    num_leaves: int | None = None
    kv: KvHandle | None = None
    kv_reason: KvReason | None = None
    sampled: Annotated[bool, Field(exclude_if=bool)] = True


class GroupHead(AnswerModel):
    """Result of one group of a rollout, without the samples.

    If `exact` is False, the prompt's KV was approximate: logprobs are those of the distribution
    that was sampled from, not of the model. `selected` are the samples that `finish` selected,
    if that number was reached. For a tree, `leaves` are the ids of its leaf segments, and
    `num_dropped` counts the segments that the caller removed.
    """

    id: str
    index: int
    outcome: Outcome
    exact: bool = True
    num_prompt_tokens: int
    prompt_token_ids: Annotated[list[int] | None, ABSENT] = None
    num_images: Annotated[int, UNUSED] = 0
    """Images in the prompt, which its token ids alone do not have."""
    num_cached_tokens: int
    num_continued_tokens: int = 0
    selected: list[int] | None = None
    leaves: list[str] | None = None
    num_dropped: int = 0
    kv: KvHandle | None = None
    kv_reason: KvReason | None = None
    """The reason why a requested handle is missing."""
    kv_reuse: KvReuseAnswer | None = None
    """KV reuse of a prompt given as spans."""
    prompt_logprobs: OptionalPromptLogprobs = None


class GroupAnswer(GroupHead):
    """Result of one group of a rollout: samples ordered by index, or the segments of a tree.

    Parents precede their children. A tree requested with `flatten` has both; each sample is then
    the whole path to one leaf.
    """

    samples: list[SampleAnswer]
    segments: list[SegmentAnswer] | None = None

    @property
    def num_generated_tokens(self) -> int:
        """Number of tokens that this rollout sampled; tokens shared in a tree count once.

        Tokens of resumed samples do not count.
        """
        parts: Sequence[SampleAnswer | SegmentAnswer] = self.samples
        if self.segments is not None:
            parts = [segment for segment in self.segments if segment.sampled]
        return sum(len(part.token_ids) for part in parts) - self.num_continued_tokens

    @property
    def num_samples(self) -> int:
        return len(self.samples if self.leaves is None else self.leaves)


class RunningAnswer(AnswerModel):
    """Answer about a rollout that was submitted asynchronously and still runs.

    For a tree, samples are leaves and `num_samples` is the maximum possible number.
    """

    id: str
    status: Literal["running"] = "running"
    num_samples: int
    num_samples_done: int


class Usage(AnswerModel):
    """Token counts of a whole rollout, in which the prompt of each group counts once."""

    num_prompt_tokens: int
    num_generated_tokens: int
    num_samples: int


class RolloutAnswer(AnswerModel):
    """Result of a whole rollout, the default answer of POST /v1/rollouts."""

    id: str
    outcome: Outcome
    groups: list[GroupAnswer]
    usage: Usage


class BranchAnswer(AnswerModel):
    """Answer to a branch request: new tree segments, in any order, and the lease of the tree."""

    segments: list[SegmentAnswer]
    lease_seconds: float


class DropAnswer(AnswerModel):
    """Answer to the removal of a tree segment: ids of the segment and all its descendants."""

    dropped: list[str]
    lease_seconds: float
