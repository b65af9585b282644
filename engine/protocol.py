"""The engine interface of the service, without vLLM types.

An engine serves one model. Every method runs on the service's event loop. The fake engine of the
tests and the vLLM engine pass the same contract tests.
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from engine.kv_types import ExportSlot, KvFormat, KvLoad

PauseMode = Literal["abort", "wait", "keep"]
ActivationMode = Literal["keep", "recompute", "wait", "abort"]
EngineStage = Literal["starting", "serving", "activating", "stopping", "dead"]
EngineFinishReason = Literal["stop", "length", "abort", "error"]
KvReason = Literal["disabled", "unsupported_cache"]
AttentionFallbackReason = Literal[
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
"""Reason why a step used vLLM's attention: kernel limitations, then properties of the step."""

DraftScope = Literal["self", "siblings", "prompt", "all", "drafter"]
"""Source of a drafted token.

self: the sample's own text; siblings: other running samples of its group; prompt: earlier responses
to the same prompt; all: any text in the draft store; drafter: the draft model.
"""
SpeculationDecision = Literal[
    "drafted", "nothing_drafted", "not_worth_it", "checked", "resting", "probed"
]
"""Outcome of a step's drafts.

drafted: sent to verification. nothing_drafted: no drafts found. not_worth_it: verification would
cost more time than it saves. checked: left out to measure the cost of a step without drafts.
resting: drafting is suspended for a while because it cost more than it saved. probed: a single
token is drafted while suspended, to measure the drafter's acceptance.
"""
SpeculationSkipReason = Literal["refused", "seeded", "no_room", "failed"]
"""Reason why a sample or step was not speculated.

refused: the request disables speculation. seeded: the request has a seed. no_room: the store
accepts no more concurrent responses to one prompt. failed: an error in a step, which is logged.
"""
DrafterOutcome = Literal["promoted", "rolled_back", "failed"]
"""Result of a drafter's test.

promoted: its acceptance rate was at least as high. rolled_back: it was lower. failed: the drafter
could not be loaded.
"""
TrainingState = Literal["off", "running", "paused", "failed"]
"""State of drafter training.

off: not enabled. running: enabled. paused: suspended while the engine is busy. failed: stopped for
good because the trainer process exited too often.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters and stop conditions."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One sample to generate.

    `id` is assigned by the server and unique. One sample of a group may carry an export; it is
    written once, as soon as the prompt is prefilled.

    `entropy_top_k` and `num_top_logprobs` are mutually exclusive. The former returns per token the
    renormalised entropy of the top k tokens, the latter the top k tokens themselves. Prefixes are
    shared among samples with the same `cache_salt`, and among samples without one. Samples of the
    same `group` may be drafted from each other's text, unless `speculation` is false. `adapter` is
    the label of a loaded adapter.
    """

    id: str
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    seed: int | None = None
    priority: int = 0
    export: ExportSlot | None = None
    entropy_top_k: int = 0
    num_top_logprobs: int = 0
    cache_salt: str | None = None
    group: str | None = None
    speculation: bool = True
    load: KvLoad | None = None
    adapter: str | None = None


class TokenLogprob(NamedTuple):
    """Log-probability of a token and its rank, counted from 1."""

    token_id: int
    logprob: float
    rank: int


TopLogprobs = list[TokenLogprob]
"""The sampled token's logprob, then the top k, which may include the sampled token again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """A validated LoRA adapter. `rank` is the highest rank of its modules."""

    rank: int
    num_modules: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """Chat messages in OpenAI's format.

    Only the `template_options` listed in `EngineInfo.template_variables` are rendered; others are
    ignored.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call. `arguments` is the JSON text that the model generated."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatResponse:
    """A response, split into content, reasoning and tool calls.

    `parsed` is false if a parser failed; then the whole text is the content.
    """

    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    parsed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens start..end (end excluded), sampled under one weights version."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished sample, with one logprob and one weights version per token.

    `num_cached_tokens` is the number of prompt tokens found in the prefix cache or loaded.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish: EngineFinishReason
    versions: tuple[VersionSpan, ...]
    num_cached_tokens: int
    entropy: list[float] | None = None
    top_logprobs: list[TopLogprobs] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Properties of a running engine, constant from start to stop."""

    model: str
    """Served model name."""
    model_given: str
    """The `model` setting, possibly a path. Accepted in requests, never returned in responses."""
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
    """Layout of exported prompt KV. None if prompts cannot be exported; `kv_reason` says why."""
    kv_reason: KvReason | None = None
    max_adapters: int = 0
    """Maximum number of loaded adapters. 0 disables adapters."""
    max_adapter_rank: int = 0
    max_logprobs: int = 0
    """Maximum number of top logprobs per token that a request may ask for."""
    template_variables: frozenset[str] = frozenset()
    """Names in `ChatRequest.template_options` that the chat template uses."""
    max_token_chars: int | None = None
    """Maximum characters of text per token.

    A text longer than this times the context length cannot fit. None if unknown.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """Liveness of the engine: its stage and the seconds since the last heartbeat."""

    stage: EngineStage
    alive: bool
    age_seconds: float
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixStats:
    """Counters of shared-prefix attention since the engine started."""

    steps_grouped: int = 0
    rows_grouped: int = 0
    prefix_bytes_not_read: int = 0
    steps_skipped: Mapping[AttentionFallbackReason, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """Counters of speculative decoding since the engine started.

    `drafts` counts drafts by their length. `version_drafted` and `version_accepted` count since the
    last change of weights. `gain_ratio` is the estimated time of the recent steps' tokens without
    drafts, divided by their actual time. `cost_error_ratio` is the relative error of the step time
    predictions. `store_bytes` is the current size of the draft store.
    """

    drafted: Mapping[DraftScope, int] = field(default_factory=dict)
    accepted: Mapping[DraftScope, int] = field(default_factory=dict)
    drafts: Mapping[int, int] = field(default_factory=dict)
    steps: Mapping[SpeculationDecision, int] = field(default_factory=dict)
    skipped: Mapping[SpeculationSkipReason, int] = field(default_factory=dict)
    version_drafted: int = 0
    version_accepted: int = 0
    gain_ratio: float = 1.0
    cost_error_ratio: float = 0.0
    store_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterPairStats:
    """Acceptance of a drafter under one weights version.

    `first_accepted` of `first_drafted` first tokens were accepted. Unlike the rate over all drafted
    tokens, this rate does not depend on draft lengths.
    """

    drafter: str
    weights: str
    drafted: int
    accepted: int
    first_drafted: int
    first_accepted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterStatus:
    """The serving drafter, the candidate under or awaiting test, and training progress.

    Training progress is the number of steps, the number of tokens and the recent loss per token.
    `pairs` are the most recent pairs of drafter and weights, the latest last.
    """

    serving: str
    candidate: str | None = None
    pairs: tuple[DrafterPairStats, ...] = ()
    outcomes: Mapping[DrafterOutcome, int] = field(default_factory=dict)
    training: TrainingState = "off"
    num_steps: int = 0
    num_tokens: int = 0
    loss: float = 0.0
    samples_dropped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaGraphStats:
    """Planned CUDA graphs and their use by steps.

    `hits` are decode steps that ran with a graph. `misses` are decode steps without one, keyed by
    the number of samples, rounded up to a power of two, and the tokens per sample, 0 where these
    differed. `mixed` are steps that also prefilled.
    """

    num_graphs: int = 0
    budget_bytes: int = 0
    estimated_bytes: int = 0
    measured_bytes: int = 0
    hits: int = 0
    mixed: int = 0
    misses: Mapping[tuple[int, int], int] = field(default_factory=dict)


class Engine(Protocol):
    """Interface of an engine.

    start/stop: once each. start stamps `version` on every token. It raises StartFailed with the
        reason, which `health` reports too. stop is idempotent and leaves no process and no shared
        memory behind.
    shared_prefix, speculation, graphs: counters as of the last heartbeat, at most one second old.
    kill: ends the engine's processes at once; all pending calls raise EngineDead. stop follows.
    token_texts: the text of each token alone, special tokens included.
    token_pieces: each token as written in the tokenizer's vocabulary.
    encode_chat: raises RequestRefused if the chat template does not render the request. Raises
        ConversationRefused if an option is an argument of the tokenizer or too large, or if the
        parsers do not accept the messages or tools. Raises PromptTooLong if the prompt does not fit
        into the context. No prompt is truncated or padded. The request is not modified.
    chat_response: parses a response to an encoded chat request with the configured parsers. Without
        a parser, the whole response is content. Tool calls are parsed only if the request has
        tools. A parser's failure is logged and never raised.
    submit: adds all samples of the call to the engine in one iteration of the event loop, in order.
        Returns one awaitable per sample, each to be awaited once. Raises RequestRefused before any
        sample is added. An awaitable raises EngineDead as soon as the engine is known to be gone.
    abort: the samples' awaitables finish at once with finish="abort" and the tokens so far. Unknown
        and finished ids are ignored.
    score: logprobs of the response's tokens after the prompt, under the model's own distribution at
        temperature 1, with or without an adapter. Cancelling the call cancels the work.
    top_logprobs: the logprob of every prompt token, as in `score`, with the top k tokens. The entry
        of the first token is empty.
    flush_exports: returns when every export of a previously submitted sample that has finished or
        was aborted is written or never will be. Then its slot may be reused. No write that began
        earlier is still in progress either: a status that is PENDING while the engine is paused can
        become COMMITTED only under the weights that serve after resume.
    reset_prefix_cache: call while paused. No prefix that was prefilled earlier is found again.
    pause/resume: idempotent. After pause no token is sampled. submit still accepts samples, which
        wait. `recompute` drops the KV cache of frozen samples, which is prefilled again after
        resume.
    check_weights: raises CheckpointRefused if the files could not be served. Changes nothing. May
        block for seconds, so call it outside the event loop.
    update_weights: call while paused; the caller resumes. Loads validated files, resets the prefix
        cache and stamps `version` on every token sampled from then on. LoadFailed: the previous
        weights are restored. EngineDead: they are not, and the engine must not be resumed. Adapters
        stay loaded and apply to the new weights.
    drafter: None without a draft model; then the drafter methods below must not be called.
    drafter_file: all tensors of the serving drafter. The file may be replaced at any later time.
    check_drafter: as check_weights, against the drafter.
    submit_drafter: moves the validated file away, outside the event loop, for a test.
        DrafterRefused: the file was not moved.
    check_adapter: as check_weights, for the directory of a LoRA adapter.
    load_adapter: loads a validated directory under a label that is not in use; at most
        `info.max_adapters`. The directory must not change until the adapter is unloaded. Samples
        keep running. A reused label never matches prefixes cached under its earlier adapter.
        LoadFailed: nothing has changed.
    unload_adapter: no sample may run under the adapter. Unknown labels are ignored.
    """

    @property
    def info(self) -> EngineInfo: ...

    def health(self) -> EngineHealth: ...

    def shared_prefix(self) -> SharedPrefixStats: ...

    def speculation(self) -> SpeculationStats: ...

    def graphs(self) -> CudaGraphStats: ...

    async def start(self, version: str) -> None: ...

    async def stop(self) -> None: ...

    def kill(self) -> None: ...

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def encode_chat(self, chat_request: ChatRequest) -> list[int]: ...

    def chat_response(
        self, token_ids: Sequence[int], chat_request: ChatRequest
    ) -> ChatResponse: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_texts(self, token_ids: Sequence[int]) -> list[str]: ...

    def token_pieces(self, token_ids: Sequence[int]) -> list[str]: ...

    async def submit(self, samples: Sequence[SampleRequest]) -> list[Awaitable[Completion]]: ...

    async def score(
        self, prompt: Sequence[int], response: Sequence[int], adapter: str | None = None
    ) -> list[float]: ...

    async def top_logprobs(
        self, prompt: Sequence[int], num_top_logprobs: int, adapter: str | None = None
    ) -> list[TopLogprobs]: ...

    async def abort(self, sample_ids: Sequence[str]) -> None: ...

    async def flush_exports(self) -> None: ...

    async def pause(self, mode: PauseMode, *, recompute: bool = False) -> None: ...

    async def resume(self) -> None: ...

    async def reset_prefix_cache(self) -> None: ...

    def check_weights(self, path: Path) -> None: ...

    async def update_weights(self, path: Path, version: str) -> None: ...

    def drafter(self) -> DrafterStatus | None: ...

    def drafter_file(self) -> Path: ...

    def check_drafter(self, path: Path) -> None: ...

    async def submit_drafter(self, path: Path, version: str) -> None: ...

    def check_adapter(self, path: Path) -> AdapterInfo: ...

    async def load_adapter(self, label: str, path: Path) -> None: ...

    async def unload_adapter(self, label: str) -> None: ...
