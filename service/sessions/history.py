"""Recorded calls of a session, matched to the message list that an agent sends next.

A conversation is hashed message by message. The hash after a message of the assistant identifies
the call that returned it, whatever a client changes on the way: the reasoning that it drops, white
space around the content, the format of a tool call's arguments, the ids of tool calls. Messages of
other roles must be the same. It has no I/O; `match` may run in another thread than `record`.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal

from engine.types.chat import ChatRequest
from service.rollouts.trees.segment import Attachment, Segment

Message = Mapping[str, Any]
Reason = Literal[
    "new_conversation", "extended", "edited_history", "template", "no_turn_end", "retry"
]
ASSISTANT = "assistant"
MAX_PARSED_CHARS = 2**16
"""Length of arguments above which they must be the same text.

Python's JSON parser holds the interpreter lock until it has read a whole text.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """An answered call. The path to `segment` is its prompt and its sample.

    `reasoning` is that of the returned message, which agents drop. The `num_hidden` last tokens of
    the sample are not in the text that the agent has received, except for `rest`, the text at its
    end that is a part of one of them.
    """

    segment: Segment
    reasoning: str | None = None
    num_hidden: int = 0
    rest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The last message of a conversation that a recorded call has returned, and its index.

    `earlier` are all such messages, by index. `has_foreign`: messages of the assistant follow that
    no call has returned.
    """

    call: RecordedCall
    index: int
    earlier: Mapping[int, RecordedCall]
    has_foreign: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TextMatch:
    """A recorded call whose prompt and response a text begins with, and the rest of the text."""

    call: RecordedCall
    rest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedResponse:
    """Digest of a conversation or a text that ends with a response, and the call it is found by.

    A conversation has the ids of the tool calls of its last message, a text its length.
    """

    digest: bytes
    call: RecordedCall
    tool_call_ids: tuple[str, ...] | None = None
    num_chars: int | None = None


@dataclass(slots=True)
class Conversations:
    """Recorded calls of one session, by the hash of their messages or the text of their tokens."""

    _calls: dict[bytes, dict[tuple[str, ...], RecordedCall]] = field(default_factory=dict)
    _texts: dict[int, dict[bytes, RecordedCall]] = field(default_factory=dict)

    def match(self, chat_request: ChatRequest) -> Match | None:
        """Find the deepest message of the assistant that a recorded call has returned.

        Takes time proportional to the length of the conversation.
        """
        found: dict[int, RecordedCall] = {}
        last_assistant = -1
        hashes = _hashes(chat_request, chat_request.messages)
        for index, (message, digest) in enumerate(zip(chat_request.messages, hashes, strict=True)):
            if message.get("role") != ASSISTANT:
                continue
            last_assistant = index
            if digest in self._calls:
                found[index] = _chosen(self._calls[digest], message)
        if not found:
            return None
        index = max(found)
        return Match(
            call=found[index], index=index, earlier=found, has_foreign=last_assistant > index
        )

    def record(
        self, chat_request: ChatRequest, returned_message: Message, call: RecordedCall
    ) -> None:
        """Record the message that a call has returned. Of equal ones the latest is found."""
        messages = [*chat_request.messages, returned_message]
        *_, digest = _hashes(chat_request, messages)
        ids = _call_ids(returned_message)
        same = {key: value for key, value in self._calls.get(digest, {}).items() if key != ids}
        # One assignment: `match` may run in another thread.
        self._calls[digest] = {**same, ids: call}

    def match_text(self, text: str) -> TextMatch | None:
        """Find the longest recorded text that a prompt begins with."""
        running, start, found = _new_hash(), 0, None
        for length in takewhile(lambda size: size <= len(text), sorted(self._texts)):
            running.update(_encoded(text[start:length]))
            start = length
            if (recorded := self._texts[length].get(running.digest())) is not None:
                found = TextMatch(call=recorded, rest=text[length:])
        return found

    def record_text(self, text: str, call: RecordedCall) -> None:
        """Record the text of a call's prompt and sample."""
        hashed = _new_hash()
        hashed.update(_encoded(text))
        self._texts.setdefault(len(text), {})[hashed.digest()] = call

    def responses(self) -> Iterator[RecordedResponse]:
        """All recorded responses; of equal conversations the latest comes last."""
        for digest, same in self._calls.items():
            for ids, call in same.items():
                yield RecordedResponse(digest=digest, call=call, tool_call_ids=ids)
        for length, found in self._texts.items():
            for digest, call in found.items():
                yield RecordedResponse(digest=digest, call=call, num_chars=length)

    def restore(self, response: RecordedResponse) -> None:
        """Add a response that another replica has recorded."""
        if response.tool_call_ids is not None:
            same = self._calls.setdefault(response.digest, {})
            same[response.tool_call_ids] = response.call
        else:
            assert response.num_chars is not None, "a text has a length"
            self._texts.setdefault(response.num_chars, {})[response.digest] = response.call


def attachment_reason(
    attachment: Attachment,
    match: Match | None,
    fallback: Literal["template", "no_turn_end"] | None,
    *,
    has_assistant: bool,
) -> Reason:
    """Reason for a prompt's place in the tree.

    `fallback`: the prompt is rendered by the template although a call matches. `has_assistant`: the
    conversation has messages of the assistant.
    """
    if attachment.is_repeated:
        return "retry"
    if match is None:
        return "edited_history" if has_assistant else "new_conversation"
    if fallback is not None:
        return fallback
    return "edited_history" if match.has_foreign else "extended"


def _hashes(chat_request: ChatRequest, messages: Sequence[Message]) -> Iterator[bytes]:
    """Hash of the conversation after each message; tools and template options are included."""
    running = _new_hash()
    running.update(_encoded(_canonical([chat_request.tools, chat_request.template_options])))
    call_numbers: dict[str, int] = {}
    for message in messages:
        running.update(_encoded(_canonical(_normalized(message, call_numbers))))
        yield running.digest()


def _normalized(message: Message, call_numbers: dict[str, int]) -> list[Any]:
    """The parts of a message that count. Ids of tool calls are numbered in order of appearance."""
    role, content = message.get("role"), _text(message.get("content"))
    if role == ASSISTANT:
        calls = message.get("tool_calls") or ()
        numbers = [_number(str(call.get("id")), call_numbers) for call in calls]
        return [role, content.strip(), [_called(call) for call in calls], numbers]
    answered = message.get("tool_call_id")
    number = None if answered is None else _number(str(answered), call_numbers)
    return [role, content, message.get("name"), number]


def _text(content: Any) -> str:
    """Content of a message as text; its text parts are joined."""
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(
        part if isinstance(part, str) else str(part.get("text", part)) for part in content
    )


def _called(call: Mapping[str, Any]) -> list[Any]:
    function = call.get("function") or {}
    return [function.get("name"), _arguments(function.get("arguments"))]


def _arguments(given: Any) -> str:
    """Canonical arguments of a tool call. All numbers are floats, as JavaScript reads them."""
    try:
        text = given if isinstance(given, str) else _canonical(given)
        if len(text) > MAX_PARSED_CHARS:
            return text
        return _canonical(json.loads(text or "{}", parse_int=float))
    except (ValueError, RecursionError):
        return str(given)


def _number(call_id: str, call_numbers: dict[str, int]) -> int:
    return call_numbers.setdefault(call_id, len(call_numbers))


def _call_ids(message: Message) -> tuple[str, ...]:
    return tuple(str(call.get("id")) for call in message.get("tool_calls") or ())


def _chosen(same: Mapping[tuple[str, ...], RecordedCall], message: Message) -> RecordedCall:
    """The call that returned the message's tool call ids, else the latest."""
    latest = list(same.values())[-1]
    return same.get(_call_ids(message), latest)


def _canonical(value: Any) -> str:
    """JSON text that is equal for equal values. No text is the beginning of another.

    `iterencode` returns it in short pieces; `json.dumps` would hold the interpreter lock.
    """
    return "".join(_ENCODER.iterencode(value)) + "\n"


_ENCODER = json.JSONEncoder(sort_keys=True)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _new_hash() -> "hashlib.blake2b":
    return hashlib.blake2b(digest_size=16)
