"""Whether drafts are right: every token that would follow them is sampled, and the two compared.

A draft names single tokens. To accept one with the probability that the model gives it, and to draw
from all others if it was not accepted, is to draw from all and see whether it came. vLLM's
rejection sampler takes the first way, at twice what its sampler takes, in steps without any drafts
too. This takes the second: its sampler once, over all tokens of the step, so that a step without
drafts is that of an engine which does not speculate.

What a token's law takes from the tokens before it (penalties, bad words, `min_tokens`) would have
to know of the drafts. A step with a request that asks for it and with drafts is left to vLLM's.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from engine.runtime.guard import feature

# Its own: drafts fail on the rank that makes them, and all ranks have to draw alike.
FEATURE = feature("verifying drafts")


class DraftVerifier:
    """In the place of a runner's rejection sampler, which it is made of.

    b: requests; n: tokens sampled in all, one behind every draft's token and one for every request;
    k: one more than the longest draft; v: the vocabulary.
    """

    def __init__(self, rejection_sampler: Any) -> None:
        self._sampler: Callable[..., Any] = rejection_sampler.sampler
        self._vllm_rejection_sampler: Callable[..., Any] = rejection_sampler
        self._verify = FEATURE.guarded(rejection_sampler)(make_verifier(self._sampler))

    def __call__(
        self, metadata: Any, draft_probs: None, logits_nv: torch.Tensor, sampling: Any
    ) -> Any:
        if metadata.max_spec_len == 0:
            return self._sampler(logits=logits_nv, sampling_metadata=sampling)
        if draft_probs is not None or not can_sample_all_positions(sampling, metadata):
            return self._vllm_rejection_sampler(metadata, draft_probs, logits_nv, sampling)
        return self._verify(metadata, draft_probs, logits_nv, sampling)


def can_sample_all_positions(sampling: Any, metadata: Any) -> bool:
    """Whether each token's law is its logits' alone."""
    holder = sampling.thinking_budget_state_holder
    processors = [
        *sampling.logitsprocs.argmax_invariant,
        *sampling.logitsprocs.non_argmax_invariant,
    ]
    return (
        sampling.no_penalties
        and not sampling.bad_words_token_ids
        and not sampling.logprob_token_ids
        and sampling.allowed_token_ids_mask is None
        and sampling.max_num_logprobs != -1
        and (holder is None or not holder.has_tracked_requests())
        # Of vLLM's own, an engine that speculates has `min_tokens` only.
        and all(getattr(processor, "min_toks", None) == {} for processor in processors)
        and not any(metadata.num_draft_tokens[row] for row in sampling.generators)
    )


def make_verifier(sampler: Callable[..., Any]) -> Callable[..., Any]:
    """What vLLM's rejection sampler answers, by `sampler`."""

    def verified(metadata: Any, _: None, logits_nv: torch.Tensor, sampling: Any) -> Any:
        # The sampler may write to its logits, which vLLM's would need where this fails.
        logits_copy_nv = logits_nv.clone() if logits_nv.dtype == torch.float32 else logits_nv
        output = sampler(
            logits=logits_copy_nv, sampling_metadata=expand_sampling_metadata(sampling, metadata)
        )
        tokens_n = output.sampled_token_ids.squeeze(1)
        drafted_n = torch.full_like(tokens_n, -1)
        drafted_n[metadata.target_logits_indices] = metadata.draft_token_ids
        indices_bk = _token_indices(metadata, len(tokens_n))
        matches_bk = (tokens_n == drafted_n)[indices_bk]
        # A token counts while all drafts before it were right; none is drafted where a row ends.
        counts_bk = torch.ones_like(matches_bk)
        counts_bk[:, 1:] = matches_bk.cumprod(1)[:, :-1]
        logprobs = output.logprobs_tensors
        if logprobs is not None:
            logprobs = type(logprobs)(*(each[indices_bk.flatten()] for each in logprobs[:3]))
        return replace(
            output,
            sampled_token_ids=tokens_n[indices_bk].masked_fill(~counts_bk, -1),
            logprobs_tensors=logprobs,
        )

    return verified


def expand_sampling_metadata(sampling: Any, metadata: Any) -> Any:
    """Each request's, for all of its tokens. A random stream of its own has one that drafts
    nothing, so it is drawn from once."""
    counts_b = torch.tensor(metadata.num_draft_tokens, device=metadata.draft_token_ids.device) + 1
    rows_n = counts_b.new_tensor(range(len(counts_b))).repeat_interleave(counts_b)
    ends = list(accumulate(1 + number for number in metadata.num_draft_tokens))
    per_row = {
        name: None if (values := getattr(sampling, name)) is None else values[rows_n]
        for name in ("temperature", "top_p", "top_k")
    }
    generators = {ends[row] - 1: generator for row, generator in sampling.generators.items()}
    return replace(sampling, generators=generators, **per_row)


def _token_indices(metadata: Any, num_tokens: int) -> torch.Tensor:
    """Of each row's tokens among all of them; what lies beyond a row's end does not matter."""
    ends_b = metadata.cu_num_sampled_tokens
    starts_b = torch.cat([ends_b.new_zeros(1), ends_b[:-1]])
    steps_k = torch.arange(metadata.max_spec_len + 1, device=ends_b.device, dtype=ends_b.dtype)
    return (starts_b[:, None] + steps_k).clamp_(max=num_tokens - 1).long()
