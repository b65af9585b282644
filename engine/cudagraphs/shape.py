"""The shape of a step, asked for or captured: how many tokens, and how many of them a sample."""

from dataclasses import dataclass

UNEVEN = 0


@dataclass(frozen=True, slots=True)
class GraphShape:
    """`query_len` tokens a sample: one and its drafts. None: any number each, as in steps that also
    compute prompts. UNEVEN: samples decode with different numbers of drafts; no graph does that.
    """

    tokens: int
    query_len: int | None

    @property
    def samples(self) -> int:
        """Of a step in which every sample has `query_len` tokens."""
        assert self.query_len, self
        return self.tokens // self.query_len

    def __str__(self) -> str:
        return f"{self.samples} x {self.query_len}" if self.query_len else f"{self.tokens} mixed"


def decode(samples: int, query_len: int) -> GraphShape:
    return GraphShape(samples * query_len, query_len)


def mixed(tokens: int) -> GraphShape:
    return GraphShape(tokens, None)
