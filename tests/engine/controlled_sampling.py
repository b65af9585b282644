"""Reference distributions of sampling controls, computed from the model's logits in float64."""

from collections.abc import Sequence
from typing import Any

import regex  # type: ignore[import-untyped]  # no stubs
import torch

from engine.types.samples import Sampling


def controlled_logprobs(
    model: Any,
    texts: Sequence[str],
    prompt: list[int],
    response: list[int],
    sampling: Sampling,
    *,
    stop_ids: Sequence[int] = (),
    bad_words: Sequence[list[int]] = (),
) -> torch.Tensor:
    """Log-probabilities of all tokens at each position of the response.

    `texts` are the texts of the vocabulary. `bad_words` are the token ids of `sampling.bad_words`.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double()
    rows = [
        _distribution(row, texts, prompt, response[:at], sampling, stop_ids, bad_words)
        for at, row in enumerate(logits)
    ]
    return torch.stack(rows)


def _distribution(
    logits: torch.Tensor,
    texts: Sequence[str],
    prompt: list[int],
    before: list[int],
    sampling: Sampling,
    stop_ids: Sequence[int],
    bad_words: Sequence[list[int]],
) -> torch.Tensor:
    logits = logits.masked_fill(
        _forbidden(texts, before, sampling, stop_ids, bad_words), -torch.inf
    )
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    seen = torch.zeros_like(logits, dtype=torch.bool)
    seen[prompt + before] = True
    penalty = sampling.repetition_penalty
    repeated = torch.where(logits > 0, logits / penalty, logits * penalty)
    logits = torch.where(seen, repeated, logits)
    counts = torch.bincount(torch.tensor(before, dtype=torch.long), minlength=len(logits))
    logits = logits - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    logits = logits / (sampling.temperature or 1.0)
    if sampling.min_p and sampling.temperature:
        probabilities = logits.softmax(-1)
        kept = probabilities >= sampling.min_p * probabilities.max()
        logits = logits.masked_fill(~kept, -torch.inf)
    return logits.log_softmax(-1)


def _forbidden(
    texts: Sequence[str],
    before: list[int],
    sampling: Sampling,
    stop_ids: Sequence[int],
    bad_words: Sequence[list[int]],
) -> torch.Tensor:
    """Mask of the tokens that may not follow `before`."""
    mask = torch.zeros(len(texts), dtype=torch.bool)
    if sampling.allowed_token_ids is not None:
        mask[:] = True
        mask[list(sampling.allowed_token_ids)] = False
    for *start, last in bad_words:
        mask[last] |= before[len(before) - len(start) :] == start
    if len(before) < sampling.min_tokens:
        mask[list(stop_ids)] = True
    outputs = sampling.structured_outputs
    if outputs is not None:
        assert outputs.regex is not None, "the reference knows regular expressions only"
        text = "".join(texts[token] for token in before)
        for token, piece in enumerate(texts):
            mask[token] |= not _may_follow(outputs.regex, text, piece, token in stop_ids)
    return mask


def _may_follow(pattern: str, text: str, piece: str, is_stop: bool) -> bool:
    if is_stop:
        return regex.fullmatch(pattern, text) is not None
    return bool(piece) and regex.fullmatch(pattern, text + piece, partial=True) is not None
