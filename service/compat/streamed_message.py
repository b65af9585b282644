"""Message of one running sample, part by part: reasoning, content and tool calls.

The joined parts are the message that the whole response is parsed to.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engine.protocol import ResponseStream
from engine.types import ChatResponse, ToolCall, ToolCallPart
from service.compat.sample_stream import SamplePart, remainder
from service.rollouts.tokenizer import Tokenizer


@dataclass(slots=True)
class _SentCall:
    name: str
    arguments: str = ""


class StreamedMessage:
    """Parts of the message of one sample. With `is_buffered` it is one part, at the end.

    Without `parallel`, only the first tool call is returned. White space at the end of content is
    held back, since parsers drop it before a tool call.
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
        """What the tokens of a running sample add to its message."""
        if self._is_buffered:
            return ChatResponse(content=None)
        new = self._trimmed(await self._tokenizer.add(self._stream, part.token_ids))
        self._content.append(new.content or "")
        self._reasoning.append(new.reasoning or "")
        for call in new.tool_call_parts:
            self._record(call)
        return new

    async def last(self, part: SamplePart, whole: ChatResponse) -> ChatResponse:
        """Parts of the whole response that were not sent.

        Empty if the response contradicts what was sent, since that cannot be withdrawn.
        """
        content, reasoning = self._rest_of_text(whole)
        calls = await self._rest_of_calls(part, whole.tool_calls)
        if content is None or reasoning is None or calls is None:
            return ChatResponse(content=None, tool_calls=whole.tool_calls, parsed=False)
        return replace(
            whole,
            content=content or None,
            reasoning=reasoning or None,
            tool_call_parts=tuple(calls),
        )

    def _trimmed(self, new: ChatResponse) -> ChatResponse:
        """The part without the white space at its end and without further parallel calls."""
        calls = [call for call in new.tool_call_parts if self._parallel or call.index == 0]
        if not self._stream.has_tool_calls:
            return replace(new, tool_call_parts=tuple(calls))
        text = self._space + (new.content or "")
        kept = text.rstrip()
        self._space = text[len(kept) :]
        return replace(new, content=kept or None, tool_call_parts=tuple(calls))

    def _record(self, call: ToolCallPart) -> None:
        if call.name is not None:
            self._calls[call.index] = _SentCall(call.name)
        if call.index in self._calls:
            self._calls[call.index].arguments += call.arguments

    def _rest_of_text(self, whole: ChatResponse) -> tuple[str | None, str | None]:
        """Content and reasoning that were not sent; None if the response does not begin with it.

        Parsers may drop white space before content that a tool call follows.
        """
        content, sent = whole.content or "", "".join(self._content)
        if whole.tool_calls:
            content, sent = content.lstrip(), sent.lstrip()
        reasoning = remainder(whole.reasoning or "", "".join(self._reasoning))
        return remainder(content, sent), reasoning

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
        return [rest for rest in rests if rest is not None and (rest.name or rest.arguments)]

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
