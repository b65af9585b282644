"""Encoding of answers of OpenAI's Responses API: output items, and events of a stream."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic_core import to_json

from coppice.wire.packed.results import EndRecord
from coppice.wire.problem_catalogue import Problem
from coppice.wire.rollouts import SampleAnswer
from engine.types.chat import ChatResponse, ToolCallPart
from service.compat.chat.samples import ChatSamples, MessageParts
from service.compat.event_stream import error_event
from service.compat.openai_errors import problem_message
from service.compat.responses.items import custom_input, encoded_reasoning
from service.compat.sample_stream import SamplePart, sample_parts

Event = dict[str, Any]
Item = dict[str, Any]
Logprobs = list[dict[str, Any]]
ToResponse = Callable[[SampleAnswer, list[Item]], Awaitable[Item]]


@dataclass(slots=True, kw_only=True)
class OutputItems:
    """Output items of one response, built from its parts; each call returns events of a stream.

    `logprobs` are set before the last part is added.
    """

    name: str
    custom_tools: frozenset[str]
    encrypts: bool
    logprobs: Logprobs = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    _text: str = ""
    _calls: dict[int, int] = field(default_factory=dict)

    def add(self, part: ChatResponse) -> list[Event]:
        """Events of the next part of the response."""
        return list(self._events(part))

    def end(self, status: str) -> list[Event]:
        """Events that close the last item; a response without items has an empty message."""
        opened = [] if self.items else list(self._open_text("message"))
        return [*opened, *self._close(status)]

    def _events(self, part: ChatResponse) -> Iterator[Event]:
        if part.reasoning:
            yield from self._add_text("reasoning", part.reasoning)
        if part.content:
            yield from self._add_text("message", part.content)
        for call in part.tool_call_parts:
            yield from self._add_call(call)

    @property
    def _last(self) -> Item | None:
        """The item that is still open."""
        last = self.items[-1] if self.items else None
        return last if last and last.get("status") == "in_progress" else None

    def _add_text(self, kind: str, text: str) -> Iterator[Event]:
        last = self._last
        if last is None or last["type"] != kind:
            yield from self._close("completed")
            yield from self._open_text(kind)
        self._text += text
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield self._of_part(f"{_TEXTS[kind]}.delta", {"delta": text, **more})

    def _open_text(self, kind: str) -> Iterator[Event]:
        self._text = ""
        own: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        item = {"type": kind, "id": self._id(kind), "status": "in_progress", **own, "content": []}
        self.items.append(item)
        yield self._of_item("response.output_item.added", item)
        yield self._of_part("response.content_part.added", {"part": self._part("")})

    def _close(self, status: str) -> Iterator[Event]:
        item = self._last
        if item is None:
            return
        if item["type"] in _CALLS:
            yield from self._close_call(item, status)
            return
        kind, part = item["type"], self._part(self._text)
        more = {"logprobs": part["logprobs"]} if kind == "message" else {}
        yield self._of_part(f"{_TEXTS[kind]}.done", {"text": self._text, **more})
        yield self._of_part("response.content_part.done", {"part": part})
        item |= {"content": [part], "status": status}
        if kind == "reasoning" and self.encrypts:
            item["encrypted_content"] = encoded_reasoning(self._text)
        yield self._of_item("response.output_item.done", item)

    def _part(self, text: str) -> dict[str, Any]:
        if self.items[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = self.logprobs if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _add_call(self, part: ToolCallPart) -> Iterator[Event]:
        """Events of a part of a call. The input of a custom tool is sent when it is complete."""
        if part.name is not None:
            yield from self._close("completed")
            yield from self._open_call(part)
        at = self._calls[part.index]
        item = self.items[at]
        assert item is self._last, "a part of a call that is closed"
        item[_field(item)] += part.arguments
        if part.arguments and item["type"] == "function_call":
            yield self._of_call("delta", at, {"delta": part.arguments})
        if part.is_whole:
            yield from self._close("completed")

    def _open_call(self, part: ToolCallPart) -> Iterator[Event]:
        kind = "custom_tool_call" if part.name in self.custom_tools else "function_call"
        item = {"type": kind, "id": self._id(kind), "call_id": part.id, "name": part.name}
        self._calls[part.index] = len(self.items)
        self.items.append({**item, _field(item): "", "status": "in_progress"})
        yield self._of_item("response.output_item.added", self.items[-1])

    def _close_call(self, item: Item, status: str) -> Iterator[Event]:
        at, name = len(self.items) - 1, _field(item)
        if item["type"] == "custom_tool_call":
            item[name] = custom_input(item[name])
            yield self._of_call("delta", at, {"delta": item[name]})
        yield self._of_call("done", at, {name: item[name], "name": item["name"]})
        item["status"] = status
        yield self._of_item("response.output_item.done", item)

    def _of_call(self, kind: str, at: int, fields: dict[str, Any]) -> Event:
        item = self.items[at]
        event = f"{_TEXTS[item['type']]}.{kind}"
        return {"type": event, "item_id": item["id"], "output_index": at, **fields}

    def _id(self, kind: str) -> str:
        return f"{_IDS[kind]}_{self.name}_{len(self.items)}"

    def _of_item(self, kind: str, item: Item) -> Event:
        return {"type": kind, "output_index": len(self.items) - 1, "item": dict(item)}

    def _of_part(self, kind: str, fields: dict[str, Any]) -> Event:
        place = {"output_index": len(self.items) - 1, "content_index": 0}
        return {"type": kind, "item_id": self.items[-1]["id"], **place, **fields}


_CALLS = ("function_call", "custom_tool_call")
_IDS = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
}
_TEXTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}


def _field(item: Item) -> str:
    """Field of a call with the text that the model has generated."""
    return "input" if item["type"] == "custom_tool_call" else "arguments"


@dataclass(slots=True, kw_only=True)
class ResponseStream:
    """Server-sent events of one streamed response, with their sequence numbers.

    `head` is the response before its first token. `finish` returns it after the last one. With
    `has_logprobs`, a message that may call tools is sent at its end, as its logprobs are those of
    all tokens.
    """

    samples: ChatSamples
    head: Item
    items: OutputItems
    to_logprobs: Callable[[SampleAnswer], Awaitable[Logprobs]]
    finish: ToResponse
    has_logprobs: bool
    _number: int = 0

    async def events(self) -> AsyncIterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield await asyncio.to_thread(self._encoded, {"type": kind, "response": self.head})
        parts = MessageParts(self.samples, buffers_tool_calls=self.has_logprobs)
        last = None
        async for part in sample_parts(self.samples.rollout):
            match part:
                case SamplePart(sample=sample):
                    if sample is not None:
                        self.samples.check_ended(sample)
                        self.items.logprobs = await self.to_logprobs(sample)
                        last = sample
                    added = await parts.next(part)
                    for encoded in await part.run(partial(self._added, added)):
                        yield encoded
                case EndRecord(problem=problem) if problem is not None:
                    yield error_event(self.samples.call.server, problem, self.failed)
                    return
        assert last is not None, "a rollout without a problem has a sample"
        for encoded in await asyncio.to_thread(self._closed, item_status(last)):
            yield encoded
        response = await self.finish(last, self.items.items)
        event = {"type": f"response.{response['status']}", "response": response}
        yield await asyncio.to_thread(self._encoded, event)

    def failed(self, problem: Problem) -> bytes:
        """Encoded event of a failure."""
        error = {"code": "server_error", "message": problem_message(problem)}
        response = {**self.head, "status": "failed", "error": error, "output": self.items.items}
        return self._encoded({"type": "response.failed", "response": response})

    def _closed(self, status: str) -> list[bytes]:
        return [self._encoded(event) for event in self.items.end(status)]

    def _added(self, part: ChatResponse) -> list[bytes]:
        return [self._encoded(event) for event in self.items.add(part)]

    def _encoded(self, event: Event) -> bytes:
        data = to_json({**event, "sequence_number": self._number})
        self._number += 1
        return f"event: {event['type']}\n".encode() + b"data: " + data + b"\n\n"


def item_status(sample: SampleAnswer) -> str:
    """Status of a response, and of its last item."""
    return "incomplete" if sample.finish_reason == "length" else "completed"
