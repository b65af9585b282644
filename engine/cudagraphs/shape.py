"""The shape of a step, asked for or captured: how many tokens, and how many of them a sample."""

from dataclasses import dataclass

UNEVEN = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """`query` tokens a sample: one and its drafts. None: any number each, as in steps that also
    compute prompts. UNEVEN: samples decode with different numbers of drafts; no graph does that.
    """

    tokens: int
    query: int | None

    @property
    def samples(self) -> int:
        """Of a step in which every sample has `query` tokens."""
        assert self.query, self
        return self.tokens // self.query

    def __str__(self) -> str:
        return f"{self.samples} x {self.query}" if self.query else f"{self.tokens} mixed"


def decode(samples: int, query: int) -> Shape:
    return Shape(samples * query, query)


def mixed(tokens: int) -> Shape:
    return Shape(tokens, None)
