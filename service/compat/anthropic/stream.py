"""Encoding of answers in Anthropic's format: content blocks, and events of a stream."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic_core import from_json, to_json

from coppice.wire.packed.results import EndRecord
from coppice.wire.problem_catalogue import Problem
from coppice.wire.rollouts import RolloutAnswer, SampleAnswer
from engine.types.chat import ChatResponse, ToolCall, ToolCallPart
from service.compat.answer_fields import support_field, usage, weight_version_spans
from service.compat.anthropic.errors import anthropic_error
from service.compat.chat.samples import ChatSamples, MessageParts
from service.compat.event_stream import error_event
from service.compat.sample_stream import SamplePart, sample_parts

Event = dict[str, Any]
Fields = dict[str, Any]
INVALID_JSON = "INVALID_JSON"
"""Key of arguments that are not a JSON object, as Anthropic recommends it."""


def content_blocks(response: ChatResponse, signature: str) -> list[Fields]:
    """Blocks of a whole response; an empty text block if there is nothing else."""
    blocks: list[Fields] = []
    if response.reasoning:
        blocks.append({"type": "thinking", "thinking": response.reasoning, "signature": signature})
    if response.content:
        blocks.append({"type": "text", "text": response.content})
    blocks += [{**_tool_use(call), "input": tool_input(call)} for call in response.tool_calls]
    return blocks or [{"type": "text", "text": ""}]


def tool_input(call: ToolCall) -> Fields:
    """Arguments of a call as an object that JSON can express.

    Lone surrogates, deep nesting, NaN and infinities are not valid in an answer.
    """
    try:
        found = from_json(call.arguments, allow_inf_nan=False)
        json.dumps(found, allow_nan=False)  # refuses numbers such as 1e999
    except ValueError:
        return {INVALID_JSON: call.arguments}
    return found if isinstance(found, dict) else {INVALID_JSON: call.arguments}


def _input_text(call: ToolCall) -> str:
    """Arguments of a call as the JSON text of the same object; the model's own text if valid."""
    given = tool_input(call)
    return to_json(given).decode() if given.keys() == {INVALID_JSON} else call.arguments


def stop_fields(sample: SampleAnswer, *, has_calls: bool) -> Fields:
    """Fields `stop_reason` and `stop_sequence`."""
    sequence = sample.stop_reason if isinstance(sample.stop_reason, str) else None
    if sample.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if has_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if sequence is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def extension_fields(sample: SampleAnswer, *, token_ids: bool, support: bool) -> Fields:
    """Fields that Anthropic's API does not have."""
    fields: Fields = {"weight_versions": weight_version_spans(sample)}
    if support:
        fields |= support_field(sample)
    return {**fields, "token_ids": sample.token_ids} if token_ids else fields


def usage_fields(answer: RolloutAnswer) -> Fields:
    """Token counts; `input_tokens` excludes the cached ones, as in Anthropic's API."""
    counts = usage(answer)
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counts["completion_tokens"],
    }


async def message_events(
    samples: ChatSamples, head: Fields, *, token_ids: bool, support: bool
) -> AsyncIterator[bytes]:
    """Encoded events of a streamed message; `head` has its fields before the first token."""
    yield encoded({"type": "message_start", "message": head})
    parts, blocks = MessageParts(samples), _BlockEvents(signature=head["id"])
    end: Fields = {}
    async for part in sample_parts(samples.rollout):
        match part:
            case SamplePart(sample=sample):
                response = await parts.next(part)
                for encoded_event in await part.run(partial(blocks.of_response, response)):
                    yield encoded_event
                if sample is not None:
                    samples.check_ended(sample)
                    stop = stop_fields(sample, has_calls=blocks.num_calls > 0)
                    further = extension_fields(sample, token_ids=token_ids, support=support)
                    end = {"delta": stop, **further}
            case EndRecord(problem=problem) if problem is not None:
                yield error_event(samples.call.server, problem, to_error)
            case EndRecord():
                for event in blocks.end():
                    yield encoded(event)
                counts = usage_fields(await samples.rollout.answer())
                delta = {"type": "message_delta", **end, "usage": counts}
                yield await asyncio.to_thread(encoded, delta)
                yield encoded({"type": "message_stop"})


def ping() -> bytes:
    return encoded({"type": "ping"})


def to_error(problem: Problem) -> bytes:
    return encoded(anthropic_error(problem))


def encoded(event: Event) -> bytes:
    return f"event: {event['type']}\n".encode() + b"data: " + to_json(event) + b"\n\n"


@dataclass(slots=True, kw_only=True)
class _BlockEvents:
    """Events that open, extend and close the blocks of one message, in their order."""

    signature: str
    _calls: dict[int, int] = field(default_factory=dict)
    _index: int = -1
    _open: str | None = None

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def of_response(self, response: ChatResponse) -> list[bytes]:
        """Encoded events of a part of a response."""
        return [encoded(event) for event in self._events(response)]

    def _events(self, response: ChatResponse) -> Iterator[Event]:
        if response.reasoning:
            yield from self._text("thinking", response.reasoning)
        if response.content:
            yield from self._text("text", response.content)
        for part in response.tool_call_parts:
            yield from self._call(part)

    def _call(self, part: ToolCallPart) -> Iterator[Event]:
        """Events of a part of a tool call. Only a whole call is checked for valid arguments."""
        text = part.arguments
        if part.name is not None:
            call = ToolCall(id=part.id or "", name=part.name, arguments=part.arguments)
            yield from self._start({**_tool_use(call), "input": {}})
            self._calls[part.index] = self._index
            text = _input_text(call) if part.is_whole else part.arguments
        if text:
            assert self._calls[part.index] == self._index, "a part of a call that is closed"
            yield self._delta({"type": "input_json_delta", "partial_json": text})

    def end(self) -> Iterator[Event]:
        """Events that close the last block; a message has at least one."""
        if self._index < 0:
            yield from self._start({"type": "text", "text": ""})
        yield from self._close()

    def _text(self, kind: str, text: str) -> Iterator[Event]:
        if self._open != kind:
            empty = {"signature": ""} if kind == "thinking" else {}
            yield from self._start({"type": kind, kind: "", **empty})
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _start(self, block: Fields) -> Iterator[Event]:
        yield from self._close()
        self._index += 1
        self._open = block["type"]
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self) -> Iterator[Event]:
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self.signature})
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._index}
        self._open = None

    def _delta(self, delta: Fields) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _tool_use(call: ToolCall) -> Fields:
    return {"type": "tool_use", "id": call.id, "name": call.name}
