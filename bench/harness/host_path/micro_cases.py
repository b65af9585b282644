"""Requests of the rounds of `micro`."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroCase:
    """Requests of a round. `logprobs` is the number of top logprobs; None returns none at all."""

    name: str
    logprobs: int | None = 0
    num_requests: int = 256
    is_streamed: bool = False
    has_support: bool = False
    prompt_tokens: int = 32
    max_tokens: int = 64

    @property
    def num_tokens(self) -> int:
        return self.num_requests * self.max_tokens


CASES: Final = tuple(
    MicroCase(**case)
    for case in (
        {"name": "logprobs"},
        {"name": "no logprobs", "logprobs": None},
        {"name": "top-20", "logprobs": 20},
        {"name": "streamed", "is_streamed": True},
        {"name": "supports", "has_support": True},
        {"name": "logprobs, 512 requests", "num_requests": 512},
    )
)
