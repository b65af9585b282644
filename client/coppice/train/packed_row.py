"""Packing of responses or tree segments into rows without padding, and into micro-batches.

The last prompt token is part of the responses: it predicts the first token of each. The shared
prompt is therefore its first P-1 tokens. The input of each response is the last prompt token and
all its own tokens but the last, from position P-1 on. In a tree, a segment's first token is
predicted at the end of its parent, and only segments without children omit their last token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from math import ceil

import torch
from torch import Tensor

from coppice.train.group_tree import parents_of, subtrees_of
from coppice.train.training_group import TrainingGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Tree segment in a packed row (start to stop), which its descendants (stop to end) read."""

    start: int
    stop: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Structure of a packed row: lengths of its responses or segments (parts), and tree branches.

    Each part attends causally to itself. The parts of a tree are in depth-first order, so the
    descendants of a part follow it directly.
    """

    lengths: tuple[int, ...]
    branches: tuple[Branch, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def ends(self) -> Tensor:
        """For each token of the packed row, the end of the range of later tokens that read it."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        stops = torch.tensor(list(accumulate(self.lengths)), dtype=torch.int64)
        ends = stops.repeat_interleave(lengths)
        for branch in self.branches:
            ends[branch.start : branch.stop] = branch.end
        return ends

    def depths(self) -> Tensor:
        """For each token of the packed row, the number of packed tokens before it on its path."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        depths = torch.arange(self.num_tokens) - starts
        for branch in self.branches:
            depths[branch.stop : branch.end] += branch.stop - branch.start
        return depths


class PackedRow:
    """Builds a packed row: each response's input tokens, positions and target positions.

    Target positions are the row indices at which the response's tokens are predicted.
    """

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
        """Appends a response that starts at the prompt.

        The last prompt token predicts the first token of the response.
        """
        response = self._group.responses[row]
        target_positions = torch.arange(len(response)) + self._num_input_tokens
        input_tokens = torch.cat([self._group.prompt[-1:], response])
        self._append(row, input_tokens, len(self._group.prompt) - 1, target_positions)
        self._ends[row] = self._num_input_tokens - 1
        self._tokens[row] = len(response)

    def _append_after_parent(self, row: int, parent: int) -> None:
        """Appends a tree segment; the last token of its parent predicts the segment's first."""
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
        masks = self._group.loss_masks
        self.target_positions.append(
            target_positions if masks is None else target_positions[masks[row]]
        )
        self._num_input_tokens += len(input_tokens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """One row of model input, with targets and the positions in the row that predict them.

    target_positions is on the CPU.
    """

    input_ids: Tensor
    position_ids: Tensor
    targets: Tensor
    target_positions: Tensor
    spans: Spans
    experts: Tensor | None = None
    """Experts [input tokens, layers, experts per token] that routers select."""

    @property
    def logits_to_keep(self) -> int | Tensor:
        """Argument logits_to_keep of Hugging Face models: the positions that need logits.

        A count is preferred if possible: it selects by slicing, a tensor by copying.
        """
        count = len(self.target_positions)
        last = torch.arange(count) + self.input_ids.shape[1] - count
        return max(count, 1) if torch.equal(self.target_positions, last) else self.target_positions


def plan_passes(lengths: Sequence[int], pass_tokens: int) -> list[tuple[int, ...]]:
    """Distributes rows, in order, over balanced micro-batches of at most pass_tokens tokens.

    A longer row gets its own micro-batch. Rows without tokens are left out.
    """
    if pass_tokens < 1:
        raise ValueError("pass_tokens must be at least 1")
    num_passes = ceil(sum(lengths) / pass_tokens)
    enough = sum(lengths) / max(num_passes, 1)
    passes: list[tuple[int, ...]] = []
    rows: list[int] = []
    tokens = 0
    for row, length in enumerate(lengths):
        if not length:
            continue
        if rows and (tokens >= enough or tokens + length > pass_tokens):
            passes.append(tuple(rows))
            rows, tokens = [], 0
        rows.append(row)
        tokens += length
    return [*passes, tuple(rows)] if rows else passes


def plan_subtree_passes(group: TrainingGroup, pass_tokens: int) -> list[tuple[int, ...]]:
    """Distributes responses over micro-batches, depth first, without splitting a subtree.

    Subtrees without a target are left out.
    """
    lengths, targets = group.lengths, group.target_lengths
    subtrees = [rows for rows in subtrees_of(group) if any(targets[row] for row in rows)]
    tokens = [sum(lengths[row] for row in subtree) for subtree in subtrees]
    planned = plan_passes(tokens, pass_tokens)
    return [tuple(chain.from_iterable(subtrees[i] for i in chosen)) for chosen in planned]


def prompt_inputs(group: TrainingGroup, device: torch.device) -> Inputs:
    prompt = group.prompt[:-1]
    return Inputs(
        input_ids=prompt.to(device).unsqueeze(0),
        position_ids=torch.arange(len(prompt), device=device).unsqueeze(0),
        targets=torch.zeros(0, dtype=torch.int64, device=device),
        target_positions=torch.zeros(0, dtype=torch.int64),
        spans=Spans(lengths=(len(prompt),)),
        experts=None if group.routed_experts is None else group.routed_experts[0][: len(prompt)],
    )


def response_inputs(group: TrainingGroup, rows: Sequence[int], device: torch.device) -> Inputs:
    """Model inputs of whole subtrees, each in depth-first order, packed into one row."""
    packed = PackedRow(group, rows)
    return Inputs(
        input_ids=torch.cat(packed.input_tokens).to(device).unsqueeze(0),
        position_ids=torch.cat(packed.positions).to(device).unsqueeze(0),
        targets=torch.cat([group.targets(row) for row in rows]).to(device),
        target_positions=torch.cat(packed.target_positions),
        spans=packed.spans(),
        experts=_response_experts(group, rows),
    )


def _response_experts(group: TrainingGroup, rows: Sequence[int]) -> Tensor | None:
    """Experts of the input tokens of some responses, each from the last prompt token on."""
    if group.routed_experts is None:
        return None
    return torch.cat([group.routed_experts[row][len(group.prompt) - 1 :] for row in rows])


def concatenate_inputs(parts: Sequence[Inputs]) -> Inputs:
    """Concatenates several model inputs into one row."""
    starts = [0, *accumulate(part.spans.num_tokens for part in parts)]
    return Inputs(
        input_ids=torch.cat([part.input_ids for part in parts], 1),
        position_ids=torch.cat([part.position_ids for part in parts], 1),
        targets=torch.cat([part.targets for part in parts]),
        target_positions=torch.cat(
            [p.target_positions + start for p, start in zip(parts, starts, strict=False)]
        ),
        spans=Spans(lengths=tuple(part.spans.num_tokens for part in parts)),
        experts=_joined_experts([part.experts for part in parts]),
    )


def _joined_experts(parts: Sequence[Tensor | None]) -> Tensor | None:
    known = [part for part in parts if part is not None]
    if known and len(known) < len(parts):
        raise ValueError("either all groups or none must have routed experts")
    return torch.cat(known) if known else None
