"""The engine as the service sees it: samples in, completions out, no vLLM type in sight.

One engine serves one model. Every method runs on the service's event loop. The fake engine of the
tests and the real one obey the same contract tests.
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
"""Why a step went to stock attention: what the kernel cannot do, then what the step was."""

DraftScope = Literal["self", "siblings", "prompt", "all", "drafter"]
"""Whose text a drafted token is taken from: the sample's own, its live siblings', earlier responses
to the same prompt, everything; the last is the text that a drafter writes."""
SpeculationDecision = Literal[
    "drafted", "nothing_drafted", "not_worth_it", "checked", "resting", "probed"
]
"""What became of a step's drafts: sent; there were none; verifying would cost more than it saves;
left out, to measure what a step costs without; all left out for a while, because they cost more
than they saved; a single token sent all the same, to see how a drafter does."""
SpeculationSkipReason = Literal["refused", "seeded", "no_room", "failed"]
"""Why a sample got no drafts: its request said so; it has a seed; the store takes no more responses
to one prompt at once; and of a step: an error, which is in the log."""
DrafterOutcome = Literal["promoted", "rolled_back", "failed"]
"""How a trial ended: the new drafter was accepted as often, or less; it could not be loaded."""
TrainingState = Literal["off", "running", "paused", "failed"]
"""Whether the drafter learns: not asked for; it does; not while the engine is busy; not any more,
for it ended by itself too often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The distribution that tokens are drawn from, and where a sample ends."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One sample to draw. `id` is the server's own and never repeats. One sample of a group may
    carry an export; it is written once, as soon as the prompt is computed.

    With `entropy_top_k` k, every token comes with the entropy of the k likeliest, renormalised;
    with `num_top_logprobs` k these come themselves. Not both.
    Prefixes are shared among samples of the same `cache_salt`, and of none. Samples of one `group`
    may be drafted from each other's text, unless they refuse `speculation`. An `adapter` is one
    that was loaded under this label.
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
    """A token's log-probability, and how many were likelier, counted from 1."""

    token_id: int
    logprob: float
    rank: int


TopLogprobs = list[TokenLogprob]
"""The token that is there, then the likeliest, itself again if it is one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """A LoRA adapter that was checked; `rank` is the highest of its modules'."""

    rank: int
    num_modules: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """Messages as OpenAI writes them. Of `template_options` those are rendered that the facts name;
    others change nothing."""

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
class ChatResponse:
    """A response, split into content, reasoning and tool calls.

    `parsed` is false if a parser failed on it; then all of it is content.
    """

    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    parsed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens start..end (end excluded) were sampled under this weights version."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished sample: exactly one logprob and one version for every token.

    `num_cached_tokens` of its prompt were found in the cache or loaded.
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
    """What a running engine is; fixed from its start to its end."""

    model: str
    """The name that it is served under."""
    model_given: str
    """As the setting has it, maybe a path: accepted from callers, and told to none."""
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
    max_adapters: int = 0
    """How many may be loaded at once; 0: none are served."""
    max_adapter_rank: int = 0
    max_logprobs: int = 0
    """How many of the likeliest tokens a request may ask for."""
    template_variables: frozenset[str] = frozenset()
    """The names among `ChatRequest.template_options` that the chat template renders."""
    max_token_chars: int | None = None
    """Of text: a longer one than this many per token of context cannot fit. None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """A sign of life: what the engine is doing and for how long it has given no other sign."""

    stage: EngineStage
    alive: bool
    age_seconds: float
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixStats:
    """What shared-prefix attention has done since the engine started; it only grows."""

    steps_grouped: int = 0
    rows_grouped: int = 0
    prefix_bytes_not_read: int = 0
    steps_skipped: Mapping[AttentionFallbackReason, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """What speculation has done since the engine started: counts that only grow, but for the last.

    `drafts` are numbered by their length. `version_drafted` and `version_accepted` are since the
    weights changed last. `gain_ratio`: the time that the last steps' tokens would have taken
    without drafts, over the time that they took. `cost_error_ratio`: how far off the predictions of
    these times were.
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
    """What a drafter has done for one version of the weights. Of `first_drafted` drafts so many
    first tokens were accepted: a rate that does not depend on how long drafts were."""

    drafter: str
    weights: str
    drafted: int
    accepted: int
    first_drafted: int
    first_accepted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterStatus:
    """Which drafter serves, which is on trial or waits for it, and how training goes: steps, tokens
    learned from, and the loss a token of late. `pairs` are the latest few, the last one last."""

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
    """The CUDA graphs that were captured to a plan, if any were, and how steps have used them.

    `hits` decoded with a graph; `misses` decoded without one, by samples, rounded up to a power of
    two, and tokens a sample, 0 where they differed; `mixed` steps computed prompts too.
    """

    num_graphs: int = 0
    budget_bytes: int = 0
    estimated_bytes: int = 0
    measured_bytes: int = 0
    hits: int = 0
    mixed: int = 0
    misses: Mapping[tuple[int, int], int] = field(default_factory=dict)


class Engine(Protocol):
    """Contract.

    start/stop: once each. start stamps `version` on every token; StartFailed says why not, and so
        does the pulse. stop is idempotent and leaves no process and no shared memory behind.
    shared_prefix, speculation, graphs: what was counted at the last sign of life; a second
        old at most.
    kill: the engine's processes end at once; everybody who waits gets EngineDead. stop follows.
    token_texts: the text of each token alone, special tokens included.
    token_pieces: each token as the tokenizer's vocabulary writes it.
    encode_conversation: RequestRefused if the model's template does not render it; as
        ConversationRefused if an option is an argument of the tokenizer's, or large, or if the
        parsers would not take the messages or tools; as PromptTooLong if it does not fit into the
        context. No prompt is cut or padded. The conversation is not changed.
    reply: the parsers that the engine was given, on a response to a conversation that was encoded;
        without a parser, and without tools, a response is all content. A parser's failure is logged
        and never raised.
    submit: all samples of the call enter the engine in one turn of the loop, in order; the answer
        holds one awaitable per sample, each to be awaited once. Raises RequestRefused before any
        entered. An awaitable raises EngineDead as soon as the engine is known to be gone.
    abort: the samples' awaitables finish at once with finish="abort" and the tokens so far;
        unknown and finished ids are ignored.
    score: log-probabilities of the response's tokens after the prompt, under the model's own
        distribution at temperature 1, with or without an adapter. Cancelling it ends the work.
    likeliest: of every token of a prompt as `score` has it, with so many of the likeliest; nothing
        at the first.
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
        Adapters stay loaded, and go on over the new weights.
    drafter: None where no small model drafts; then nothing below may be called.
    drafter_file: all tensors of the drafter that serves; it may be replaced at any time after.
    check_drafter: as check_weights, against the drafter.
    offer_drafter: takes the checked file away, off the loop, for a trial. DrafterRefused: it was
        not taken.
    check_adapter: as check_weights, for the directory of a LoRA adapter.
    load_adapter: from a checked directory, which stays as it is until it is unloaded, under a label
        that is not in use; at most `info.max_adapters`. Samples run on meanwhile. A label that was
        used before never meets prefixes of that time. LoadFailed: nothing has changed.
    unload_adapter: of an adapter that no sample runs under; unknown labels are ignored.
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
