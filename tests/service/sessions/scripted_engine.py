"""An engine whose samples are given texts, with the chat template and parsers of a real model.

Tokens are characters where the tokenizer would merge them, so that a response that is decoded and
tokenized again has other tokens than were sampled.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from engine.protocol.openai_server import OpenAIServer
from engine.types.chat import ChatRequest
from engine.types.info import EngineInfo
from engine.types.samples import (
    Completion,
    EngineFinishReason,
    SampleRequest,
    TokenDelta,
    VersionSpan,
)
from tests.fake_engine import FakeEngine
from tests.service.sessions.template_families import FamilyEngine

Script = Sequence[str] | Callable[[str], str]
"""Texts of the samples in order, or a function from a prompt's text to the sample's text."""


class Unfinished(str):
    """Text of a sample that does not end: it runs until it is aborted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Prompt and sample of one call, as the engine has them, and the session of the call."""

    session: str | None
    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float]


class ScriptedEngine(FakeEngine):
    """`sampled` records the calls in order."""

    def __init__(self, family: FamilyEngine, script: Script) -> None:
        super().__init__(max_context_tokens=family.max_context_tokens)
        self.family = family
        self.script = script
        self.sampled: list[Sampled] = []
        self._unfinished: dict[str, asyncio.Future[Completion]] = {}
        self._completions: dict[str, Completion] = {}

    @property
    def info(self) -> EngineInfo:
        size = len(self.family.tokenizer)
        return replace(super().info, vocab_size=size, eos_token_ids=tuple(self.family.ends))

    def encode_chat(self, chat_request: ChatRequest) -> list[int]:
        return self.family.encode_chat(chat_request)

    def encode_chat_after(
        self, chat_request: ChatRequest, index: int, *, last_token: int
    ) -> list[int]:
        return self.family.encode_chat_after(chat_request, index, last_token=last_token)

    @property
    def openai_server(self) -> OpenAIServer:
        return self.family.openai_server

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text = self.family.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return str(text)

    async def submit(self, samples: Sequence[SampleRequest]) -> list[Awaitable[Completion]]:
        self.submitted += samples
        return [self._answered(sample) for sample in samples]

    async def abort(self, sample_ids: Sequence[str]) -> None:
        for sample_id in sample_ids:
            if (done := self._unfinished.pop(sample_id, None)) is not None:
                done.set_result(self._completions.pop(sample_id))

    def _answered(self, sample: SampleRequest) -> "asyncio.Future[Completion]":
        prompt = list(sample.prompt_token_ids)
        text = self._next_text(prompt)
        is_finished = not isinstance(text, Unfinished)
        token_ids = self.family.pieces(text) + [self.family.ends[0]] * is_finished
        logprobs = [-1 - 0.001 * (1000 * len(self.sampled) + at) for at in range(len(token_ids))]
        self.sampled.append(
            Sampled(
                session=sample.cache_salt, prompt=prompt, token_ids=token_ids, logprobs=logprobs
            )
        )
        self._deliver(sample, token_ids, logprobs, len(token_ids) - is_finished)
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        completion = self._completion(token_ids, logprobs, "stop" if is_finished else "abort")
        if is_finished:
            done.set_result(completion)
        else:
            self._unfinished[sample.id] = done
            self._completions[sample.id] = completion
        return done

    def _next_text(self, prompt: Sequence[int]) -> str:
        if callable(self.script):
            return self.script(self.family.decode(prompt))
        return self.script[len(self.sampled)]

    def _deliver(
        self, sample: SampleRequest, token_ids: list[int], logprobs: list[float], num: int
    ) -> None:
        if sample.on_tokens is None:
            return
        for at in range(num):
            span = VersionSpan(version=self.version, start=at, end=at + 1)
            sample.on_tokens(
                TokenDelta(
                    start=at,
                    token_ids=[token_ids[at]],
                    logprobs=[logprobs[at]],
                    versions=(span,),
                    text=self.decode([token_ids[at]]),
                )
            )

    def _completion(
        self, token_ids: list[int], logprobs: list[float], finish: EngineFinishReason
    ) -> Completion:
        span = VersionSpan(version=self.version, start=0, end=len(token_ids))
        return Completion(
            token_ids=token_ids,
            logprobs=logprobs,
            finish=finish,
            versions=(span,),
            num_cached_tokens=0,
            text=self.decode(token_ids),
        )
