"""Incremental parser of one running sample into reasoning, content and tool calls.

The joined parts are the message that the whole response is parsed to, up to white space around its
content if it calls tools. A part never adds to text or to a call that a later call follows.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engine.protocol.text import ResponseStream
from engine.types.chat import ChatResponse, ToolCall, ToolCallPart
from service.compat.sample_stream import SamplePart, remainder
from service.rollouts.tokenizer import Tokenizer


@dataclass(slots=True)
class _SentCall:
    name: str
    arguments: str = ""


class StreamedMessage:
    """Parts of the message of one sample. With `is_buffered` it is one part, at the end.

    Without `parallel`, only the first tool call is returned. White space at the end of content is
    held back, since parsers drop it before a tool call. Text after a sent call is not sent.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stream: ResponseStream,
        *,
        is_buffered: bool = False,
        parallel: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._stream = stream
        self._is_buffered = is_buffered
        self._parallel = parallel
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._space = ""
        self._calls: dict[int, _SentCall] = {}

    async def next(self, part: SamplePart) -> ChatResponse:
        """Part of the message that new tokens of a running sample add."""
        if self._is_buffered:
            return ChatResponse(content=None)
        new = self._trimmed(await self._tokenizer.add(self._stream, part.token_ids))
        self._content.append(new.content or "")
        self._reasoning.append(new.reasoning or "")
        calls = tuple(call for call in new.tool_call_parts if self._record(call))
        return replace(new, tool_call_parts=calls)

    async def last(self, part: SamplePart, whole: ChatResponse) -> ChatResponse:
        """Parts of the whole response that were not sent.

        Text or calls that contradict what was sent are omitted, since that cannot be withdrawn.
        """
        text = self._rest_of_text(whole)
        calls = await self._rest_of_calls(part, whole.tool_calls)
        content, reasoning = text or ("", "")
        return replace(
            whole,
            content=content or None,
            reasoning=reasoning or None,
            tool_call_parts=tuple(calls or ()),
            parsed=whole.parsed and text is not None and calls is not None,
        )

    def _trimmed(self, new: ChatResponse) -> ChatResponse:
        """The part without the white space at its end and without text after a sent call."""
        if not self._stream.has_tool_calls:
            return new
        if self._calls:
            return replace(new, content=None, reasoning=None)
        text = self._space + (new.content or "")
        kept = text.rstrip()
        self._space = text[len(kept) :]
        return replace(new, content=kept or None)

    def _record(self, call: ToolCallPart) -> bool:
        """Record a part of a call; false if it cannot be sent.

        It must begin the next call or continue the last one, since the calls before are complete.
        """
        if call.name is not None and call.index == len(self._calls):
            if call.index > 0 and not self._parallel:
                return False
            self._calls[call.index] = _SentCall(call.name)
        elif call.name is not None or call.index != len(self._calls) - 1:
            return False
        self._calls[call.index].arguments += call.arguments
        return True

    def _rest_of_text(self, whole: ChatResponse) -> tuple[str, str] | None:
        """Content and reasoning that were not sent; None if the response contradicts what was sent.

        Parsers may drop white space before content that a tool call follows. After a sent call
        there is no place for text: white space is dropped.
        """
        content, sent = whole.content or "", "".join(self._content)
        if whole.tool_calls:
            content, sent = content.lstrip(), sent.lstrip()
        reasoning = remainder(whole.reasoning or "", "".join(self._reasoning))
        rest = remainder(content, sent)
        if rest is None or reasoning is None:
            return None
        if not self._calls:
            return rest, reasoning
        return None if (rest + reasoning).strip() else ("", "")

    async def _rest_of_calls(
        self, part: SamplePart, calls: Sequence[ToolCall]
    ) -> list[ToolCallPart] | None:
        """Parts of the calls that were not sent; None if a call contradicts what was sent."""
        if len(self._calls) > len(calls):
            return None
        last = await self._last_arguments(part) if self._calls else {}
        rests = [self._rest_of_call(at, call, last.get(at, "")) for at, call in enumerate(calls)]
        if any(rest is None for rest in rests):
            return None
        added = [rest for rest in rests if rest is not None and (rest.name or rest.arguments)]
        is_closed = any(rest.index < len(self._calls) - 1 for rest in added)
        return None if is_closed else added

    async def _last_arguments(self, part: SamplePart) -> Mapping[int, str]:
        """Arguments that the last tokens of the sample add, as the model has written them."""
        assert part.sample is not None, "the last part"
        stop_reason = part.sample.stop_reason
        found = await self._tokenizer.finish(self._stream, part.token_ids, stop_reason)
        added: dict[int, str] = {}
        for call in found.tool_call_parts:
            added[call.index] = added.get(call.index, "") + call.arguments
        return added

    def _rest_of_call(self, index: int, call: ToolCall, last: str) -> ToolCallPart | None:
        """Arguments that were not sent: those of the call, or the model's own text of them."""
        sent = self._calls.get(index)
        if sent is None:
            return whole_call(index, call)
        rest = remainder(call.arguments, sent.arguments)
        if rest is None and _is_same_json(sent.arguments + last, call.arguments):
            rest = last
        if rest is None or sent.name != call.name:
            return None
        return ToolCallPart(index=index, arguments=rest)


def whole_call(index: int, call: ToolCall) -> ToolCallPart:
    return ToolCallPart(
        index=index, id=call.id, name=call.name, arguments=call.arguments, is_whole=True
    )


def with_whole_calls(response: ChatResponse) -> ChatResponse:
    """A whole response as a part that has all of it."""
    calls = tuple(map(whole_call, range(len(response.tool_calls)), response.tool_calls))
    return replace(response, tool_call_parts=calls)


def _is_same_json(one: str, other: str) -> bool:
    """True for equal JSON values; parsers write the arguments of a whole call with other spaces."""
    try:
        return bool(json.loads(one) == json.loads(other))
    except (ValueError, RecursionError):
        return False
