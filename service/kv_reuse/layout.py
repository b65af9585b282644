"""Division of a prompt into prefilled tokens and tokens spliced from cached spans.

vLLM prefills only the tail of a prompt, so every run of prefilled tokens is the tail of a separate
engine request. These requests form a chain that ends with the group's samples. A request finds the
KV of the previous one in whole cache blocks, so a spliced run starts at a block boundary.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSpan:
    """Piece of a prompt; its KV is reusable by other prompts only if it has a name."""

    token_ids: Sequence[int]
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRun:
    """Tokens [start, end) of a prompt.

    `span` is the index of the span whose cached KV is spliced in, and `origin` that span's position
    in the prompt. Without `span` the tokens are prefilled.
    """

    start: int
    end: int
    span: int | None = None
    origin: int = 0

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


def token_runs(spans: Sequence[PromptSpan], *, first_tokens: int, block: int) -> list[TokenRun]:
    """Consecutive runs that cover the prompt; the last is prefilled and has at least one token.

    Of a named span, the first tokens up to a block boundary are prefilled. It is prefilled
    completely if less than one block would be spliced, or if the prompt starts with it: there it is
    an ordinary prefix and exact.
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
