"""Chunks of streamed completions and chat completions, one choice per sample.

Chunks have the fields that vLLM's have. A choice without new text has chunks with an empty delta if
token ids or logprobs were requested.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from coppice.wire.rollouts import SampleAnswer
from engine.types import ChatResponse, Sampling
from service.compat import logprobs
from service.compat.chat_samples import MessageParts
from service.compat.compat_request import finish_reason, weight_version_spans
from service.compat.sample_stream import SamplePart, StreamedText
from service.rollouts.record_reader import SampleKey
from service.server import Server

Chunk = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class CompletionChunks:
    """Chunks of POST /v1/completions for the n samples of each prompt."""

    server: Server
    sampling: Sampling
    prompts: Sequence[list[int]]
    n: int
    with_logprobs: bool
    as_ids: bool
    return_token_ids: bool
    _texts: dict[SampleKey, StreamedText] = field(default_factory=dict)
    _offsets: dict[SampleKey, int] = field(default_factory=dict)

    async def of_part(self, part: SamplePart) -> list[Chunk]:
        choice: dict[str, Any] = {
            "index": part.group * self.n + part.index,
            "text": await self._text(part),
            "logprobs": await self._logprobs(part) if self.with_logprobs else None,
            **_end_fields(part.sample, None if part.sample is None else finish_reason(part.sample)),
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
        return await text.next(part)

    async def _logprobs(self, part: SamplePart) -> dict[str, Any]:
        found = logprobs.completion_logprobs(
            part.token_ids,
            part.logprobs,
            part.top_logprobs,
            await _names(self.server, part, as_ids=self.as_ids),
            self._offsets.get(part.key, 0),
        )
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
    to_reason: Callable[[SampleAnswer, ChatResponse], str]
    to_message: Callable[[ChatResponse], dict[str, Any]]

    async def of_part(self, part: SamplePart) -> list[Chunk]:
        is_first = self.parts.is_first(part)
        choice = await self._choice(part)
        chunks = [self._first(part)] if is_first else []
        return chunks if choice is None else [*chunks, {"choices": [choice]}]

    def _first(self, part: SamplePart) -> Chunk:
        """First chunk of a choice, with the role, as clients of OpenAI's API expect it."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": part.index, "delta": delta, "logprobs": None, "finish_reason": None}
        prompt = {"prompt_token_ids": self.prompt} if self.return_token_ids else {}
        return {"choices": [choice], **prompt}

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
            **_end_fields(part.sample, reason),
        }
        if self.return_token_ids:
            choice["token_ids"] = part.token_ids
        return choice

    async def _logprobs(self, part: SamplePart) -> dict[str, Any]:
        name = await _names(self.server, part, as_ids=self.as_ids)
        content = logprobs.chat_logprobs(part.token_ids, part.logprobs, part.top_logprobs, name)
        return {"content": content}


async def _names(server: Server, part: SamplePart, *, as_ids: bool) -> logprobs.TokenName:
    return await logprobs.token_names(
        server.tokenizer,
        lambda: logprobs.with_top_token_ids(part.token_ids, part.top_logprobs),
        as_ids=as_ids,
    )


def _end_fields(sample: SampleAnswer | None, reason: str | None) -> dict[str, Any]:
    """Fields of a choice about its end; null before it."""
    fields: dict[str, Any] = {"finish_reason": reason, "stop_reason": None}
    if sample is not None:
        fields["stop_reason"] = sample.stop_reason
        fields["weight_versions"] = weight_version_spans(sample)
    return fields
