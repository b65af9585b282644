"""Replacement of vLLM's rejection sampler in Model Runner V1; skipped without drafts."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Protocol

import torch

from engine.runtime.feature_guard import feature
from kernels.draft_index.store_protocol import Int32Array

# Separate from the drafting feature: drafting fails on one rank, but all ranks must sample alike.
FEATURE = feature("verifying drafts")


class DraftVerifier:
    """Verifies drafts by sampling at all positions, in place of vLLM's rejection sampler.

    A draft names a single token per position. Accepting it with the probability that the model
    assigns to it, and otherwise sampling from the remaining tokens, is equivalent to sampling from
    the full distribution and comparing. vLLM's rejection sampler does the former, at twice the cost
    of its sampler, in steps without drafts too. This class does the latter: it calls the sampler
    once over all positions of the step, so a step without drafts costs the same as in an engine
    without speculation.

    Where a token's distribution depends on the tokens before it (penalties, bad words,
    `min_tokens`), it would depend on the drafts. A step that has drafts and a request with such a
    parameter is left to vLLM's rejection sampler.

    Shape suffixes: b requests; n sampled tokens in all, one after every draft token and one per
    request; k one more than the longest draft; v vocabulary.
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
    """Return whether the distribution of each token in a step depends on its logits only."""
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
        and all(map(_is_unused, processors))
        and not any(metadata.num_draft_tokens[row] for row in sampling.generators)
    )


def _is_unused(processor: Any) -> bool:
    """True for a built-in logits processor of vLLM that no request in the batch uses."""
    uses = [getattr(processor, name, None) for name in ("min_toks", "biases", "min_p_count")]
    return [bool(use) for use in uses if use is not None] == [False]


def make_verifier(sampler: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that verifies drafts with `sampler`, in place of vLLM's rejection sampler.

    Its signature and result are those of the rejection sampler.
    """

    def verified(metadata: Any, _: None, logits_nv: torch.Tensor, sampling: Any) -> Any:
        # The sampler may modify its logits, which vLLM's rejection sampler needs if this fails.
        logits_copy_nv = logits_nv.clone() if logits_nv.dtype == torch.float32 else logits_nv
        output = sampler(
            logits=logits_copy_nv, sampling_metadata=expand_sampling_metadata(sampling, metadata)
        )
        tokens_n = output.sampled_token_ids.squeeze(1)
        drafted_n = torch.full_like(tokens_n, -1)
        drafted_n[metadata.target_logits_indices] = metadata.draft_token_ids
        indices_bk = _token_indices(metadata, len(tokens_n))
        matches_bk = (tokens_n == drafted_n)[indices_bk]
        # A token counts while all drafts before it match; past the end of a row there is no draft.
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
    """Sampling metadata repeated for all tokens of each request.

    Requests with a generator of their own have no drafts, so each generator is drawn from once.
    """
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
    """Indices [b, k] of each row's tokens among all sampled tokens; arbitrary past a row's end."""
    ends_b = metadata.cu_num_sampled_tokens
    starts_b = torch.cat([ends_b.new_zeros(1), ends_b[:-1]])
    steps_k = torch.arange(metadata.max_spec_len + 1, device=ends_b.device, dtype=ends_b.dtype)
    return (starts_b[:, None] + steps_k).clamp_(max=num_tokens - 1).long()


class Drafter(Protocol):
    """Interface of the draft method, as `DraftStepSkipper` uses it."""

    def end(self, ended: Collection[str]) -> None:
        """Handle requests that have finished and are about to be dropped by the runner."""

    def propose(
        self, sampled: Sequence[Sequence[int]], num_tokens: Int32Array, token_ids: Int32Array
    ) -> list[list[int]]:
        """Drafts for the next step, per batch row, as vLLM's runner requests them."""


class DraftStepSkipper:
    """Wrapper of one model runner that verifies nothing in steps without drafts.

    With a draft method, vLLM's runner prepares verification in every step, even if the scheduler
    has sent no drafts. That costs 2.5% of a step of 64 rows (25M parameters, one thread). All of it
    depends on `speculative_config`, which the runner reads in every step
    (v1/worker/gpu_model_runner.py:2184, 2532, 4201, 4384) and which this class owns from then on.
    So a step without drafts runs as in an engine without a draft method. Drafts for the next step
    are requested after it and placed where vLLM's own draft method places them, from where
    EngineCore passes them to the scheduler (v1/engine/core.py:694).
    """

    def __init__(self, runner: Any, drafter: Drafter) -> None:
        self._runner = runner
        self._drafter = drafter
        self._config = runner.speculative_config
        self._execute_model: Callable[..., Any] = runner.execute_model
        self._sample_tokens: Callable[..., Any] = runner.sample_tokens
        runner.execute_model = self.execute_model
        runner.sample_tokens = self.sample_tokens

    def execute_model(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one step; `step` is the scheduler's output. Its sampling has the same config."""
        has_drafts = bool(step.scheduled_spec_decode_tokens)
        self._runner.speculative_config = self._config if has_drafts else None
        self._drafter.end(step.finished_req_ids)
        return self._execute_model(step, *args, **kwargs)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample the tokens of a step; if it had no drafts, request those of the next step."""
        output = self._sample_tokens(*args, **kwargs)
        if self._runner.speculative_config is None and output.sampled_token_ids:
            self._request_drafts(output.sampled_token_ids)
        return output

    def _request_drafts(self, sampled: Sequence[Sequence[int]]) -> None:
        batch = self._runner.input_batch
        drafts = self._drafter.propose(sampled, batch.num_tokens_no_spec, batch.token_ids_cpu)
        if any(drafts):
            self._runner._draft_token_ids = drafts
            self._runner._draft_token_req_ids = batch.req_ids.copy()
