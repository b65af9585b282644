"""Prompt KV: asked for with a rollout, then read, leased and released by its handle.

The bytes are one safetensors file with the tensors k.0, v.0, k.1 and so on, each [kv_heads, tokens,
head_dim] and C-contiguous, keys after rotary embedding. It covers all of the prompt but its last
token, which whoever scores the first response token computes.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from coppice.wire.base import AnswerModel, RequestModel

LeaseSeconds = Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)]

KvReason = Literal[
    "disabled",
    "unsupported_cache",
    "no_shm",
    "arena_full",
    "prompt_too_short",
    "mixed_version",
    "export_failed",
    "not_written",
    "not_continued",
    "internal",
]
"""Why a group that asked for a handle has none, or a segment of its tree."""


class Kv(RequestModel):
    """Asks for a handle a group, and one a segment of a tree that is gone on from. The lease runs
    from the end of the rollout; the server may grant less.
    """

    lease_seconds: LeaseSeconds = 60.0


class KvLease(RequestModel):
    """The body of POST /v1/kv/{handle}/lease."""

    seconds: LeaseSeconds = 60.0


class KvLeaseAnswer(AnswerModel):
    """How long the lease runs from now: renewing never shortens it."""

    lease_seconds: float


class KvLocator(AnswerModel):
    """One way to the bytes; newer servers may know others.

    `http`: at `url`. `shm`: from `offset` of `path` on, which a process of the server's user on
    its host can map. `nixl`: from `offset` of the memory of `agent` on, see KvAgent.
    """

    transport: str
    url: str | None = None
    path: str | None = None
    offset: int | None = None
    agent: str | None = None


class KvAgent(AnswerModel):
    """The answer of GET /v1/kv/{handle}/agent: the NIXL agent to read from. Its memory begins at
    `address`; `metadata` is what NIXL has to know of it, in base64.
    """

    agent: str
    address: int
    metadata: str


class KvHandle(AnswerModel):
    """What an answer says of a prompt's keys and values, or of those of a path in a tree."""

    handle: str
    version: str
    num_tokens: int
    num_bytes: int
    lease_seconds: float
    locators: list[KvLocator]


class KvLayout(KvHandle):
    """The answer of GET /v1/kv/{handle}. `num_bytes` is the whole file's, `data_offset` where the
    first tensor begins; `lease_seconds` is what is left.
    """

    model: str
    dtype: Literal["float32", "bfloat16", "float16"]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    rope: dict[str, Any]
    tokens_sha256: str
    exact: bool
    data_offset: int
    etag: str
