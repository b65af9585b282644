"""Reference implementations of logprobs and gradients, slow and simple.

Shapes: G rows padded to R tokens each, T packed tokens of all rows, P prompt tokens, V vocabulary.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from coppice.train.logit_adjustments import NO_ADJUSTMENTS
from coppice.train.routing import replay_routing
from coppice.train.token_logprobs import token_logprobs
from coppice.train.training_group import LossFunction, RowLogprobs, TrainingGroup, TrainingTree
from coppice.wire.columns.support import Support, joined_support


def naive_logprobs(model: Any, group: TrainingGroup, *, temperature: float = 1.0) -> RowLogprobs:
    """Differentiable logprobs from a padded batch in which every row repeats the prompt.

    Each segment of a tree becomes a row that repeats the whole path to it.
    """
    if isinstance(group, TrainingTree):
        return _naive_segments(model, group, temperature)
    rows = [torch.cat([group.prompt, response])[:-1] for response in group.responses]
    # Right padding: under a causal mask no token reads it, so no attention mask is needed.
    padded_GR = pad_sequence(rows, batch_first=True).to(model.device)
    with _replayed(model, group, padded_GR.shape[1]):
        logits_GRV = model(input_ids=padded_GR, use_cache=False).logits
    first = len(group.prompt) - 1
    logits_TV = torch.cat(
        [logits_GRV[row, first : first + length] for row, length in enumerate(group.lengths)]
    )
    return RowLogprobs(
        logprobs=naive_token_logprobs(group, logits_TV, temperature),
        rows=tuple(range(len(group.responses))),
        lengths=group.target_lengths,
    )


def naive_token_logprobs(group: TrainingGroup, logits_TV: Tensor, temperature: float) -> Tensor:
    """Logprobs [T] of all responses under the distribution that they were sampled from.

    One token at a time, without chunks and without recomputation.
    """
    masks = [_mask(group, row) for row in range(len(group.responses))]
    if group.support is None and group.adjustments == NO_ADJUSTMENTS:
        logprobs_T = token_logprobs(logits_TV, torch.cat(group.responses), temperature)
        return logprobs_T[torch.cat(masks)]
    tokens = [(row, at) for row, length in enumerate(group.lengths) for at in range(length)]
    logprobs = [
        _token_logprob(group, row, at, logits_V, temperature)
        for (row, at), logits_V in zip(tokens, logits_TV, strict=True)
        if masks[row][at]
    ]
    return torch.stack(logprobs) if logprobs else logits_TV.new_zeros(0)


def _mask(group: TrainingGroup, row: int) -> Tensor:
    every = torch.ones(len(group.responses[row]), dtype=torch.bool)
    return every if group.loss_masks is None else group.loss_masks[row]


def _token_logprob(
    group: TrainingGroup, row: int, at: int, logits_V: Tensor, temperature: float
) -> Tensor:
    given, mask = group.adjustments, _mask(group, row)
    first = at  # first token of the request that sampled this one
    starts = () if group.request_starts is None else group.request_starts[row]
    while first and mask[first - 1] and first not in starts:
        first -= 1
    earlier = group.responses[row][first:at].tolist()
    read = {*group.prompt.tolist(), *group.responses[row][:at].tolist()}
    wide_V = logits_V.to(torch.float64 if logits_V.dtype == torch.float64 else torch.float32)
    adjusted = list(wide_V)
    for token, bias in given.logit_bias.items():
        adjusted[token] = adjusted[token] + bias
    for token in read if given.repetition_penalty != 1.0 else ():
        penalty = given.repetition_penalty
        adjusted[token] = adjusted[token] * (1 / penalty if adjusted[token] > 0 else penalty)
    for token in set(earlier):
        count = earlier.count(token)
        lowered = given.presence_penalty + given.frequency_penalty * count
        adjusted[token] = adjusted[token] - lowered
    scaled_V = torch.stack(adjusted) / temperature
    if group.support is not None:
        ids = torch.from_numpy(group.support[row][int(mask[:at].sum())]).long()
        outside_V = torch.ones_like(scaled_V, dtype=torch.bool)
        outside_V[ids] = False
        scaled_V = scaled_V.masked_fill(outside_V, -torch.inf)
    return scaled_V.log_softmax(0)[group.responses[row][at]]


def _joined(tree: TrainingTree, path: tuple[int, ...]) -> Support:
    assert tree.support is not None
    whole = joined_support([tree.support[at] for at in path])
    assert whole is not None
    return whole


def _replayed(model: Any, group: TrainingGroup, num_tokens: int) -> AbstractContextManager[None]:
    """Context of a padded forward in which routers select the group's experts, if it has any."""
    if group.routed_experts is None:
        return nullcontext()
    padded = [F.pad(rows, (0, 0, 0, 0, 0, num_tokens - len(rows))) for rows in group.routed_experts]
    return replay_routing(model, torch.cat(padded))


def _naive_segments(model: Any, tree: TrainingTree, temperature: float) -> RowLogprobs:
    paths = [tree.path(segment) for segment in range(len(tree.responses))]
    alone = [torch.cat([tree.responses[at] for at in path]) for path in paths]
    flat = TrainingGroup(
        prompt=tree.prompt,
        responses=tuple(alone),
        support=tree.support and tuple(_joined(tree, path) for path in paths),
        adjustments=tree.adjustments,
        loss_masks=tree.loss_masks
        and tuple(torch.cat([_mask(tree, at) for at in path]) for path in paths),
        request_starts=tree.request_starts and tuple(map(tree.path_starts, range(len(paths)))),
    )
    rows = naive_logprobs(model, flat, temperature=temperature).split()
    lengths = tree.target_lengths
    parts = [row[len(row) - length :] for row, length in zip(rows, lengths, strict=True)]
    segments = tuple(range(len(tree.responses)))
    return RowLogprobs(logprobs=torch.cat(parts), rows=segments, lengths=lengths)


def naive_backward(
    model: Any, group: TrainingGroup, loss_fn: LossFunction, *, temperature: float = 1.0
) -> float:
    """Reference for grouped_backward: accumulates the gradient and returns the loss."""
    loss = loss_fn(naive_logprobs(model, group, temperature=temperature))
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()
