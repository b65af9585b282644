"""Large JSON documents to Python values in bounded steps, for a thread beside the event loop.

`pydantic_core.from_json` holds the GIL for its whole call, so a thread alone does not free the
event loop. The document is scanned first, by regular expressions in steps of at most `STEP_BYTES`:
that counts its values before any of them is built, and finds where it can be cut. Then it is parsed
piece by piece, each of about `PIECE_BYTES`. Between two calls the interpreter can switch threads.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from pydantic_core import from_json

from service.http.errors import BodyTooLarge, InvalidJson

PIECE_BYTES = 64 * 2**10
STEP_BYTES = 64 * 2**10
MAX_DEPTH = 200
"""pydantic_core's own bound, which pieces would reset."""
MAX_MEMBERS = 65_536
"""Of one object; pydantic reports every unknown one, about 1 us each, in one call."""

# Text between brackets, with the short strings in it, then the bracket.
_STEP = re.compile(rb'((?:[^"\[\]{}]++|"(?:[^"\\]{1,4096}+|\\.){0,64}+")*+)([\[\]{}]?)', re.DOTALL)
_LONG_STRING = re.compile(rb'(?:[^"\\]{1,16384}+|\\.){1,64}+', re.DOTALL)
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_STRING_OR_COMMA = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|,', re.DOTALL)
_WHITESPACE = b" \t\n\r"
_CLOSER = {b"[": b"]", b"{": b"}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLimits:
    """`values` are all of a document; objects and arrays among them cost far more memory."""

    values: int
    containers: int
    piece_bytes: int = PIECE_BYTES
    step_bytes: int = STEP_BYTES


def read_value(body: bytes, limits: JsonLimits) -> Any:
    """InvalidJson unless `body` is one JSON document; BodyTooLarge if it exceeds the limits."""
    start = len(body) - len(body.lstrip(_WHITESPACE))
    outline = _Scan(body, limits).outline()
    if start not in outline.ends:
        return _parsed(body)
    if body[outline.ends[start] :].strip(_WHITESPACE):
        raise InvalidJson()
    return _Builder(body, outline).value(start)


def _parsed(piece: bytes) -> Any:
    try:
        return from_json(piece)
    except ValueError as error:
        raise InvalidJson() from error


def _integers(values: list[Any]) -> list[Any]:
    """Whole floats as integers, which they are to JSON Schema. Models accept both, but a list of a
    million such floats takes 0.3 s to validate, in one call."""
    if not any(type(value) is float for value in values):
        return values
    return [int(v) if type(v) is float and v.is_integer() else v for v in values]


@dataclass(slots=True)
class _Outline:
    """Containers longer than a piece, by the position where they start.

    `ends`: the positions behind them. `cuts`: commas between their elements. `nested`: by the
    position where a piece starts, the long container that is alone in it.
    """

    ends: dict[int, int] = field(default_factory=dict)
    cuts: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    nested: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Open:
    """A container that is not closed yet. `closer`: the bracket that it needs. `gap`: where the
    text before it starts. `piece`: where its own current piece starts."""

    start: int
    closer: bytes
    gap: int
    piece: int


class _Scan:
    """One pass over a document, from bracket to bracket."""

    def __init__(self, body: bytes, limits: JsonLimits) -> None:
        self._body = body
        self._limits = limits
        self._outline = _Outline()
        self._open: list[_Open] = []
        self._gap = 0  # the end of the last bracket, or of the last long string
        self._num_values = 0
        self._num_containers = 0

    def outline(self) -> _Outline:
        position = 0
        while position < len(self._body):
            position = self._step(position)
        if self._open:
            raise InvalidJson()
        return self._outline

    def _step(self, position: int) -> int:
        """Returns where the next step starts."""
        step = _STEP.match(self._body, position, position + self._limits.step_bytes)
        assert step is not None, "it matches nothing as well"
        text_end, end = step.span(1)[1], step.end()
        if end == position:
            return self._long_string(position)
        self._count(position, text_end)
        if bracket := step[2]:
            self._separate(text_end)
            if bracket in b"[{":
                self._begin(text_end, bracket)
            else:
                self._close(end, bracket)
            self._gap = end
        return end

    def _long_string(self, start: int) -> int:
        self._separate(start)
        end = start + 1
        while part := _LONG_STRING.match(self._body, end):
            end = part.end()
        if self._body[end : end + 1] != b'"':
            raise InvalidJson()
        self._gap = end + 1
        return self._gap

    def _count(self, start: int, end: int) -> None:
        """One value a comma, and one a container."""
        if self._body.find(b'"', start, end) < 0:
            self._num_values += self._body.count(b",", start, end)
        else:
            self._num_values += _STRING.sub(b"", self._body[start:end]).count(b",")
        if self._num_values > self._limits.values:
            raise BodyTooLarge(
                f"the JSON holds more than {self._limits.values} values; send several requests"
            )

    def _separate(self, end: int) -> None:
        """Pieces end at a comma. An element that is longer than a piece is not cut here."""
        if not self._open or end - self._open[-1].piece <= self._limits.piece_bytes:
            return
        around, free = self._open[-1], self._gap
        cuts = self._outline.cuts[around.start]
        while end - around.piece > self._limits.piece_bytes:
            limit = around.piece + self._limits.piece_bytes
            comma = self._last_comma(free, limit) if limit > free else -1
            if comma < 0:
                comma = self._first_comma(free, end)
            if comma < 0:
                return
            cuts.append(comma)
            free = around.piece = comma + 1

    def _first_comma(self, start: int, end: int) -> int:
        return next(self._commas(start, end), -1)

    def _last_comma(self, start: int, end: int) -> int:
        if self._body.find(b'"', start, end) < 0:
            return self._body.rfind(b",", start, end)
        return max(self._commas(start, end), default=-1)

    def _commas(self, start: int, end: int) -> Iterator[int]:
        """Outside strings. There is no string before `start` that ends after it."""
        found = _STRING_OR_COMMA.finditer(self._body, start, end)
        return (match.start() for match in found if match[0] == b",")

    def _begin(self, at: int, bracket: bytes) -> None:
        self._num_values += 1
        self._num_containers += 1
        if self._num_containers > self._limits.containers:
            raise BodyTooLarge(
                f"the JSON holds more than {self._limits.containers} objects and arrays; "
                "send several requests"
            )
        if len(self._open) == MAX_DEPTH:
            raise InvalidJson(f"the JSON is nested deeper than {MAX_DEPTH}")
        self._open.append(_Open(at, _CLOSER[bracket], self._gap, at + 1))

    def _close(self, end: int, bracket: bytes) -> None:
        if not self._open or self._open[-1].closer != bracket:
            raise InvalidJson()
        closed = self._open.pop()
        if end - closed.start > self._limits.piece_bytes:
            self._outline.ends[closed.start] = end
            if self._open:
                self._isolate(closed)

    def _isolate(self, closed: _Open) -> None:
        """Its piece starts with it; the next comma ends it, since a piece is that long by then."""
        around = self._open[-1]
        comma = self._last_comma(max(closed.gap, around.piece), closed.start)
        if comma >= 0:
            self._outline.cuts[around.start].append(comma)
            around.piece = comma + 1
        elif around.piece < closed.gap:
            raise InvalidJson("a long array or object follows no comma, or its key is too long")
        self._outline.nested[around.piece] = closed.start


class _Builder:
    """Every piece is parsed as what it is: the elements of an array, or the members of an object.

    A cut at a wrong place, which only a malformed document has, leaves pieces that do not parse.
    """

    def __init__(self, body: bytes, outline: _Outline) -> None:
        self._body = body
        self._outline = outline

    def value(self, start: int) -> Any:
        return self._array(start) if self._body[start] == 0x5B else self._object(start)

    def _array(self, start: int) -> list[Any]:
        built: list[Any] = []
        for first, last in self._pieces(start):
            nested = self._outline.nested.get(first)
            if nested is None:
                built += _integers(self._some(b"[%b]", first, last))
            elif self._body[first:nested].strip(_WHITESPACE):
                raise InvalidJson()
            else:
                built.append(self._alone(nested, last))
        return built

    def _object(self, start: int) -> dict[str, Any]:
        built: dict[str, Any] = {}
        for first, last in self._pieces(start):
            nested = self._outline.nested.get(first)
            if nested is None:
                built |= self._some(b"{%b}", first, last)
            else:
                (name,) = self._some(b"{%b[]}", first, nested)
                built[name] = self._alone(nested, last)
            if len(built) > MAX_MEMBERS:
                raise BodyTooLarge(f"an object has more than {MAX_MEMBERS} members")
        return built

    def _pieces(self, start: int) -> Iterator[tuple[int, int]]:
        bounds = [start, *self._outline.cuts[start], self._outline.ends[start] - 1]
        return ((before + 1, at) for before, at in pairwise(bounds))

    def _some(self, form: bytes, first: int, last: int) -> Any:
        """There is something beside a comma."""
        value = _parsed(form % self._body[first:last])
        if not value and b"," in (self._body[first - 1 : first], self._body[last : last + 1]):
            raise InvalidJson()
        return value

    def _alone(self, nested: int, last: int) -> Any:
        if self._body[self._outline.ends[nested] : last].strip(_WHITESPACE):
            raise InvalidJson()
        return self.value(nested)
