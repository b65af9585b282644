"""Shape of a step or a captured graph: its number of tokens, and of tokens per sample."""

from dataclasses import dataclass

UNEVEN = 0


@dataclass(frozen=True, slots=True)
class GraphShape:
    """`query_len` tokens per sample: one plus its draft tokens.

    None: any number per sample, as in steps that include prefill. UNEVEN: samples decode with
    different numbers of draft tokens, which no graph supports.
    """

    tokens: int
    query_len: int | None

    @property
    def samples(self) -> int:
        """Number of samples of a step in which every sample has `query_len` tokens."""
        assert self.query_len, self
        return self.tokens // self.query_len

    def __str__(self) -> str:
        return f"{self.samples} x {self.query_len}" if self.query_len else f"{self.tokens} mixed"


def decode(samples: int, query_len: int) -> GraphShape:
    return GraphShape(samples * query_len, query_len)


def mixed(tokens: int) -> GraphShape:
    return GraphShape(tokens, None)
