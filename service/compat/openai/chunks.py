"""Encoding of streamed completions and chat completions as OpenAI's chunks.

Chunks have the fields that vLLM's have. A choice without new text has chunks with an empty delta if
token ids or logprobs were requested.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from coppice.wire.rollouts import SampleAnswer
from engine.types.chat import ChatResponse
from engine.types.samples import Sampling
from service.compat import logprobs
from service.compat.answer_fields import finish_reason, support_field, weight_version_spans
from service.compat.chat.samples import MessageParts
from service.compat.openai.echo import PromptEcho
from service.compat.sample_stream import SamplePart, StreamedText
from service.rollouts.record_reader import SampleKey
from service.server import Server

Chunk = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class CompletionChunks:
    """Chunks of POST /v1/completions for the n samples of each prompt.

    With `echo`, the first chunk of a choice begins with the prompt. With `leaves_out_tokens`, the
    tokens of the samples are not sent.
    """

    server: Server
    sampling: Sampling
    prompts: Sequence[list[int]]
    n: int
    with_logprobs: bool
    as_ids: bool
    return_token_ids: bool
    return_support: bool
    echo: PromptEcho | None = None
    leaves_out_tokens: bool = False
    _texts: dict[SampleKey, StreamedText] = field(default_factory=dict)
    _offsets: dict[SampleKey, int] = field(default_factory=dict)

    async def of_part(self, part: SamplePart) -> list[Chunk]:
        if self.leaves_out_tokens:
            if part.sample is None:
                return []
            part = part.without_tokens()
        reason = None if part.sample is None else finish_reason(part.sample)
        choice: dict[str, Any] = {
            "index": part.group * self.n + part.index,
            "text": await self._text(part),
            "logprobs": await self._logprobs(part) if self.with_logprobs else None,
            **_end_fields(part.sample, reason, with_support=self.return_support),
        }
        if self.return_token_ids:
            choice["token_ids"] = part.token_ids
            if part.start == 0:
                choice["prompt_token_ids"] = self.prompts[part.group]
        return [{"choices": [choice]}]

    async def _text(self, part: SamplePart) -> str:
        text = self._texts.pop(part.key, None) or StreamedText(self.server, self.sampling)
        if part.sample is None:
            self._texts[part.key] = text
        echoed = self._echo_of(part)
        return (echoed.texts[part.group] if echoed else "") + await text.next(part)

    def _echo_of(self, part: SamplePart) -> PromptEcho | None:
        return self.echo if part.start == 0 else None

    async def _logprobs(self, part: SamplePart) -> dict[str, Any]:
        echoed = self._echo_of(part)
        name = await _names(self.server, part, as_ids=self.as_ids, echo=echoed)
        sampled = (part.token_ids, part.logprobs, part.top_logprobs, name)
        if echoed is None:
            offset = self._offsets.get(part.key, 0)
            found = await part.run(partial(logprobs.completion_logprobs, *sampled, offset))
        else:
            found = await asyncio.to_thread(echoed.logprobs, part.group, *sampled)
        if found["tokens"]:
            self._offsets[part.key] = found["text_offset"][-1] + len(found["tokens"][-1])
        return found


@dataclass(slots=True, kw_only=True)
class ChatChunks:
    """Chunks of POST /v1/chat/completions.

    `to_reason` returns the finish reason of a sample with the last part of its response.
    `to_message` converts a response to the fields of a message.
    """

    server: Server
    parts: MessageParts
    prompt: list[int]
    with_logprobs: bool
    as_ids: bool
    return_token_ids: bool
    return_support: bool
    to_reason: Callable[[SampleAnswer, ChatResponse], str]
    echoed_text: str
    to_message: Callable[[ChatResponse], dict[str, Any]]

    async def of_part(self, part: SamplePart) -> list[Chunk]:
        is_first = self.parts.is_first(part)
        choice = await self._choice(part)
        chunks = self._first(part) if is_first else []
        return chunks if choice is None else [*chunks, {"choices": [choice]}]

    def _first(self, part: SamplePart) -> list[Chunk]:
        """First chunks of a choice: the role, which OpenAI's clients expect, and the echo."""
        choice = {"index": part.index, "logprobs": None, "finish_reason": None}
        role = {**choice, "delta": {"role": "assistant", "content": ""}}
        prompt = {"prompt_token_ids": self.prompt} if self.return_token_ids else {}
        first: Chunk = {"choices": [role], **prompt}
        if not self.echoed_text:
            return [first]
        return [first, {"choices": [{**choice, "delta": {"content": self.echoed_text}}]}]

    async def _choice(self, part: SamplePart) -> dict[str, Any] | None:
        """Choice of a part; None if the part has nothing to send yet."""
        response = await self.parts.next(part)
        reason = None if part.sample is None else self.to_reason(part.sample, response)
        delta = self.to_message(response)
        if not (delta or reason or self.with_logprobs or self.return_token_ids):
            return None
        choice: dict[str, Any] = {
            "index": part.index,
            "delta": delta,
            "logprobs": await self._logprobs(part) if self.with_logprobs else None,
            **_end_fields(part.sample, reason, with_support=self.return_support),
        }
        if self.return_token_ids:
            choice["token_ids"] = part.token_ids
        return choice

    async def _logprobs(self, part: SamplePart) -> dict[str, Any]:
        name = await _names(self.server, part, as_ids=self.as_ids)
        sampled = (part.token_ids, part.logprobs, part.top_logprobs, name)
        return {"content": await part.run(partial(logprobs.chat_logprobs, *sampled))}


async def _names(
    server: Server, part: SamplePart, *, as_ids: bool, echo: PromptEcho | None = None
) -> logprobs.TokenName:
    def token_ids() -> Iterator[int]:
        yield from logprobs.with_top_token_ids(part.token_ids, part.top_logprobs)
        if echo is not None:
            yield from echo.token_ids(part.group)

    return await logprobs.token_names(server.tokenizer, token_ids, as_ids=as_ids)


def _end_fields(
    sample: SampleAnswer | None, reason: str | None, *, with_support: bool
) -> dict[str, Any]:
    """Fields of a choice about its end; null before it."""
    fields: dict[str, Any] = {"finish_reason": reason, "stop_reason": None}
    if sample is not None:
        fields["stop_reason"] = sample.stop_reason
        fields["weight_versions"] = weight_version_spans(sample)
        fields |= support_field(sample) if with_support else {}
    return fields
