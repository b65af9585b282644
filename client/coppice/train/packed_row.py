"""Packing of responses, or of a tree's segments, into one row without padding.

The last prompt token is part of the responses: it predicts the first token of each. The shared
prompt is therefore its first P-1 tokens. The input of each response is the last prompt token and
all its own tokens but the last, from position P-1 on. In a tree, a segment's first token is
predicted at the end of its parent, and only segments without children omit their last token.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from coppice.train.groups import TrainingGroup
from coppice.train.spans import Branch, Spans
from coppice.train.tree import parents_of


class PackedRow:
    """Per response: input tokens, their positions, and the row indices that predict its tokens."""

    def __init__(self, group: TrainingGroup, rows: Sequence[int]) -> None:
        self.input_tokens: list[Tensor] = []
        self.positions: list[Tensor] = []
        self.target_positions: list[Tensor] = []
        self._group = group
        self._rows = rows
        self._parents = parents_of(group)
        self._rows_with_children = {self._parents[row] for row in rows}
        self._num_input_tokens = 0
        self._ends: dict[int, int] = {}
        """Row index of the last input token on the path to the end of a response."""
        self._tokens: dict[int, int] = {}
        """Number of response tokens on the path to the end of a response."""
        for row in rows:
            parent = self._parents[row]
            if parent is None:
                self._append_at_prompt(row)
            else:
                self._append_after_parent(row, parent)

    def spans(self) -> Spans:
        lengths = tuple(map(len, self.input_tokens))
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

    def _append_at_prompt(self, row: int) -> None:
        """Appends a response to the prompt, whose last token predicts its first token."""
        response = self._group.responses[row]
        target_positions = torch.arange(len(response)) + self._num_input_tokens
        input_tokens = torch.cat([self._group.prompt[-1:], response])
        self._append(row, input_tokens, len(self._group.prompt) - 1, target_positions)
        self._ends[row] = self._num_input_tokens - 1
        self._tokens[row] = len(response)

    def _append_after_parent(self, row: int, parent: int) -> None:
        """Appends a segment after its parent, whose end predicts the segment's first token."""
        segment = self._group.responses[row]
        target_positions = torch.arange(len(segment)) + self._num_input_tokens - 1
        target_positions[:1] = self._ends[parent]
        self._append(row, segment, len(self._group.prompt) + self._tokens[parent], target_positions)
        self._ends[row] = self._num_input_tokens - 1 if len(segment) else self._ends[parent]
        self._tokens[row] = self._tokens[parent] + len(segment)

    def _append(self, row: int, tokens: Tensor, first: int, target_positions: Tensor) -> None:
        input_tokens = tokens if row in self._rows_with_children else tokens[:-1]
        self.input_tokens.append(input_tokens)
        self.positions.append(torch.arange(len(input_tokens)) + first)
        self.target_positions.append(target_positions)
        self._num_input_tokens += len(input_tokens)
