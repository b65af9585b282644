"""The engine as the service sees it: samples in, completions out, no vLLM type in sight.

One engine serves one model. Every method runs on the service's event loop. The fake engine of the
tests and the real one obey the same contract tests.
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal, Protocol

PauseMode = Literal["abort", "wait", "keep"]
ActivationMode = Literal["keep", "recompute", "wait", "abort"]
EngineStage = Literal["starting", "serving", "activating", "stopping", "dead"]
EngineFinish = Literal["stop", "length", "abort", "error"]
KvReason = Literal["disabled", "unsupported_cache"]
SkipReason = Literal[
    "not_built",
    "isa",
    "dtype",
    "kv_cache_dtype",
    "head_size",
    "block_size",
    "not_causal",
    "sliding_window",
    "soft_cap",
    "alibi",
    "sinks",
    "query_length",
    "nothing_shared",
    "not_worth_it",
    "failed",
]
"""Why a step went to stock attention: what the kernel cannot do, then what the step was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The distribution that tokens are drawn from, and where a sample ends."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class ExportWord(IntEnum):
    """What a rank has to say about its part of an export: written once, after the bytes."""

    PENDING = 0
    COMMITTED = 1
    MIXED_VERSION = 2
    FAILED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFormat:
    """The canonical layout of a prompt's keys and values: for each layer in order, K then V, each
    [kv_heads, tokens, head_dim], C-contiguous, nothing in between; keys after rotary embedding.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: Literal["float32", "bfloat16", "float16"]
    rope: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSlot:
    """Where the engine writes the keys and values of the prompt's first `num_tokens` tokens.

    Every rank writes its own heads at their place in the canonical layout, which starts at `offset`
    of the file, and then its ExportWord, 8 bytes little-endian, at `words_offset + 8 * rank`.

    The file is fully allocated, zero at the words, and keeps its size for as long as the engine
    lives. `offset` is a multiple of 64. A slot that leaves the file is not written to: FAILED.
    """

    arena: Path
    offset: int
    words_offset: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One sample to draw. `id` is the server's own and never repeats. One sample of a group may
    carry an export; it is written once, as soon as the prompt is computed.

    With `entropy_over` k, every token comes with the entropy of the k likeliest, renormalised.
    Prefixes are shared among samples of the same `cache_salt`, and of none.
    """

    id: str
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    seed: int | None = None
    priority: int = 0
    export: ExportSlot | None = None
    entropy_over: int = 0
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages as OpenAI writes them; `template_options` are the model's own template's."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """`arguments` is JSON, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a response says: to whom it may concern, to itself, and to tools."""

    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens start..end (end excluded) were sampled under this weights version."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished sample: exactly one logprob and one version for every token."""

    token_ids: list[int]
    logprobs: list[float]
    finish: EngineFinish
    versions: tuple[VersionSpan, ...]
    num_cached_tokens: int
    entropy: list[float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What a running engine is; fixed from its start to its end."""

    model: str
    model_path: Path
    dtype: str
    device: Literal["cpu", "cuda"]
    block_size: int
    num_blocks: int
    kv_bytes_per_token: int
    max_context_tokens: int
    max_sequences: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tensor_parallel_size: int
    pipeline_parallel_size: int
    cpu_threads: int | None
    vllm_version: str
    kv_format: KvFormat | None = None
    """None: prompt keys and values cannot be exported, for `kv_reason`."""
    kv_reason: KvReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """A sign of life: what the engine is doing and for how long it has given no other sign."""

    stage: EngineStage
    alive: bool
    age_seconds: float
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixCounts:
    """What shared-prefix attention has done since the engine started; it only grows."""

    steps_grouped: int = 0
    rows_grouped: int = 0
    prefix_bytes_not_read: int = 0
    steps_skipped: Mapping[SkipReason, int] = field(default_factory=dict)


class Engine(Protocol):
    """Contract.

    start/stop: once each. start stamps `version` on every token; StartFailed says why not, and so
        does the pulse. stop is idempotent and leaves no process and no shared memory behind.
    shared_prefix: what was counted at the last sign of life; a second old at most.
    kill: the engine's processes end at once; everybody who waits gets EngineDead. stop follows.
    encode_conversation: RequestRefused if the model's template does not render it.
    reply: the parsers that the engine was given, on a response to that conversation; without a
        parser, and without tools, a response is all content.
    submit: all samples of the call enter the engine in one turn of the loop, in order; the answer
        holds one awaitable per sample, each to be awaited once. Raises RequestRefused before any
        entered. An awaitable raises EngineDead as soon as the engine is known to be gone.
    abort: the samples' awaitables finish at once with finish="abort" and the tokens so far;
        unknown and finished ids are ignored.
    score: log-probabilities of the response's tokens after the prompt, under the model's own
        distribution at temperature 1. Cancelling it ends the work.
    settle_exports: returns when every export whose sample was submitted before, and has ended or
        was aborted by now, is written or never will be: then its slot may be given to another. Nor
        is any other write under way that began before: a word that is PENDING while the engine is
        paused will, if ever, be COMMITTED under the weights that it resumes with.
    forget_prefixes: to be called while paused. No prefix that was computed so far is found again.
    pause/resume: idempotent. After pause no token is sampled; submit still takes samples, they
        wait. `recompute` drops the cache of frozen samples: they recompute it after resume.
    check_weights: CheckpointRefused if the files could not be served; touches nothing, may block
        for seconds, so it is to be called off the loop.
    swap_weights: to be called while paused; the caller resumes. Loads checked files, forgets every
        cached prefix and stamps `version` on every token sampled from then on. LoadFailed: the
        previous weights are back. EngineDead: they are not, and the engine must not be resumed.
    """

    @property
    def facts(self) -> EngineFacts: ...

    def pulse(self) -> Pulse: ...

    def shared_prefix(self) -> SharedPrefixCounts: ...

    async def start(self, version: str) -> None: ...

    async def stop(self) -> None: ...

    def kill(self) -> None: ...

    def encode_text(self, text: str) -> list[int]: ...

    def encode_messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]: ...

    def encode_conversation(self, conversation: Conversation) -> list[int]: ...

    def reply(self, token_ids: Sequence[int], conversation: Conversation) -> Reply: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    async def submit(self, samples: Sequence[SampleRequest]) -> list[Awaitable[Completion]]: ...

    async def score(self, prompt: Sequence[int], response: Sequence[int]) -> list[float]: ...

    async def abort(self, sample_ids: Sequence[str]) -> None: ...

    async def settle_exports(self) -> None: ...

    async def pause(self, mode: PauseMode, *, recompute: bool = False) -> None: ...

    async def resume(self) -> None: ...

    async def forget_prefixes(self) -> None: ...

    def check_weights(self, path: Path) -> None: ...

    async def swap_weights(self, path: Path, version: str) -> None: ...
