"""Wire types of prompt KV: request option, handle, lease, and layout of the file.

The data is one safetensors file with the tensors k.0, v.0, k.1 and so on. Each is C-contiguous with
the shape [kv_heads, tokens, head_dim]; keys are stored after rotary embedding. The file covers the
prompt without its last token, which must be computed to score the first response token anyway. A
layer with a sliding window has only the last tokens of it.
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
"""Reason why a group, or a segment of its tree, has no handle although one was requested."""


class Kv(RequestModel):
    """Rollout option: return a handle to the prompt KV of every group.

    In a tree, every segment that has children gets a handle, too.

    The lease starts at the end of the rollout. The server may grant less.
    """

    lease_seconds: LeaseSeconds = 60.0


class KvLease(RequestModel):
    """Body of POST /v1/kv/{handle}/lease, which renews the lease of a prompt-KV handle."""

    lease_seconds: LeaseSeconds = 60.0


class KvLeaseAnswer(AnswerModel):
    """Remaining lease of a prompt-KV handle; a renewal never shortens it."""

    lease_seconds: float


class KvLocator(AnswerModel):
    """One way to read the data of a prompt-KV handle; newer servers may offer others.

    `http`: at `url`. `shm`: at `offset` of the file `path`, which a process of the server's user on
    the same host can map. `nixl`: at `offset` of the memory of `agent`, see KvAgent. `cuda_ipc`: at
    `offset` of every GPU memory of `agent`, see KvGpu.
    """

    transport: str
    url: str | None = None
    path: str | None = None
    offset: int | None = None
    agent: str | None = None


class KvAgent(AnswerModel):
    """Answer of GET /v1/kv/{handle}/agent: the server's NIXL agent to read the KV from.

    `address` is the start of its memory, `metadata` its NIXL metadata in base64.
    """

    agent: str
    address: int
    metadata: str


class KvGpuIpc(AnswerModel):
    """Arguments with which PyTorch opens GPU memory of another process by CUDA IPC.

    The memory is the bytes [offset, offset + num_bytes) of an allocation. `handle`, `ref_counter`
    and `event` are base64.
    """

    handle: str
    num_bytes: int
    offset: int
    ref_counter: str
    ref_counter_offset: int
    event: str
    event_sync_required: bool


class KvGpuMemory(AnswerModel):
    """GPU memory of one of the server's ranks, with the KV heads [first_head, + num_heads).

    A part of it has these heads of a prompt, [num_layers, 2, num_heads, num_tokens, head_dim] with
    keys before values, contiguous. `gpu` is the UUID of the GPU.
    """

    gpu: str
    num_bytes: int
    first_head: int
    num_heads: int
    ipc: KvGpuIpc


class KvGpu(AnswerModel):
    """Answer of GET /v1/kv/{handle}/gpu: the GPU memory of all ranks that have KV heads.

    It stays the same until the server restarts, and `agent` is then another one.
    """

    agent: str
    ranks: list[KvGpuMemory]


class KvHandle(AnswerModel):
    """Handle to the KV of a prompt, or of a path in a rollout tree, and ways to read the KV."""

    handle: str
    version: str
    num_tokens: int
    num_bytes: int
    lease_seconds: float
    locators: list[KvLocator]


class KvLayerShape(AnswerModel):
    """Shape of a layer's keys and values; the layer has the tokens from `first_token` on."""

    num_kv_heads: int
    head_dim: int
    first_token: int


class KvLayout(KvHandle):
    """Answer of GET /v1/kv/{handle}: the layout of the prompt-KV file.

    `num_bytes` is the size of the whole file, `data_offset` the offset of its first tensor,
    `lease_seconds` the remaining lease. `num_kv_heads` and `head_dim` are those of the first layer.
    `layers` is None if all layers have this shape and all tokens.
    """

    model: str
    dtype: Literal["float32", "bfloat16", "float16"]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    layers: list[KvLayerShape] | None = None
    rope: dict[str, Any]
    tokens_sha256: str
    exact: bool
    data_offset: int
    etag: str
