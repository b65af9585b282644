"""Which tokens of a prompt are computed and which are placed from kept segments.

vLLM computes a prompt's tail and nothing else, so every run of computed tokens is the tail of an
engine request of its own: they form a chain, whose last link is the sampled group. A link finds
what the one before it computed in whole cache blocks, so what is placed begins where a block does.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A segment of a prompt; what has no name is nobody else's."""

    token_ids: Sequence[int]
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Tokens start..end (end excluded) of a prompt.

    `part` is the segment that they are placed from, which begins at `origin`; None: computed.
    """

    start: int
    end: int
    part: int | None = None
    origin: int = 0

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


def spans_of(parts: Sequence[Part], *, first_tokens: int, block: int) -> list[Span]:
    """They follow one another; the last is computed, if only a token of it.

    Of a named segment the first tokens are computed, up to where a block begins, and all of it
    where less than a block would be placed, or where the prompt begins with it: there it is a true
    prefix, and exact.
    """
    placed = [
        span
        for span in _placed(parts, first_tokens=first_tokens, block=block)
        if span.num_tokens >= block
    ]
    spans: list[Span] = []
    at = 0
    for span in placed:
        if span.start > at:
            spans.append(Span(start=at, end=span.start))
        spans.append(span)
        at = span.end
    return [*spans, Span(start=at, end=sum(len(part.token_ids) for part in parts))]


def _placed(parts: Sequence[Part], *, first_tokens: int, block: int) -> list[Span]:
    length = sum(len(part.token_ids) for part in parts)
    found, origin = [], 0
    for index, part in enumerate(parts):
        end = min(origin + len(part.token_ids), length - 1)
        start = -(-(origin + first_tokens) // block) * block
        if part.name is not None and origin and start < end:
            found.append(Span(start=start, end=end, part=index, origin=origin))
        origin += len(part.token_ids)
    return found


def joined(parts: Sequence[Part]) -> list[int]:
    return [token for part in parts for token in part.token_ids]
