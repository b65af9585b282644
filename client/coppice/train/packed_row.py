"""Responses, or the segments of a tree, one after the other in a row without padding.

The last prompt token belongs to the responses: it predicts the first token of each. So the shared
prompt is its first P-1 tokens, and every response is fed as the last prompt token and all its own
tokens but the last, from position P-1 on. In a tree, a segment's first token is predicted where its
parent ends, and only what nothing follows on is fed without its last token.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from coppice.train.groups import TrainingGroup
from coppice.train.spans import Branch, Spans
from coppice.train.tree import parents_of


class PackedRow:
    """Of each response: the tokens fed, their positions, and the places that predict its tokens."""

    def __init__(self, group: TrainingGroup, rows: Sequence[int]) -> None:
        self.fed: list[Tensor] = []
        self.positions: list[Tensor] = []
        self.places: list[Tensor] = []
        self._group = group
        self._rows = rows
        self._parents = parents_of(group)
        self._followed = {self._parents[row] for row in rows}
        self._num_fed = 0
        self._ends: dict[int, int] = {}
        """The place of the last token fed on the way to a response's end."""
        self._tokens: dict[int, int] = {}
        """From the prompt to a response's end."""
        for row in rows:
            parent = self._parents[row]
            if parent is None:
                self._begin(row)
            else:
                self._go_on(row, parent)

    def spans(self) -> Spans:
        lengths = tuple(map(len, self.fed))
        starts = [0, *accumulate(lengths)]
        ends = dict(zip(self._rows, starts[1:], strict=True))
        for row in reversed(self._rows):
            if (parent := self._parents[row]) is not None:
                ends[parent] = max(ends[parent], ends[row])
        branches = (
            Branch(start=start, stop=stop, end=ends[row])
            for row, start, stop in zip(self._rows, starts[:-1], starts[1:], strict=True)
            if start < stop < ends[row]
        )
        return Spans(lengths=lengths, branches=tuple(branches))

    def _begin(self, row: int) -> None:
        """At the prompt, whose last token predicts the response's first."""
        response = self._group.responses[row]
        places = torch.arange(len(response)) + self._num_fed
        fed = torch.cat([self._group.prompt[-1:], response])
        self._lay(row, fed, len(self._group.prompt) - 1, places)
        self._ends[row] = self._num_fed - 1
        self._tokens[row] = len(response)

    def _go_on(self, row: int, parent: int) -> None:
        """Where the parent ends, which predicts the segment's first token."""
        segment = self._group.responses[row]
        places = torch.arange(len(segment)) + self._num_fed - 1
        places[:1] = self._ends[parent]
        self._lay(row, segment, len(self._group.prompt) + self._tokens[parent], places)
        self._ends[row] = self._num_fed - 1 if len(segment) else self._ends[parent]
        self._tokens[row] = self._tokens[parent] + len(segment)

    def _lay(self, row: int, tokens: Tensor, first: int, places: Tensor) -> None:
        fed = tokens if row in self._followed else tokens[:-1]
        self.fed.append(fed)
        self.positions.append(torch.arange(len(fed)) + first)
        self.places.append(places)
        self._num_fed += len(fed)
