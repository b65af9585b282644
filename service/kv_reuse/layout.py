"""Which tokens of a prompt are computed and which are placed from kept segments.

vLLM computes a prompt's tail and nothing else, so every run of computed tokens is the tail of an
engine request of its own: they form a chain, whose last link is the sampled group. A link finds
what the one before it computed in whole cache blocks, so what is placed begins where a block does.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSpan:
    """A segment of a prompt; what has no name is nobody else's."""

    token_ids: Sequence[int]
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRun:
    """Tokens start..end (end excluded) of a prompt.

    `span` is the segment that they are placed from, which begins at `origin`; None: computed.
    """

    start: int
    end: int
    span: int | None = None
    origin: int = 0

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


def token_runs(spans: Sequence[PromptSpan], *, first_tokens: int, block: int) -> list[TokenRun]:
    """They follow one another; the last is computed, if only a token of it.

    Of a named segment the first tokens are computed, up to where a block begins, and all of it
    where less than a block would be placed, or where the prompt begins with it: there it is a true
    prefix, and exact.
    """
    spliced = [
        run
        for run in _spliced_runs(spans, first_tokens=first_tokens, block=block)
        if run.num_tokens >= block
    ]
    runs: list[TokenRun] = []
    at = 0
    for run in spliced:
        if run.start > at:
            runs.append(TokenRun(start=at, end=run.start))
        runs.append(run)
        at = run.end
    return [*runs, TokenRun(start=at, end=sum(len(span.token_ids) for span in spans))]


def _spliced_runs(spans: Sequence[PromptSpan], *, first_tokens: int, block: int) -> list[TokenRun]:
    length = sum(len(span.token_ids) for span in spans)
    found, origin = [], 0
    for index, span in enumerate(spans):
        end = min(origin + len(span.token_ids), length - 1)
        start = -(-(origin + first_tokens) // block) * block
        if span.name is not None and origin and start < end:
            found.append(TokenRun(start=start, end=end, span=index, origin=origin))
        origin += len(span.token_ids)
    return found


def joined(spans: Sequence[PromptSpan]) -> list[int]:
    return [token for span in spans for token in span.token_ids]
