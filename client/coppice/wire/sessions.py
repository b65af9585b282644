"""Wire types of /v1/sessions: agent episodes over a chat API, with their tokens as trees."""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from coppice.wire.base import (
    ABSENT,
    UNUSED,
    AdapterName,
    AnswerModel,
    JsonInteger,
    RequestModel,
)
from coppice.wire.columns.kv_version_spans import KeepKv
from coppice.wire.columns.logprobs import NumTopLogprobs
from coppice.wire.rollouts import (
    GroupAnswer,
    Option,
    SegmentFinish,
    WeightsConstraint,
)
from coppice.wire.sampling import Sampling

MAX_SESSIONS = 1024
MAX_TURNS = 4096
MAX_TTL_SECONDS = 86_400.0

SessionState = Literal["open", "finished", "cancelled", "expired"]
SessionEndReason = Literal["finished", "cancelled", "expired", "surplus", "deadline", "drain"]
History = Literal["sampled", "template"]
CacheScope = Literal["session", "group"]
Attached = Literal["extended", "branched", "root"]
AttachReason = Literal[
    "new_conversation", "extended", "edited_history", "template", "no_turn_end", "retry"
]
AgentApi = Literal["chat", "completions", "messages", "responses"]
OverridableField = Literal[
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "ignore_eos",
]

GroupLabel = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
"""Label of a group of sessions; it is the second part of the group's id."""
Reward = Annotated[float, Field(allow_inf_nan=False)]
Metadata = Annotated[
    dict[
        Annotated[str, Field(min_length=1, max_length=64)],
        Annotated[str, Field(max_length=1024)],
    ],
    Field(max_length=32),
]


class SessionsFinish(RequestModel):
    """Conditions for ending a group of sessions before all of them are finished.

    After `num_sessions` finished sessions the others are cancelled as `surplus`. At the deadline,
    counted from the creation, the open ones are cancelled as `deadline`.
    """

    num_sessions: Annotated[int, Field(ge=1, le=MAX_SESSIONS), JsonInteger()] | None = None
    deadline_seconds: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] | None = None


class SessionsRequest(RequestModel):
    """Body of POST /v1/sessions: n sessions of one group.

    The agent's own sampling parameters are replaced by those of `sampling`, except for the fields
    in `overrides`. `max_tokens_total` limits the tokens of a session's trees, context included.
    `ttl_seconds` counts from the last call. With the history `sampled`, tokens that the policy has
    sampled stay in the context as they were sampled; with `template`, the chat template renders
    every turn again. Prefixes in the prefix cache are shared by the calls of one session, or with
    the cache scope `group` by those of all its sessions. With `keep_kv`, the calls may read
    their KV that older weights computed, if the activation kept it.
    """

    n: Annotated[int, Field(ge=1, le=MAX_SESSIONS), JsonInteger()] = 1
    group: GroupLabel | None = None
    adapter: AdapterName | None = None
    sampling: Sampling = Sampling()
    overrides: Annotated[list[OverridableField], Field(max_length=18)] = [
        "max_tokens",
        "stop",
    ]
    weights: WeightsConstraint | None = None
    keep_kv: Annotated[KeepKv | None, UNUSED] = None
    ttl_seconds: Annotated[float, Field(gt=0, le=MAX_TTL_SECONDS, allow_inf_nan=False)] = 3600.0
    max_tokens_total: Annotated[int, Field(ge=1, le=2**40), JsonInteger()] | None = None
    max_turns: Annotated[int, Field(ge=1, le=MAX_TURNS), JsonInteger()] = 256
    history: History = "sampled"
    cache_scope: CacheScope = "session"
    finish: SessionsFinish | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31), JsonInteger()] = 0
    return_support: Option = False
    top_logprobs: NumTopLogprobs | None = None
    metadata: Metadata = {}


class SessionFinishRequest(RequestModel):
    """Body of POST /v1/sessions/{id}/finish: a reward for the session, or by leaf of its trees."""

    reward: Reward | None = None
    rewards: Annotated[dict[str, Reward], Field(max_length=MAX_TURNS)] | None = None


class SessionStart(AnswerModel):
    """A new session. `key` is the only credential that its agent needs.

    `path` is the base path of the agent's routes. `base_url` is their URL, if the server knows the
    address at which clients reach it.
    """

    id: str
    key: str
    path: str
    base_url: Annotated[str | None, ABSENT] = None


class SessionsAnswer(AnswerModel):
    """Answer of POST /v1/sessions: the id of the group, and its sessions."""

    group: str
    sessions: list[SessionStart]


class SessionUsage(AnswerModel):
    """Token counts of a session.

    `num_prompt_tokens` counts the prompt of every turn. Of them, cached tokens were found in the
    prefix cache, and the others were forwarded. Context and sampled tokens are those of the trees,
    each counted once.
    """

    num_turns: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_forwarded_tokens: int = 0
    num_context_tokens: int = 0
    num_sampled_tokens: int = 0


class SessionStatus(AnswerModel):
    """Answer of GET /v1/sessions/{id}.

    `attached` counts the turns by reason. `versions` are the weights versions that have sampled
    tokens. `seconds_left` is the time until an open session without calls expires.
    """

    id: str
    group: str
    state: SessionState
    end_reason: Annotated[SessionEndReason | None, ABSENT] = None
    num_running_calls: int
    usage: SessionUsage
    attached: dict[AttachReason, int]
    versions: list[str]
    seconds_left: Annotated[float | None, ABSENT] = None
    metadata: dict[str, str]


class Turn(AnswerModel):
    """One sample of an agent's call. `segment` is the id of its segment in the tree.

    If later prompts branch inside the sample, it has several segments, of which `segment` is the
    last. `attached` says where the prompt ended in the tree, and `reason` why. Of the prompt's
    tokens `num_new_context_tokens` were not in the tree before. The last `num_hidden_tokens` of the
    sample are not in the text of the response: a stop token without text, or a stop string.
    """

    segment: str
    attached: Attached
    reason: AttachReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_new_context_tokens: int
    num_hidden_tokens: int = 0
    finish_reason: SegmentFinish
    api: AgentApi


class SessionAnswer(AnswerModel):
    """Tokens of a session, as one tree per conversation that shares no prefix with another.

    `prompt_token_ids` of a group are the tokens before the first branch or sample. `sequence`
    orders the ended sessions of an API key; it is absent while the session is open.
    """

    id: str
    group: str
    state: SessionState
    end_reason: Annotated[SessionEndReason | None, ABSENT] = None
    sequence: Annotated[int | None, ABSENT] = None
    metadata: dict[str, str]
    reward: float | None = None
    rewards: dict[str, float] | None = None
    groups: list[GroupAnswer]
    turns: list[Turn]
    usage: SessionUsage


class SessionRecord(AnswerModel):
    """Record of a stream of sessions: a session that has ended."""

    type: Literal["session"] = "session"
    session: SessionAnswer


class SessionsProgressRecord(AnswerModel):
    """Record of a stream of sessions, sent at intervals while no session ends."""

    type: Literal["progress"] = "progress"
    num_open: int


class SessionsEndRecord(AnswerModel):
    """Last record of the stream of a group, all of whose sessions have ended.

    `num_dropped` sessions of the group are no longer cached. `num_finished` were finished.
    """

    type: Literal["end"] = "end"
    num_sessions: int
    num_finished: int
    num_dropped: int


SessionsRecord = Annotated[
    SessionRecord | SessionsProgressRecord | SessionsEndRecord, Field(discriminator="type")
]
SESSIONS_RECORD: TypeAdapter[SessionsRecord] = TypeAdapter(SessionsRecord)
