"""Interface between the service and its inference engine, without vLLM types.

An engine serves one model. Every method runs on the service's event loop. The fake engine of the
tests and the vLLM engine pass the same contract tests.
"""

from collections.abc import Awaitable, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.feature_stats import (
    CudaGraphStats,
    DrafterStatus,
    KeptKvStats,
    KvRetentionStats,
    SharedPrefixStats,
    SpeculationStats,
)
from engine.types import (
    AdapterInfo,
    ChatRequest,
    ChatResponse,
    Completion,
    EngineHealth,
    EngineInfo,
    PauseMode,
    SampleRequest,
    Sampling,
    SleepLevel,
    SleepTag,
    TopLogprobRows,
    VersionSpan,
)
from engine.weights.ipc_tensors import IpcTensors
from engine.weights.magnitudes import UNKNOWN, Magnitudes

DEFAULT_SAMPLING = Sampling(max_tokens=1)


class ResponseStream(Protocol):
    """Incremental conversion of one sample's tokens to text. Use it from one thread at a time.

    `add` takes the next tokens and returns the text that they complete, never a part of a
    character. `finish` takes the last tokens of a sample that has ended, and returns what remains
    of its tool calls. `is_parsed`: parsers are applied, which may take milliseconds per call.
    `has_tool_calls`: tool calls are returned in parts; otherwise their text is not separated. A
    parser's failure is logged and never raised; nothing is returned after it.
    """

    @property
    def is_parsed(self) -> bool: ...

    @property
    def has_tool_calls(self) -> bool: ...

    def add(self, token_ids: Sequence[int]) -> ChatResponse: ...

    def finish(self, token_ids: Sequence[int], stop_reason: int | str | None) -> ChatResponse: ...


class Engine(Protocol):
    """Interface between the service and an engine: methods, their errors and their guarantees.

    start/stop: once each. start stamps `version` on every token. It raises StartFailed with the
        reason, which `health` reports too. stop is idempotent and leaves no process and no shared
        memory behind.
    shared_prefix, speculation, graphs, kept_kv, session_kv: counters of the last heartbeat, at most
        two seconds old.
    kill: ends the engine's processes at once; all pending calls raise EngineDead. stop follows.
    token_texts: the text of each token alone, special tokens included.
    token_pieces: each token as written in the tokenizer's vocabulary.
    encode_chat: raises RequestRefused if the chat template does not render the request. Raises
        ConversationRefused if an option is an argument of the tokenizer or too large, or if the
        parsers do not accept the messages or tools. Raises PromptTooLong if the prompt does not fit
        into the context. No prompt is truncated or padded. The request is not modified.
    encode_chat_after: the tokens that the chat template puts after the assistant's message at
        `index`: its end, the messages after it and the generation prompt. They do not depend on the
        text of that message. `last_token` is the last token of the sample that the message was
        parsed from; a sample that has ended with an EOS token needs no other end. Raises as
        `encode_chat` does, and NoTurnEnd if the end of the message cannot be found.
    chat_response: parses a response to an encoded chat request with the configured parsers. Without
        a parser, the whole response is content. Tool calls are parsed only if the request has
        tools. The text is cut at the stop string that has ended the response. A parser's failure is
        logged and never raised.
    response_stream: converts a running sample's tokens as `decode` does, or as `chat_response`
        does if the chat request to which `prompt` was encoded is given. Text that may be the
        beginning of a stop string is held back. Tool calls are not parsed. A parser may split a
        part of a response differently from the whole.
    check_sampling: raises SamplingRefused if a sampling parameter cannot be applied, or if
        compiling its structured outputs takes too long. Call it once before `submit`. Checks of
        structured outputs take turns by `client`; raises QueueFull if too many wait.
    submit: adds all samples of the call to the engine in one iteration of the event loop, in order.
        Returns one awaitable per sample, each to be awaited once. Raises RequestRefused before any
        sample is added. An awaitable raises EngineDead as soon as the engine is known to be gone.
        While the awaitable of a sample with `on_tokens` is awaited, `on_tokens` is called with the
        new tokens, at most once per engine step and never after the awaitable has finished. Tokens
        of several steps are delivered together if the event loop is late. The deltas are
        consecutive, and the tokens after the last one are in the completion only.
    abort: the samples' awaitables finish at once with finish="abort" and the tokens so far. Unknown
        and finished ids are ignored.
    progress: per sample, the version spans of the tokens sampled so far. Empty for samples that
        wait, have finished or are unknown. Takes time proportional to the number of ids.
    score: logprobs of the response's tokens after the prompt, under the model's own distribution at
        temperature 1, with or without an adapter. Cancelling the call cancels the work.
    top_logprobs: the logprob of every prompt token, as in `score`, with the top k tokens. The entry
        of the first token is empty. With `given` [prompt tokens, m], the logprobs of these tokens
        instead of the top k; its first row is ignored.
    flush_exports: returns when every export of a previously submitted sample that has finished or
        was aborted is written or never will be. Then its slot may be reused. No write that began
        earlier is still in progress either: a status that is PENDING while the engine is paused can
        become COMMITTED only under the weights that serve after resume.
    reset_prefix_cache: call while paused. No prefix that was prefilled earlier is found again.
    release_session_kv: call when sessions have ended, whose KV is then evicted like all other. Each
        sample with a `session_id` retains its KV when it ends, until the session's next sample.
        Unknown sessions are ignored.
    pause/resume: idempotent. After pause no token is sampled. submit still accepts samples, which
        wait. `recompute` drops the KV cache of frozen samples, which is prefilled again after
        resume. `wait` and `abort` let samples continue that `keep` has frozen. A pause in mode
        `wait` may be cancelled; pause or resume next.
    sleep: call while awake, and paused with `recompute`, with exports flushed. Releases the memory
        of the KV cache, and of the weights if `tags` has them: level 1 keeps them in host memory,
        level 2 drops them. LoadFailed: the weights could not be loaded again, and nothing was
        released. Only while `info.can_sleep`. Do not resume, load weights or load adapters before
        wake.
    wake: allocates the memory with these tags. MemoryUnavailable: it is not free on the device,
        and nothing has changed. As soon as everything is awake, dropped weights and adapters are
        loaded again, unless others were loaded meanwhile. Instead of weights without files the last
        files are loaded, and their version is stamped and returned. EngineDead: the engine must not
        be resumed. Tags that are awake are ignored.
    check_weights: raises CheckpointRefused if the files could not be served. Changes nothing. May
        block for seconds, so call it outside the event loop. `magnitudes` are those of the tensors
        of a single file, as far as they are known: these values are not read again.
    update_weights: call while paused; the caller resumes. Loads validated files, resets the prefix
        cache and stamps `version` on every token sampled from then on. With `keep_kv`, the prefixes
        of requests with `kept_kv` stay in the cache, and the number of their tokens is returned;
        else 0. LoadFailed: the previous weights are restored. EngineDead: they are not, and the
        engine must not be resumed. Adapters stay loaded and apply to the new weights.
    check_tensors: as check_weights, for tensors in a trainer's GPU memory, without their values.
    open_transfer: opens such tensors on all ranks and checks their values, if settings enable it,
        also while samples run. CheckpointRefused: none are open. LoadFailed: the files to be loaded
        after a failed load have changed. Call transfer_weights or close_transfer afterwards.
    close_transfer: closes the open tensors; none need be open.
    transfer_weights: as update_weights, with the open tensors, which it closes. FilesRestored,
        also of update_weights: the previous version had no files, and an earlier one is served and
        stamped. Its files must not change until others are loaded.
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

    def kept_kv(self) -> KeptKvStats: ...
    def session_kv(self) -> KvRetentionStats: ...

    async def start(self, version: str) -> None: ...

    async def stop(self) -> None: ...

    def kill(self) -> None: ...

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def encode_chat(self, chat_request: ChatRequest) -> list[int]: ...

    def encode_chat_after(
        self, chat_request: ChatRequest, index: int, *, last_token: int
    ) -> list[int]: ...

    def chat_response(
        self,
        token_ids: Sequence[int],
        chat_request: ChatRequest,
        *,
        stop_reason: int | str | None = None,
        sampling: Sampling = DEFAULT_SAMPLING,
    ) -> ChatResponse: ...

    def response_stream(
        self,
        sampling: Sampling = DEFAULT_SAMPLING,
        prompt: Sequence[int] = (),
        chat_request: ChatRequest | None = None,
    ) -> ResponseStream: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_texts(self, token_ids: Sequence[int]) -> list[str]: ...

    def token_pieces(self, token_ids: Sequence[int]) -> list[str]: ...

    async def check_sampling(self, sampling: Sampling, client: str = "") -> None: ...

    async def submit(self, samples: Sequence[SampleRequest]) -> list[Awaitable[Completion]]: ...

    def progress(self, sample_ids: Sequence[str]) -> list[tuple[VersionSpan, ...]]: ...

    async def score(
        self, prompt: Sequence[int], response: Sequence[int], adapter: str | None = None
    ) -> list[float]: ...

    async def top_logprobs(
        self,
        prompt: Sequence[int],
        num_top_logprobs: int,
        adapter: str | None = None,
        given: NDArray[np.int32] | None = None,
    ) -> TopLogprobRows: ...

    async def abort(self, sample_ids: Sequence[str]) -> None: ...

    async def flush_exports(self) -> None: ...

    async def pause(self, mode: PauseMode, *, recompute: bool = False) -> None: ...

    async def resume(self) -> None: ...

    async def reset_prefix_cache(self) -> None: ...

    async def release_session_kv(self, session_ids: Sequence[str]) -> None: ...

    async def sleep(self, level: SleepLevel, tags: AbstractSet[SleepTag]) -> None: ...

    async def wake(self, tags: AbstractSet[SleepTag]) -> str | None: ...

    def check_weights(self, path: Path, magnitudes: Magnitudes = UNKNOWN) -> None: ...

    async def update_weights(self, path: Path, version: str, *, keep_kv: bool = False) -> int: ...

    def check_tensors(self, tensors: IpcTensors) -> None: ...

    async def open_transfer(self, tensors: IpcTensors) -> None: ...

    async def close_transfer(self) -> None: ...

    async def transfer_weights(self, version: str, *, keep_kv: bool = False) -> int: ...

    def drafter(self) -> DrafterStatus | None: ...

    def drafter_file(self) -> Path: ...

    def check_drafter(self, path: Path) -> None: ...

    async def submit_drafter(self, path: Path, version: str) -> None: ...

    def check_adapter(self, path: Path) -> AdapterInfo: ...

    async def load_adapter(self, label: str, path: Path) -> None: ...

    async def unload_adapter(self, label: str) -> None: ...
