"""An engine without a model, for tests of the HTTP layer; it obeys the real one's contract tests.

Time stands still in it: a sample's tokens appear when the test calls `step`, or at once if the
engine is made with `instant=True`. Token i of a sample is its prompt's length plus i. A prompt is
computed, and exported, in a sample's first step.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.errors import CheckpointRefused, EngineDead, EngineError, RequestRefused
from engine.protocol import (
    Completion,
    Conversation,
    EngineFacts,
    EngineFinish,
    EngineStage,
    ExportWord,
    PauseMode,
    Pulse,
    Reply,
    SampleRequest,
    SharedPrefixCounts,
    ToolCall,
    VersionSpan,
)
from tests.fake_export import FORMAT, write_export

VOCAB_SIZE = 256
EOS = 0


@dataclass(eq=False)
class Running:
    request: SampleRequest
    done: asyncio.Future[Completion]
    limit: int
    computed: bool = False
    ends: EngineFinish | None = None
    token_versions: list[str] = field(default_factory=list)


class FakeEngine:
    """Its public attributes make it misbehave; `calls` and `loaded` say what was asked of it."""

    def __init__(
        self, *, max_context_tokens: int = 512, instant: bool = True, prompt_kv: bool = False
    ) -> None:
        self.instant = instant
        self.prompt_kv = prompt_kv
        self.export_word = ExportWord.COMMITTED
        self.settle_gate: asyncio.Event | None = None
        self.max_context_tokens = max_context_tokens
        self.start_error: EngineError | None = None
        self.start_gate: asyncio.Event | None = None
        self.refused_weights: dict[str, str] = {}
        self.load_error: EngineError | None = None
        self.score_gate: asyncio.Event | None = None
        self.scored = 0
        self.scoring = 0
        self.alive = True
        self.finish: EngineFinish = "length"
        self.calls: list[str] = []
        self.submitted: list[SampleRequest] = []
        self.loaded: list[Path] = []
        self.running: dict[str, Running] = {}
        self.version = ""
        self.entropy: Callable[[int], float] = lambda place: float(place % 7)
        self.paused = False
        self.counted = SharedPrefixCounts()
        self._stage: EngineStage = "starting"

    @property
    def facts(self) -> EngineFacts:
        return EngineFacts(
            model="fake",
            model_path=Path("/nowhere"),
            dtype="float32",
            device="cpu",
            block_size=32,
            num_blocks=64,
            kv_bytes_per_token=1024,
            max_context_tokens=self.max_context_tokens,
            max_sequences=8,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            cpu_threads=1,
            vllm_version="0",
            kv_format=FORMAT if self.prompt_kv else None,
            kv_reason=None if self.prompt_kv else "disabled",
        )

    def pulse(self) -> Pulse:
        reason = None if self.alive else "stopped"
        return Pulse(stage=self._stage, alive=self.alive, age_seconds=0.0, reason=reason)

    def shared_prefix(self) -> SharedPrefixCounts:
        return self.counted

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

    def encode_text(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if any(
            message["role"] not in ("system", "user", "assistant", "tool") for message in messages
        ):
            raise RequestRefused("unknown role")
        return list("".join(message["content"] for message in messages).encode())

    def encode_conversation(self, conversation: Conversation) -> list[int]:
        named = [str(tool["function"]["name"]) for tool in conversation.tools]
        return self.encode_text("".join(named)) + self.encode_messages(conversation.messages)

    def reply(self, token_ids: Sequence[int], conversation: Conversation) -> Reply:
        """With tools, every response calls the first one."""
        if not conversation.tools:
            return Reply(content=self.decode(token_ids))
        name = conversation.tools[0]["function"]["name"]
        return Reply(content=None, tool_calls=(ToolCall(id="call-1", name=name, arguments="{}"),))

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("latin-1")

    async def submit(self, samples: Sequence[SampleRequest]) -> list[Awaitable[Completion]]:
        if not self.alive:
            raise EngineDead("dead")
        self.submitted += samples
        loop = asyncio.get_running_loop()
        added = [
            Running(request=sample, done=loop.create_future(), limit=sample.sampling.max_tokens)
            for sample in samples
        ]
        self.running |= {sample.request.id: sample for sample in added}
        if self.instant and not self.paused:
            self.step(VOCAB_SIZE)
        return [sample.done for sample in added]

    async def score(self, prompt: Sequence[int], response: Sequence[int]) -> list[float]:
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

    def step(self, num_tokens: int = 1) -> None:
        """Samples so many more tokens for everyone, up to each one's limit."""
        if self.paused:
            return
        for sample in list(self.running.values()):
            self._compute_prompt(sample)
            room = sample.limit - len(sample.token_versions)
            sample.token_versions += [self.version] * min(num_tokens, room)
            if len(sample.token_versions) == sample.limit:
                self._finish(sample, sample.ends or self.finish)

    async def abort(self, sample_ids: Sequence[str]) -> None:
        for sample_id in sample_ids:
            if sample_id in self.running:
                self._finish(self.running[sample_id], "abort")

    async def settle_exports(self) -> None:
        if self.settle_gate is not None:
            await self.settle_gate.wait()

    async def pause(self, mode: PauseMode, *, recompute: bool = False) -> None:
        self.calls.append(f"pause {mode}{' recompute' if recompute else ''}")
        if mode == "abort":
            await self.abort(list(self.running))
        while mode == "wait" and self.running:
            self.step()
            await asyncio.sleep(0)
        self.paused = True

    async def resume(self) -> None:
        self.calls.append("resume")
        self.paused = False
        if self.instant:
            self.step(VOCAB_SIZE)

    async def forget_prefixes(self) -> None:
        assert self.paused, "prefixes are forgotten under a pause"
        self.calls.append("forget")

    def check_weights(self, path: Path) -> None:
        if path.name in self.refused_weights:
            raise CheckpointRefused(self.refused_weights[path.name])

    async def swap_weights(self, path: Path, version: str) -> None:
        assert self.paused, "weights are swapped under a pause"
        self.calls.append(f"swap {version}")
        if isinstance(self.load_error, EngineDead):
            self._stage = "dead"
        if self.load_error is not None:
            raise self.load_error
        self.loaded.append(path)
        self.version = version

    def die(self) -> None:
        self.alive, self._stage = False, "dead"
        for sample in self.running.values():
            sample.done.set_exception(EngineDead("dead"))
        self.running.clear()

    def _compute_prompt(self, sample: Running) -> None:
        """`export_word` is what becomes of every export: bytes for COMMITTED only."""
        if sample.request.export is not None and not sample.computed:
            tokens = sample.request.prompt_token_ids
            write_export(sample.request.export, tokens, self.version, self.export_word)
        sample.computed = True

    def _finish(self, sample: Running, finish: EngineFinish) -> None:
        del self.running[sample.request.id]
        if sample.done.done():
            return
        length = len(sample.request.prompt_token_ids)
        count = len(sample.token_versions)
        places = range(length, length + count)
        completion = Completion(
            token_ids=[place % VOCAB_SIZE for place in places],
            logprobs=[-0.5] * count,
            finish=finish,
            versions=_spans(sample.token_versions),
            num_cached_tokens=0,
            entropy=[self.entropy(p) for p in places] if sample.request.entropy_over else None,
        )
        sample.done.set_result(completion)


def _spans(versions: list[str]) -> tuple[VersionSpan, ...]:
    changes = [i for i, version in enumerate(versions) if i == 0 or versions[i - 1] != version]
    ends = [*changes[1:], len(versions)]
    return tuple(
        VersionSpan(version=versions[start], start=start, end=end)
        for start, end in zip(changes, ends, strict=bool(changes))
    )
