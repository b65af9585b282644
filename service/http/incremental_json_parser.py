"""Parser of large JSON documents in bounded steps, for a worker thread.

`pydantic_core.from_json` holds the GIL for its whole call, so a thread alone does not free the
event loop. A first pass scans the document with regular expressions, in steps of at most
`STEP_BYTES`. It counts the values before any of them is built, and finds the positions where the
document can be cut. A second pass parses pieces of about `PIECE_BYTES`. Between two calls the
interpreter can switch threads.
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
"""pydantic_core's own depth limit, which would otherwise restart at 0 in every piece."""
MAX_MEMBERS = 65_536
"""Largest number of members of one object.

pydantic reports all unknown members in one call, about 1 us each.
"""


# Text up to a bracket, including short strings, then the bracket itself if there is one.
_STEP = re.compile(rb'((?:[^"\[\]{}]++|"(?:[^"\\]{1,4096}+|\\.){0,64}+")*+)([\[\]{}]?)', re.DOTALL)
_LONG_STRING = re.compile(rb'(?:[^"\\]{1,16384}+|\\.){1,64}+', re.DOTALL)
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_STRING_OR_COMMA = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|,', re.DOTALL)
_WHITESPACE = b" \t\n\r"
_CLOSER = {b"[": b"]", b"{": b"}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLimits:
    """Limits on the values in a JSON document, and step sizes of its parser.

    `values`: all values of the document. `containers`: the objects and arrays among them, limited
    separately because they take far more memory.
    """

    values: int
    containers: int
    piece_bytes: int = PIECE_BYTES
    step_bytes: int = STEP_BYTES


def read_value(body: bytes, limits: JsonLimits) -> Any:
    """Parse a JSON document, a large one in bounded steps that release the GIL in between.

    Raises InvalidJson if `body` is not one JSON document, BodyTooLarge if it exceeds the limits.
    """
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
    """Convert whole-number floats (1.0) in a list to integers, as JSON Schema treats them.

    pydantic models accept both, but validation of a list of a million such floats takes 0.3 s, in
    one call.
    """
    if not any(type(value) is float for value in values):
        return values
    return [int(v) if type(v) is float and v.is_integer() else v for v in values]


@dataclass(slots=True)
class _Outline:
    """Positions at which the long arrays and objects of a JSON document are cut for parsing.

    The text between two cuts is a piece. Containers are arrays and objects; only containers longer
    than a piece are cut.

    `ends`: start of a container to the position after its end. `cuts`: start of a container to the
    positions of the commas between its elements where it is cut. `nested`: start of a piece to the
    start of the long container that is the only element of that piece.
    """

    ends: dict[int, int] = field(default_factory=dict)
    cuts: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    nested: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Open:
    """A JSON array or object whose closing bracket has not been scanned yet.

    `closer`: its closing bracket. `gap`: start of the text before the container, after the previous
    bracket or long string. `piece`: start of its current piece.
    """

    start: int
    closer: bytes
    gap: int
    piece: int


class _Scan:
    """First pass over a JSON document: checks the limits and finds the positions to cut it."""

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
        """Scan the document up to the next bracket at most; returns the position to continue at."""
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
        """Count the JSON values in a range by its commas; `_begin` adds one per array or object."""
        if self._body.find(b'"', start, end) < 0:
            self._num_values += self._body.count(b",", start, end)
        else:
            self._num_values += _STRING.sub(b"", self._body[start:end]).count(b",")
        if self._num_values > self._limits.values:
            raise BodyTooLarge(
                f"the JSON has more than {self._limits.values} values: send several requests"
            )

    def _separate(self, end: int) -> None:
        """Split the innermost open JSON array or object at commas into pieces of bounded size.

        An element that is longer than a piece is not cut here.
        """
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
        """Positions of commas outside strings in `[start, end)`.

        `start` must not be inside a string.
        """
        found = _STRING_OR_COMMA.finditer(self._body, start, end)
        return (match.start() for match in found if match[0] == b",")

    def _begin(self, at: int, bracket: bytes) -> None:
        self._num_values += 1
        self._num_containers += 1
        if self._num_containers > self._limits.containers:
            raise BodyTooLarge(
                f"the JSON has more than {self._limits.containers} objects and arrays: "
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
        """Cut so that a long array or object is parsed separately from its neighbours.

        The piece is cut before the container here. `_separate` cuts it at the next comma, because
        by then it is longer than a piece.
        """
        around = self._open[-1]
        comma = self._last_comma(max(closed.gap, around.piece), closed.start)
        if comma >= 0:
            self._outline.cuts[around.start].append(comma)
            around.piece = comma + 1
        elif around.piece < closed.gap:
            raise InvalidJson(
                "an array or object is not preceded by a comma, or its key is too long"
            )
        self._outline.nested[around.piece] = closed.start


class _Builder:
    """Second pass over a JSON document: parses the text between cuts and joins the results.

    A piece is parsed as elements of an array or as members of an object. Only a malformed document
    can have a cut at a wrong position; its pieces then fail to parse.
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
        """Parse the JSON text between two cuts; raises InvalidJson if it is empty at a comma."""
        value = _parsed(form % self._body[first:last])
        if not value and b"," in (self._body[first - 1 : first], self._body[last : last + 1]):
            raise InvalidJson()
        return value

    def _alone(self, nested: int, last: int) -> Any:
        if self._body[self._outline.ends[nested] : last].strip(_WHITESPACE):
            raise InvalidJson()
        return self.value(nested)
