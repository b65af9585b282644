"""Tensors of a training group: a prompt with its responses or response tree, and their logprobs.

Shapes: T tokens of some responses without padding, G responses of the whole group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, TypeAlias

import torch
from torch import Tensor

from coppice.rollout_results import Group, Sample, Segment, Tree
from coppice.train.logit_adjustments import NO_ADJUSTMENTS, LogitAdjustments
from coppice.wire.columns.support import Support, joined_support


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowLogprobs:
    """Concatenated logprobs of some responses of a group, the input of a loss function.

    `logprobs` is [T] in float32 or wider, `rows` are the indices of the responses in their group.
    """

    logprobs: Tensor
    rows: tuple[int, ...]
    lengths: tuple[int, ...]

    def split(self) -> tuple[Tensor, ...]:
        """Splits the logprobs into one tensor per response."""
        return torch.split(self.logprobs, list(self.lengths))

    def pick(self, group_tokens: Sequence[Tensor]) -> Tensor:
        """Per-token values [T] of these responses, selected from those of the whole group."""
        picked_T = torch.cat([group_tokens[row] for row in self.rows])
        if picked_T.shape != self.logprobs.shape:
            raise ValueError(
                "the number of values differs from the number of tokens in the responses"
            )
        return picked_T.to(self.logprobs)

    def spread(self, group_rows: Tensor) -> Tensor:
        """Per-token values [T] of these responses, from one value per response of the group."""
        rows = torch.tensor(self.rows, device=group_rows.device)
        lengths = torch.tensor(self.lengths, device=group_rows.device)
        return group_rows[rows].repeat_interleave(lengths).to(self.logprobs)


LossFunction: TypeAlias = Callable[[RowLogprobs], Tensor]
"""A sum over tokens or rows, so that the losses of micro-batches add up to the group's loss."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingGroup:
    """One prompt and its responses as tensors of token ids, to train on.

    `logprobs`, if given, are those that the responses were sampled with. With `support` and
    `adjustments`, logprobs are those of the distribution that the responses were sampled from.
    `routed_experts`, if given, are the experts [prompt and response tokens - 1, layers, experts per
    token] that each sample was computed with; the model's routers select them again. A response may
    be empty, for example if it was aborted; it does not contribute to the loss.

    `loss_masks`, if given, are one boolean per response token. A token with False is context, such
    as the result of a tool: the model reads it, but it has no logprob. `logprobs` and `support`
    then have one entry per token with True, a target. Adjacent targets are those of one request,
    except that one begins at each index of `request_starts` in a response.
    """

    prompt: Tensor
    responses: tuple[Tensor, ...]
    logprobs: tuple[Tensor, ...] | None = None
    support: tuple[Support, ...] | None = None
    adjustments: LogitAdjustments = NO_ADJUSTMENTS
    routed_experts: tuple[Tensor, ...] | None = None
    loss_masks: tuple[Tensor, ...] | None = None
    request_starts: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        if not len(self.prompt):
            raise ValueError("the prompt must have at least one token")
        if not self.responses:
            raise ValueError("the group must have at least one response")
        masks = self.loss_masks
        if masks is not None and self.lengths != tuple(len(mask) for mask in masks):
            raise ValueError(
                "the lengths of the loss masks differ from the number of tokens of the responses"
            )
        lengths = self.target_lengths
        if self.logprobs and lengths != tuple(len(logprobs) for logprobs in self.logprobs):
            raise ValueError(
                "the number of logprobs differs from the number of tokens of the responses"
            )
        if self.support and lengths != tuple(len(support) for support in self.support):
            raise ValueError(
                "the number of supports differs from the number of tokens of the responses"
            )
        if self.routed_experts is not None:
            num_rows = [len(self.prompt) + length - 1 for length in self.lengths]
            if list(map(len, self.routed_experts)) != num_rows:
                raise ValueError("routed_experts needs one row per token except for the last")
        if self.request_starts is not None and len(self.request_starts) != len(self.responses):
            raise ValueError("the number of request starts differs from the number of responses")

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each response."""
        return tuple(len(response) for response in self.responses)

    @property
    def num_tokens(self) -> int:
        """Total number of tokens of all responses."""
        return sum(self.lengths)

    @property
    def target_lengths(self) -> tuple[int, ...]:
        """Number of tokens of each response that have a logprob."""
        if self.loss_masks is None:
            return self.lengths
        return tuple(int(mask.sum()) for mask in self.loss_masks)

    @property
    def num_targets(self) -> int:
        """Total number of response tokens that have a logprob."""
        return sum(self.target_lengths)

    def targets(self, row: int) -> Tensor:
        """Tokens of a response that have a logprob."""
        response = self.responses[row]
        return response if self.loss_masks is None else response[self.loss_masks[row]]

    @classmethod
    def of(
        cls, prompt: Any, group: Group, *, adjustments: LogitAdjustments = NO_ADJUSTMENTS
    ) -> "TrainingGroup":
        """Builds a training group from prompt token ids and a group of a rollout result.

        The prompt token ids are a list, an array or a tensor. `adjustments` are the parameters of
        the rollout that changed logits. Tokens whose logprob is NaN are context.
        """
        logprobs = tuple(torch.from_numpy(sample.logprobs) for sample in group.samples)
        masks = tuple(~values.isnan() for values in logprobs)
        has_context = not all(mask.all() for mask in masks)
        if has_context:
            logprobs = tuple(v[mask] for v, mask in zip(logprobs, masks, strict=True))
        support = supports_of(group.samples)
        if has_context and support is not None:
            support = tuple(map(_sampled_only, support, masks))
        return cls(
            prompt=prompt_of(prompt, group),
            responses=tuple(torch.from_numpy(sample.token_ids) for sample in group.samples),
            logprobs=logprobs,
            support=support,
            adjustments=adjustments,
            routed_experts=_routed_experts(group),
            loss_masks=masks if has_context else None,
        )


def _sampled_only(support: Support, mask: Tensor) -> Support:
    """Supports of the tokens of a response that have a logprob."""
    return Support(tuple(compress(support.rows, mask.tolist())), support.vocab_size)


def supports_of(parts: Sequence[Sample | Segment]) -> tuple[Support, ...] | None:
    """Supports of samples or segments; None unless all of them have one.

    Context segments have an empty support.
    """
    known = [part.support for part in parts if part.support is not None]
    if not known:
        return None
    nothing = Support((), known[0].vocab_size)
    found = [
        nothing if isinstance(part, Segment) and not part.sampled else part.support
        for part in parts
    ]
    return None if None in found else tuple(each for each in found if each is not None)


def _routed_experts(group: Group) -> tuple[Tensor, ...] | None:
    """Experts of a group's samples. Raises ValueError if only some of them have any.

    A sample without tokens has none; it gets those of another sample's prompt.
    """
    found = [sample.routed_experts for sample in group.samples]
    known = [experts for experts in found if experts is not None]
    if not known:
        return None
    if any(experts.start for experts in known):
        raise ValueError("join the routed experts of resumed samples with RoutedExperts.joined")
    prompt = known[0].array[: group.num_prompt_tokens - 1]
    arrays = [prompt if experts is None else experts.array for experts in found]
    return tuple(torch.from_numpy(array.astype("int16")) for array in arrays)


def prompt_of(prompt: Any, group: Group) -> Tensor:
    """Tensor of prompt token ids. Raises ValueError if they are not the whole prompt."""
    if group.num_images:
        raise ValueError(
            "the prompt has images, which coppice.train does not give to the model: compute the "
            "logprobs of this group with the model's own forward"
        )
    prompt_ids = torch.as_tensor(prompt, dtype=torch.int64)
    if len(prompt_ids) != group.num_prompt_tokens:
        raise ValueError(
            f"the server counted {group.num_prompt_tokens} prompt tokens, not {len(prompt_ids)}"
        )
    return prompt_ids


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingTree(TrainingGroup):
    """Training group whose responses are the segments of a rollout tree.

    Each segment starts where its parent ends.

    `parents` holds the index of each segment's parent, which is less than its own, or None if the
    segment starts at the prompt. `leaves` holds the indices of the leaf segments.
    """

    parents: tuple[int | None, ...]
    leaves: tuple[int, ...]

    def __post_init__(self) -> None:
        TrainingGroup.__post_init__(self)
        if len(self.parents) != len(self.responses):
            raise ValueError("the number of parents differs from the number of segments")
        if not all(parent is None or 0 <= parent < at for at, parent in enumerate(self.parents)):
            raise ValueError("a parent must have a smaller index than its child segments")
        if not all(0 <= leaf < len(self.responses) for leaf in self.leaves):
            raise ValueError("a leaf must be the index of a segment")

    @classmethod
    def of(
        cls, prompt: Any, group: Group, *, adjustments: LogitAdjustments = NO_ADJUSTMENTS
    ) -> "TrainingTree":
        """Builds a training tree from prompt token ids and the tree of a rollout result.

        In the tree of an agent session, a sample that follows another one without context in
        between is that of another request. In other trees ValueError is raised for penalties, as it
        is not known which tokens they count.
        """
        if group.tree is None:
            raise ValueError("the group is not a tree")
        segments = group.tree.segments
        places = {segment.id: place for place, segment in enumerate(segments)}
        adjacent = _adjacent_samples(group.tree)
        if adjacent and adjustments.has_penalties and not group.tree.is_session:
            raise ValueError("penalties cannot be replayed for samples without context in between")
        masks = [torch.full((len(s.token_ids),), s.sampled) for s in segments]
        return cls(
            prompt=prompt_of(prompt, group),
            responses=tuple(torch.from_numpy(segment.token_ids) for segment in segments),
            logprobs=tuple(torch.from_numpy(segment.logprobs) for segment in segments),
            support=supports_of(segments),
            adjustments=adjustments,
            parents=tuple(None if s.parent is None else places[s.parent] for s in segments),
            leaves=tuple(places[leaf] for leaf in group.tree.leaves),
            loss_masks=None if all(s.sampled for s in segments) else tuple(masks),
            request_starts=tuple((0,) if s.id in adjacent else () for s in segments)
            if adjacent
            else None,
        )

    def path(self, segment: int) -> tuple[int, ...]:
        """Indices of the segments on the path from the prompt to the given segment, inclusive."""
        path = [segment]
        while (parent := self.parents[path[-1]]) is not None:
            path.append(parent)
        return tuple(path[::-1])

    def flattened(self) -> TrainingGroup:
        """Training group with one response per leaf of the tree; shared tokens are repeated."""

        def rows(by_segment: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            paths = map(self.path, self.leaves)
            return tuple(torch.cat([by_segment[at] for at in path]) for path in paths)

        return TrainingGroup(
            prompt=self.prompt,
            responses=rows(self.responses),
            logprobs=None if self.logprobs is None else rows(self.logprobs),
            support=self._path_supports(),
            adjustments=self.adjustments,
            loss_masks=None if self.loss_masks is None else rows(self.loss_masks),
            request_starts=self.request_starts and tuple(map(self.path_starts, self.leaves)),
        )

    def path_starts(self, segment: int) -> tuple[int, ...]:
        """The `request_starts` of the path to a segment, as one response."""
        found, length = list[int](), 0
        for at in self.path(segment):
            found += [length + start for start in request_starts_of(self, at)]
            length += len(self.responses[at])
        return tuple(found)

    def _path_supports(self) -> tuple[Support, ...] | None:
        if self.support is None:
            return None
        paths = [[self.support[at] for at in self.path(leaf)] for leaf in self.leaves]
        found = tuple(joined_support(path) for path in paths)
        return tuple(support for support in found if support is not None)

    def by_leaf(self, rows: RowLogprobs) -> RowLogprobs:
        """Joins the logprobs of tree segments into logprobs of whole paths, as in `flattened`.

        Leaves whose path is not complete in `rows` are omitted.
        """
        by_segment = dict(zip(rows.rows, rows.split(), strict=True))
        paths = [self.path(leaf) for leaf in self.leaves]
        whole = [leaf for leaf, path in enumerate(paths) if by_segment.keys() >= set(path)]
        parts = [torch.cat([by_segment[at] for at in paths[leaf]]) for leaf in whole]
        return RowLogprobs(
            logprobs=torch.cat([rows.logprobs[:0], *parts]),
            rows=tuple(whole),
            lengths=tuple(len(part) for part in parts),
        )


def _adjacent_samples(tree: Tree) -> frozenset[str]:
    """Ids of the segments with which a sample begins, directly after tokens of another one."""
    sampled = {segment.id: segment for segment in tree.segments if segment.sampled}
    below = {each.id for each in sampled.values() if each.parent in sampled}
    return frozenset(below - tree.continuations())


def request_starts_of(group: TrainingGroup, row: int) -> tuple[int, ...]:
    return () if group.request_starts is None else group.request_starts[row]
