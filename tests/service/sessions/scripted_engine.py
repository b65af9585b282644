"""An engine whose samples are given texts, with the chat template and parsers of a real model.

Tokens are characters where the tokenizer would merge them, so that a response that is decoded and
tokenized again has other tokens than were sampled.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.types import (
    ChatRequest,
    ChatResponse,
    Completion,
    EngineInfo,
    SampleRequest,
    TokenDelta,
    VersionSpan,
)
from tests.fake_engine import FakeEngine
from tests.service.sessions.template_families import FamilyEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Prompt and sample of one call, as the engine has them."""

    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float]


@dataclass
class Script:
    """Texts of the samples, in order, and the record of the calls."""

    texts: Sequence[str]
    calls: list[Sampled] = field(default_factory=list)


class ScriptedEngine(FakeEngine):
    def __init__(self, family: FamilyEngine, texts: Sequence[str]) -> None:
        super().__init__(max_context_tokens=16384)
        self.family = family
        self.script = Script(texts)

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

    def chat_response(
        self, token_ids: Sequence[int], chat_request: ChatRequest, **options: Any
    ) -> ChatResponse:
        return self.family.chat.chat_response(token_ids, chat_request, **options)

    def response_stream(self, *given: Any, **options: Any) -> Any:
        return self.family.chat.response_stream(*given, **options)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text = self.family.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return str(text)

    async def submit(self, samples: Sequence[SampleRequest]) -> list[Awaitable[Completion]]:
        self.submitted += samples
        return [self._answered(sample) for sample in samples]

    def _answered(self, sample: SampleRequest) -> "asyncio.Future[Completion]":
        calls = self.script.calls
        text = self.script.texts[len(calls)]
        token_ids = [*self.family.pieces(text), self.family.ends[0]]
        logprobs = [-1 - 0.001 * (1000 * len(calls) + at) for at in range(len(token_ids))]
        calls.append(
            Sampled(prompt=list(sample.prompt_token_ids), token_ids=token_ids, logprobs=logprobs)
        )
        spans = (VersionSpan(version=self.version, start=0, end=len(token_ids)),)
        if sample.on_tokens is not None:
            for at, token in enumerate(token_ids[:-1]):
                span = VersionSpan(version=self.version, start=at, end=at + 1)
                sample.on_tokens(
                    TokenDelta(
                        start=at, token_ids=[token], logprobs=[logprobs[at]], versions=(span,)
                    )
                )
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        done.set_result(
            Completion(
                token_ids=token_ids,
                logprobs=logprobs,
                finish="stop",
                versions=spans,
                num_cached_tokens=0,
            )
        )
        return done
