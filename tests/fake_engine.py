"""Engine without a model, for tests of the HTTP layer. It passes the real engine's contract tests.

It has no clock: a sample's tokens appear when the test calls `step`, or at once if the engine is
made with `instant=True`. Token i of a sample is the length of its prompt plus i. A prompt is
prefilled, and exported, in a sample's first step.
"""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from engine.errors import (
    CheckpointRefused,
    ConversationRefused,
    EngineDead,
    EngineError,
    FilesRestored,
    RequestRefused,
)
from engine.protocol.openai_server import OpenAIServer
from engine.protocol.optional_features import DRAFT_MODEL, FeatureKey, Interface, Stats
from engine.protocol.text import DEFAULT_SAMPLING
from engine.requests.stop_text import response_text
from engine.sampling.support_encoding import ALL, encode_mask
from engine.types.chat import ChatRequest, ChatResponse, EncodedPrompt, ToolCall, truncated
from engine.types.feature_stats import (
    CudaGraphStats,
    DrafterStatus,
    KeptKvStats,
    KvRetentionStats,
    SharedPrefixStats,
    SpeculationStats,
)
from engine.types.info import EngineHealth, EngineInfo, EngineStage, KeptKvReason, StartPhase
from engine.types.kv import ExportStatus
from engine.types.samples import (
    AdapterInfo,
    Completion,
    EngineFinishReason,
    KvVersionSpan,
    PauseMode,
    SampleRequest,
    Sampling,
    SleepLevel,
    SleepTag,
    TokenDelta,
    TopLogprobRows,
    VersionSpan,
)
from engine.weights.ipc_tensors import IpcTensor
from engine.weights.magnitudes import UNKNOWN, Magnitudes
from tests.fake_export import FORMAT, write_export

VOCAB_SIZE = 256
EOS = 0
ROLES = ("system", "user", "assistant", "tool")
BLOCK_SIZE = 32


@dataclass(eq=False)
class Running:
    request: SampleRequest
    done: asyncio.Future[Completion]
    limit: int
    computed: bool = False
    num_cached: int = 0
    ends: EngineFinishReason | None = None
    token_versions: list[str] = field(default_factory=list)
    kv_versions: list[str] = field(default_factory=list)
    stop_reason: str | None = None
    num_delivered: int = 0
    is_held: bool = False


class FakeEngine:
    """Public attributes inject faults; `calls` and `loaded` record the engine calls received.

    The pause states are those of vLLM's scheduler: in `paused_new` running samples continue. A
    pause in mode `wait` steps them to their end, unless `drains` is false.
    """

    def __init__(
        self,
        *,
        max_context_tokens: int = 512,
        instant: bool = True,
        prompt_kv: bool = False,
        max_adapters: int = 0,
        model_given: str = "fake",
    ) -> None:
        self.model_given = model_given
        self.instant = instant
        self.prompt_kv = prompt_kv
        self.export_status = ExportStatus.COMMITTED
        self.settle_gate: asyncio.Event | None = None
        self.max_context_tokens = max_context_tokens
        self.start_error: EngineError | None = None
        self.start_gate: asyncio.Event | None = None
        self.refused_weights: dict[str, str] = {}
        self.load_error: EngineError | None = None
        self.score_gate: asyncio.Event | None = None
        self.scored = 0
        self.scoring = 0
        self.scored_under: list[str | None] = []
        self.alive = True
        self.finish: EngineFinishReason = "length"
        self.parses = True
        self.calls: list[str] = []
        self.submitted: list[SampleRequest] = []
        self.checked: list[Sampling] = []
        self.sampling_error: EngineError | None = None
        self.loaded: list[Path] = []
        self.transferred: list[Sequence[IpcTensor]] = []
        self.load_gate: asyncio.Event | None = None
        self.transfer_gate: asyncio.Event | None = None
        self.transfer_delay_seconds = 0.0
        self.opened: Sequence[IpcTensor] | None = None
        self.open_error: EngineError | None = None
        self.running: dict[str, Running] = {}
        self.written: dict[str, str] = {}
        self.left: dict[tuple[str, str], int] = {}
        self.max_adapters = max_adapters
        self.adapters: dict[str, Path] = {}
        self.adapter_error: EngineError | None = None
        self.version = ""
        self.entropy: Callable[[int], float] = lambda place: float(place % 7)
        self.pause_state: Literal["unpaused", "paused_new", "paused_all"] = "unpaused"
        self.drains = True
        self.can_sleep = True
        self.sleeping: frozenset[SleepTag] = frozenset()
        self.sleep_error: EngineError | None = None
        self.wake_error: EngineError | None = None
        self.restored_version: str | None = None
        self.counted = SharedPrefixStats()
        self.speculated = SpeculationStats()
        self.update_graphs = CudaGraphStats()
        self.kept_stats = KeptKvStats()
        self.kept_kv_reason: KeptKvReason | None = None
        self.chains: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        self.retained = KvRetentionStats()
        self.released_sessions: list[list[str]] = []
        self.release_gate: asyncio.Event | None = None
        self.drafting: DrafterStatus | None = None
        self.drafter_path = Path("/nowhere")
        self.refused_drafter: EngineError | None = None
        self.offered: list[tuple[str, bytes]] = []
        self._stage: EngineStage = "starting"
        self.start_phase: StartPhase | None = None

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            model="fake",
            model_given=self.model_given,
            model_path=Path("/nowhere"),
            dtype="float32",
            device="cpu",
            block_size=BLOCK_SIZE,
            num_blocks=64,
            kv_bytes_per_token=1024,
            max_context_tokens=self.max_context_tokens,
            max_sequences=8,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            cpu_threads=1,
            vllm_version="0",
            kv_format=FORMAT if self.prompt_kv else None,
            kv_reason=None if self.prompt_kv else "disabled",
            kept_kv_reason=self.kept_kv_reason,
            max_logprobs=20,
            returns_routed_experts=True,
            template_variables=frozenset({"enable_thinking"}),
            max_token_chars=1,
            can_sleep=self.can_sleep,
            max_adapters=self.max_adapters,
            max_adapter_rank=16 if self.max_adapters else 0,
        )

    def health(self) -> EngineHealth:
        reason = None if self.alive else "stopped"
        return EngineHealth(
            stage=self._stage,
            alive=self.alive,
            age_seconds=0.0,
            reason=reason,
            start_phase=self.start_phase,
        )

    def stats(self, kind: type[Stats]) -> Stats:
        known = (
            self.counted,
            self.speculated,
            self.update_graphs,
            self.kept_stats,
            self.retained,
        )
        return next(stats for stats in known if isinstance(stats, kind))

    def feature(self, key: FeatureKey[Interface]) -> Interface | None:
        assert key == DRAFT_MODEL, "no other feature is controlled"
        return None if self.drafting is None else cast(Interface, FakeDraftModel(self))

    async def start(self, version: str) -> None:
        if self.start_gate is not None:
            await self.start_gate.wait()
        if self.start_error is not None:
            self.alive, self._stage = False, "dead"
            raise self.start_error
        self.version = version
        self._stage = "serving"

    async def stop(self) -> None:
        self._stage = "stopping"
        await self.abort(list(self.running))

    def kill(self) -> None:
        self.die()

    @property
    def openai_server(self) -> OpenAIServer:
        from tests.fake_openai_server import fake_openai_server  # loads vLLM

        return fake_openai_server(self.max_context_tokens, "fake")

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """UTF-8 bytes as token IDs; no special token is added."""
        return list(text.encode())

    def encode_chat(self, chat_request: ChatRequest) -> list[int]:
        if chat_request.template_options.get("max_length"):
            raise ConversationRefused("chat_template_kwargs", "max_length: not a variable")
        messages = chat_request.messages
        if any(message["role"] not in ROLES for message in messages):
            raise RequestRefused("unknown role")
        named = [str(tool["function"]["name"]) for tool in chat_request.tools]
        token_ids = self.encode_text("".join([*named, *map(_content, messages)]))
        number, side = chat_request.truncate_prompt_tokens, chat_request.truncation_side
        return truncated(token_ids, number, side)

    def encode_chat_with_images(self, chat_request: ChatRequest) -> EncodedPrompt:
        raise ConversationRefused("messages", "At most 0 image(s) may be provided in one prompt.")

    def encode_chat_after(
        self, chat_request: ChatRequest, index: int, *, last_token: int
    ) -> list[int]:
        """Contents of the messages after `index`; nothing marks the end of a message."""
        self.encode_chat(chat_request)
        later = replace(chat_request, messages=chat_request.messages[index + 1 :], tools=())
        return self.encode_chat(later)

    def chat_response(
        self,
        token_ids: Sequence[int],
        chat_request: ChatRequest,
        *,
        stop_reason: int | str | None = None,
        sampling: Sampling = DEFAULT_SAMPLING,
    ) -> ChatResponse:
        """With tools, every response calls the first one, unless `parses` is false."""
        include = sampling.include_stop_str_in_output
        text = response_text(self.decode, token_ids, stop_reason, include_stop_str=include)
        if not self.parses:
            return ChatResponse(content=text, parsed=False)
        if not chat_request.tools:
            return ChatResponse(content=text)
        name = chat_request.tools[0]["function"]["name"]
        return ChatResponse(
            content=None, tool_calls=(ToolCall(id="call-1", name=name, arguments="{}"),)
        )

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode("latin-1")

    def _text(self, sample: Running, places: Sequence[int], finish: EngineFinishReason) -> str:
        token_ids = [place % VOCAB_SIZE for place in places]
        include = sample.request.sampling.include_stop_str_in_output
        if finish == "stop" and sample.stop_reason is None and not include:
            token_ids.pop()
        return response_text(self.decode, token_ids, sample.stop_reason, include_stop_str=include)

    async def check_sampling(self, sampling: Sampling, client: str = "") -> None:
        self.checked.append(sampling)
        if self.sampling_error is not None:
            raise self.sampling_error

    async def submit(self, samples: Sequence[SampleRequest]) -> list[Awaitable[Completion]]:
        if not self.alive:
            raise EngineDead("dead")
        if any(sample.adapter not in (None, *self.adapters) for sample in samples):
            raise RequestRefused("there is no such adapter")
        self.submitted += samples
        loop = asyncio.get_running_loop()
        added = [
            Running(
                request=sample,
                done=loop.create_future(),
                limit=sample.sampling.max_tokens,
                is_held=self.paused,
            )
            for sample in samples
        ]
        self.running |= {sample.request.id: sample for sample in added}
        if self.instant and not self.paused:
            self.step(VOCAB_SIZE)
        return [sample.done for sample in added]

    def progress(self, sample_ids: Sequence[str]) -> list[tuple[VersionSpan, ...]]:
        found = [self.running.get(sample_id) for sample_id in sample_ids]
        return [_spans(sample.token_versions) if sample else () for sample in found]

    async def score(
        self, prompt: Sequence[int], response: Sequence[int], adapter: str | None = None
    ) -> list[float]:
        assert adapter is None or adapter in self.adapters
        self.scored_under.append(adapter)
        if not self.alive:
            raise EngineDead("dead")
        while self.paused:
            await asyncio.sleep(0.001)
        self.scored += 1
        self.scoring += 1
        try:
            if self.score_gate is not None:
                await self.score_gate.wait()
        finally:
            self.scoring -= 1
        return [-float(len(prompt) + i) for i in range(len(response))]

    async def top_logprobs(
        self,
        prompt: Sequence[int],
        num_top_logprobs: int,
        adapter: str | None = None,
        given: NDArray[np.int32] | None = None,
    ) -> TopLogprobRows:
        scores = await self.score([], prompt, adapter)
        scores[0] = -math.inf
        if given is not None:
            token_ids = np.column_stack([np.array(prompt, np.int32), given])
            return TopLogprobRows(
                token_ids, -token_ids.astype(np.float32), np.ones(len(prompt), np.int64)
            )
        return _rows(prompt, scores, num_top_logprobs)

    def step(self, num_tokens: int = 1) -> None:
        """Samples `num_tokens` tokens for every running sample, up to its limit."""
        for sample in self._steppable():
            self._compute_prompt(sample)
            room = sample.limit - len(sample.token_versions)
            sample.token_versions += [self.version] * min(num_tokens, room)
            sample.kv_versions += [self.version] * (
                len(sample.request.prompt_token_ids)
                + len(sample.token_versions)
                - 1
                - len(sample.kv_versions)
            )
            if _stop(sample):
                self._finish(sample, "stop")
            elif len(sample.token_versions) == sample.limit:
                self._finish(sample, sample.ends or self.finish)
            else:
                _deliver(sample)

    def _steppable(self) -> list[Running]:
        if self.pause_state == "paused_all":
            return []
        return [sample for sample in self.running.values() if not sample.is_held]

    async def abort(self, sample_ids: Sequence[str]) -> None:
        for sample_id in sample_ids:
            if sample_id in self.running:
                self._finish(self.running[sample_id], "abort")

    async def flush_exports(self) -> None:
        if self.settle_gate is not None:
            await self.settle_gate.wait()

    async def pause(self, mode: PauseMode, *, recompute: bool = False) -> None:
        self.calls.append(f"pause {mode}{' recompute' if recompute else ''}")
        if mode == "abort":
            await self.abort(list(self.running))
        self.pause_state = "paused_all" if mode == "keep" else "paused_new"
        while mode == "wait" and self._steppable():
            if self.drains:
                self.step()
            await asyncio.sleep(0)

    @property
    def paused(self) -> bool:
        return self.pause_state != "unpaused"

    async def resume(self) -> None:
        assert not self.sleeping, "the engine is resumed after it is awake"
        self.calls.append("resume")
        self.pause_state = "unpaused"
        for sample in self.running.values():
            sample.is_held = False
        if self.instant:
            self.step(VOCAB_SIZE)

    async def sleep(self, level: SleepLevel, tags: AbstractSet[SleepTag]) -> None:
        assert self.paused and not self.sleeping
        if self.sleep_error is not None:
            raise self.sleep_error
        self.calls.append(f"sleep {level} {' '.join(sorted(tags))}")
        self.sleeping = frozenset(tags)
        self._stage = "sleeping"

    async def wake(self, tags: AbstractSet[SleepTag]) -> str | None:
        assert self.paused
        if (error := self.wake_error or self.sleep_error) is not None:
            raise error
        self.calls.append(f"wake {' '.join(sorted(tags))}")
        self.sleeping -= tags
        self._stage = "sleeping" if self.sleeping else "serving"
        if self.sleeping or self.restored_version is None:
            return None
        self.version = self.restored_version
        return self.version

    async def reset_prefix_cache(self) -> None:
        assert self.paused, "prefixes are forgotten under a pause"
        self.calls.append("forget")
        self.chains.clear()

    async def release_session_kv(self, session_ids: Sequence[str]) -> None:
        if not self.alive:
            raise EngineDead("dead")
        self.released_sessions.append(list(session_ids))
        if self.release_gate is not None:
            await self.release_gate.wait()

    def check_weights(self, path: Path, magnitudes: Magnitudes = UNKNOWN) -> None:
        if path.name in self.refused_weights:
            raise CheckpointRefused(self.refused_weights[path.name])

    def check_tensors(self, tensors: Sequence[IpcTensor]) -> None:
        if tensors[0].name in self.refused_weights:
            raise CheckpointRefused(self.refused_weights[tensors[0].name])

    async def open_transfer(self, tensors: Sequence[IpcTensor]) -> None:
        if self.open_error is not None:
            raise self.open_error
        self.opened = tensors

    async def close_transfer(self) -> None:
        self.opened = None

    async def transfer_weights(self, version: str, *, keep_kv: bool = False) -> int:
        tensors, self.opened = self.opened, None
        assert tensors is not None, "tensors are opened first"
        if self.transfer_gate is not None:
            await self.transfer_gate.wait()
        await asyncio.sleep(self.transfer_delay_seconds)
        num_kept = self._swap(version, keep_kv=keep_kv)
        self.transferred.append(tensors)
        return num_kept

    async def update_weights(self, path: Path, version: str, *, keep_kv: bool = False) -> int:
        if self.load_gate is not None:
            await self.load_gate.wait()
        num_kept = self._swap(version, keep_kv=keep_kv)
        self.loaded.append(path)
        return num_kept

    def _swap(self, version: str, *, keep_kv: bool) -> int:
        assert self.paused, "weights are swapped under a pause"
        assert "weights" not in self.sleeping, "weights are written to memory"
        self.calls.append(f"swap {version}{' keep_kv' if keep_kv else ''}")
        if isinstance(self.load_error, EngineDead):
            self._stage = "dead"
        if isinstance(self.load_error, FilesRestored):
            self.version = self.load_error.version
        if self.load_error is not None:
            raise self.load_error
        self.version = version
        if not keep_kv:
            self.chains.clear()
        return BLOCK_SIZE * len(self.chains)

    def check_adapter(self, path: Path) -> AdapterInfo:
        """Accepts any file content; `refused` in the adapter's config is the refusal's reason."""
        config = json.loads((path / "adapter_config.json").read_bytes())
        if "refused" in config:
            raise CheckpointRefused(config["refused"])
        num_bytes = (path / "adapter_model.safetensors").stat().st_size
        return AdapterInfo(rank=config["r"], num_modules=1, num_bytes=num_bytes)

    async def load_adapter(self, label: str, path: Path) -> None:
        assert label not in self.adapters and len(self.adapters) < self.max_adapters
        assert "weights" not in self.sleeping, "adapters are written to memory"
        self.calls.append(f"load {label}")
        if self.adapter_error is not None:
            raise self.adapter_error
        self.adapters[label] = path

    async def unload_adapter(self, label: str) -> None:
        assert not any(running.request.adapter == label for running in self.running.values())
        if self.adapters.pop(label, None) is not None:
            self.calls.append(f"unload {label}")

    def die(self) -> None:
        self.alive, self._stage = False, "dead"
        for sample in self.running.values():
            sample.done.set_exception(EngineDead("dead"))
        self.running.clear()

    def _compute_prompt(self, sample: Running) -> None:
        """Prefills the prompt.

        `export_status` is every export's outcome; only COMMITTED writes bytes.
        """
        if not sample.computed:
            self._load(sample)
            self._read_chain(sample)
            self._export(sample.request)
        sample.computed = True

    def _read_chain(self, sample: Running) -> None:
        """Finds the blocks of the sample's chain."""
        kept, prompt = sample.request.kept_kv, sample.request.prompt_token_ids
        if kept is None:
            return
        for end in range(BLOCK_SIZE, len(prompt), BLOCK_SIZE):
            versions = self.chains.get((kept.chain, tuple(prompt[:end])))
            if versions is None or (kept.max_lag == 0 and {*versions} != {self.version}):
                break
            sample.kv_versions += versions
        sample.num_cached = len(sample.kv_versions)

    def _write_chain(self, sample: Running, token_ids: list[int]) -> None:
        """Caches the full blocks of a finished sample for its chain."""
        kept, versions = sample.request.kept_kv, sample.kv_versions
        tokens = (*sample.request.prompt_token_ids, *token_ids)
        for end in range(BLOCK_SIZE, len(versions) + 1, BLOCK_SIZE):
            if kept is not None:
                self.chains[kept.chain, tokens[:end]] = versions[end - BLOCK_SIZE : end]

    def _export(self, request: SampleRequest) -> None:
        if request.export is None:
            return
        write_export(request.export, request.prompt_token_ids, self.version, self.export_status)
        if self.export_status == ExportStatus.COMMITTED and request.export.name is not None:
            self.written[request.export.name] = self.version

    def _load(self, sample: Running) -> None:
        """Extends the chain's cached prefix by pieces whose sources this version has written."""
        load, length = sample.request.load, len(sample.request.prompt_token_ids)
        if load is None:
            return
        sample.num_cached = min(self.left.get((load.chain, self.version), 0), length - 1)
        for piece in load.pieces:
            end = piece.start + piece.num_tokens
            seen = [
                slot for o in piece.observations for slot in (o.real, o.base) if slot is not None
            ]
            names = [slot.name or "" for slot in (piece.source, *seen)]
            if not piece.start <= sample.num_cached < end < length:
                continue
            if any(self.written.get(name) != self.version for name in names):
                break
            sample.num_cached = end
        self.left[load.chain, self.version] = length // BLOCK_SIZE * BLOCK_SIZE

    def _finish(self, sample: Running, finish: EngineFinishReason) -> None:
        del self.running[sample.request.id]
        if sample.done.done():
            return
        length = len(sample.request.prompt_token_ids)
        count, k = len(sample.token_versions), sample.request.num_top_logprobs
        self._write_chain(sample, [(length + i) % VOCAB_SIZE for i in range(count)])
        places = range(length, length + count)
        completion = Completion(
            token_ids=[place % VOCAB_SIZE for place in places],
            logprobs=[-0.5] * count,
            finish=finish,
            versions=_spans(sample.token_versions),
            kv_versions=tuple(
                KvVersionSpan(version=span.version, start=span.start, end=span.end)
                for span in _spans(sample.kv_versions[: max(length + count - 1, 0) if count else 0])
            ),
            num_cached_tokens=sample.num_cached,
            stop_reason=sample.stop_reason,
            text=self._text(sample, places, finish) if sample.request.returns_text else None,
            entropy=[self.entropy(p) for p in places] if sample.request.entropy_top_k else None,
            top_logprobs=_rows([p % VOCAB_SIZE for p in places], [-0.5] * count, k) if k else None,
            given_logprobs=_given(places, sample.request.logprob_token_ids),
            raw_logprobs=[-0.25] * count if sample.request.raw_logprobs else None,
            support=_supports(places) if sample.request.support else None,
        )
        if (first := sample.request.experts_from) is not None:
            completion = replace(completion, routed_experts=_experts(first, length + count - 1))
        sample.done.set_result(completion)


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _stop(sample: Running) -> bool:
    """Cuts a sample after the token that completes one of its stop strings.

    Each token is one character, as in `decode`.
    """
    request, sampling = sample.request, sample.request.sampling
    if not sampling.stop:
        return False
    start = len(request.prompt_token_ids)
    prior = request.prompt_token_ids[start - request.num_prior_tokens :]
    new = [(start + i) % VOCAB_SIZE for i in range(len(sample.token_versions))]
    text = "".join(map(chr, [*prior, *new]))
    ends = [
        (text.find(stop, max(len(prior) - len(stop) + 1, 0)) + len(stop) - len(prior), stop)
        for stop in sampling.stop
        if stop in text[max(len(prior) - len(stop) + 1, 0) :]
    ]
    ends = [end for end in ends if end[0] > sampling.min_tokens]
    if not ends:
        return False
    length, sample.stop_reason = min(ends)
    del sample.token_versions[length:]
    return True


@dataclass
class FakeDraftModel:
    """Draft model whose state is in the engine's attributes."""

    engine: FakeEngine

    @property
    def file(self) -> Path:
        return self.engine.drafter_path

    def status(self) -> DrafterStatus:
        assert self.engine.drafting is not None
        return self.engine.drafting

    def check(self, path: Path) -> None:
        if isinstance(self.engine.refused_drafter, CheckpointRefused):
            raise self.engine.refused_drafter

    async def submit(self, path: Path, version: str) -> None:
        if self.engine.refused_drafter is not None:
            raise self.engine.refused_drafter
        self.engine.offered.append((version, path.read_bytes()))
        path.unlink()


def _supports(places: range) -> list[bytes]:
    """Sets of the token alone; every fourth token has the whole vocabulary."""
    tokens = (place % VOCAB_SIZE for place in places)
    return [encode_mask(np.arange(VOCAB_SIZE) == t) if t % 4 else ALL for t in tokens]


def _given(places: range, token_ids: Sequence[int]) -> TopLogprobRows | None:
    """Given tokens with their negative ids as logprobs; token 0 is excluded."""
    if not token_ids:
        return None
    row = [-float(token) if token else -math.inf for token in token_ids]
    return TopLogprobRows(
        np.array([[place % VOCAB_SIZE, *token_ids] for place in places], np.int32).reshape(
            len(places), len(row) + 1
        ),
        np.array([[-0.5, *row]] * len(places), np.float32).reshape(len(places), len(row) + 1),
        np.ones(len(places), np.int64),
    )


def _deliver(sample: Running) -> None:
    """Passes the new tokens of a running sample to its `on_tokens`."""
    start, end = sample.num_delivered, len(sample.token_versions)
    request, sample.num_delivered = sample.request, end
    if request.on_tokens is None or start == end:
        return
    length, k = len(request.prompt_token_ids), request.num_top_logprobs
    places = range(length + start, length + end)
    spans = _spans(sample.token_versions[start:])
    request.on_tokens(
        TokenDelta(
            start=start,
            token_ids=[place % VOCAB_SIZE for place in places],
            logprobs=[-0.5] * len(places),
            versions=tuple(
                replace(span, start=span.start + start, end=span.end + start) for span in spans
            ),
            top_logprobs=_rows([p % VOCAB_SIZE for p in places], [-0.5] * len(places), k)
            if k
            else None,
            text="".join(chr(place % VOCAB_SIZE) for place in places)
            if request.returns_text
            else None,
        )
    )


def _experts(first: int, end: int) -> NDArray[np.uint8]:
    """One layer and one expert, whose number is the position."""
    return np.arange(first, end, dtype=np.uint8).reshape(-1, 1, 1)


def _rows(
    token_ids: Sequence[int], logprobs: Sequence[float], num_top_logprobs: int
) -> TopLogprobRows:
    """Each token and the ones after it; the token itself has the highest probability."""
    others = np.array([0, *range(num_top_logprobs)])
    return TopLogprobRows(
        ((np.array(token_ids, int)[:, None] + others) % VOCAB_SIZE).astype(np.int32),
        (np.array(logprobs)[:, None] - others).astype(np.float32),
        np.ones(len(token_ids), np.int64),
    )


def _spans(versions: list[str]) -> tuple[VersionSpan, ...]:
    changes = [i for i, version in enumerate(versions) if i == 0 or versions[i - 1] != version]
    ends = [*changes[1:], len(versions)]
    return tuple(
        VersionSpan(version=versions[start], start=start, end=end)
        for start, end in zip(changes, ends, strict=bool(changes))
    )
