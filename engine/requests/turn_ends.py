"""Chat template text after an assistant message (end of turn), found with a placeholder.

The message is rendered with a mark instead of its content and of the arguments of its tool calls.
The mark is random, so that no other message contains it. What follows the last mark in the prompt
does not depend on the text of the message, which a template may rewrite or drop.
"""

import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.errors import NoTurnEnd

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Mark:
    """Random text that replaces the content of a message and the arguments of its tool calls."""

    text: str = field(default_factory=lambda: f"mark{uuid.uuid4().hex}")

    @property
    def content(self) -> str:
        return f"{self.text}c"

    @property
    def argument(self) -> str:
        return f"{self.text}a"

    def in_messages(self, messages: Sequence[Message], index: int) -> list[Message]:
        """The messages, in which the one at `index` is marked and has no reasoning."""
        return [*messages[:index], self._marked(messages[index]), *messages[index + 1 :]]

    def _marked(self, message: Message) -> Message:
        calls = message.get("tool_calls") or []
        has_content = bool(message.get("content")) or not calls
        marked = {"role": message["role"], "content": self.content if has_content else ""}
        arguments = json.dumps({self.argument: self.argument})
        marked_calls = [_with_arguments(call, arguments) for call in calls]
        return {**marked, "tool_calls": marked_calls} if calls else marked

    def rest_of(self, rendered: str) -> tuple[str, bool]:
        """Text after the last mark, and whether it is the content's. Raises NoTurnEnd."""
        start = rendered.rfind(self.text)
        if start < 0:
            raise NoTurnEnd("the chat template does not render the message")
        end = start + len(self.content)
        return rendered[end:], rendered[start:end] == self.content


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """Text after a message. If `dropped_token` is set, it is the first token, and is left out."""

    text: str
    dropped_token: int | None = None


@dataclass(frozen=True, slots=True)
class _End:
    """A token that ends a message: its id and its place in the text after the mark."""

    token_id: int
    start: int
    is_next: bool = False
    """The token does not belong to the message but begins the next one."""


class TurnEnds:
    """Finds the token that ends a message of the assistant: a special token, or an EOS token."""

    def __init__(self, special_tokens: Mapping[int, str], eos_token_ids: Iterable[int]) -> None:
        self._ids = {text: token_id for token_id, text in special_tokens.items()}
        self._eos_token_ids = frozenset(eos_token_ids)
        eos = [special_tokens[each] for each in self._eos_token_ids if each in special_tokens]
        self._special, self._eos = _any_of(self._ids), _any_of(eos)

    def tail(self, mark: Mark, whole: str, alone: Callable[[], str], last_token: int) -> Tail:
        """Text that follows a message whose sample ended with `last_token`.

        `whole` is the rendered conversation, and `alone` renders it up to the message. Raises
        NoTurnEnd if the tool calls of the message have no end that can be found.
        """
        rest, is_content = mark.rest_of(whole)
        end = self._adjacent(rest) if is_content else None
        is_adjacent = end is not None
        end = end or self._inner(rest, lambda: mark.rest_of(alone())[0])
        if end is None:
            if not is_content:
                raise NoTurnEnd("the chat template writes no token after a tool call")
            return Tail(text=rest)
        if last_token == end.token_id or (
            last_token in self._eos_token_ids
            and not self._is_next(end, lambda: mark.rest_of(alone())[0])
        ):
            return Tail(text=rest[end.start :], dropped_token=end.token_id)
        return Tail(text=rest if is_adjacent else rest[end.start :])

    def _adjacent(self, rest: str) -> _End | None:
        """The special token that follows the content, after white space at most."""
        start = len(rest) - len(rest.lstrip())
        found = self._special.match(rest, start)
        return None if found is None else _End(self._ids[found.group()], start)

    def _inner(self, rest: str, alone: Callable[[], str]) -> _End | None:
        """The first EOS token, if the message is rendered equally up to it when it is the last."""
        found = self._eos.search(rest)
        if found is None:
            return None
        end, rest_alone = _End(self._ids[found.group()], found.start()), alone()
        if rest_alone.startswith(rest[: found.end()]):
            return end
        if rest_alone.rstrip() == rest[: end.start].rstrip():
            return _End(end.token_id, end.start, is_next=True)
        return None

    def _is_next(self, end: _End, alone: Callable[[], str]) -> bool:
        """True if the token begins the next message: without one, no special token is rendered."""
        return end.is_next or self._special.search(alone()) is None


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Text of a tokenizer's special tokens, which are encoded wherever they are in a text."""
    return {
        token_id: token.content
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special
    }


def _with_arguments(call: Message, arguments: str) -> Message:
    if not isinstance(call.get("function"), Mapping):
        return call
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Pattern of any of the texts, the longest first; without texts it matches nothing."""
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
