"""Conversion of a sample request to vLLM's SamplingParams and extra_args."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output.utils import choice_as_grammar

from engine.errors import RequestRefused
from engine.held_outputs.hold_option import HOLD_ARG, Hold
from engine.kv_lifetime.keep_option import KEEP_KV_ARG, KeepOption
from engine.requests.sampling_checks import XGRAMMAR, bad_word_ids
from engine.requests.stop_strings import PRIOR_TEXT_ARG
from engine.sampling.request_hooks import DRAWN_TOKENS_ARG, PRIOR_TOKENS_ARG
from engine.sampling.requested_logprobs import RequestedLogprobs
from engine.sampling.routed_experts import ROUTED_EXPERTS_ARG
from engine.sampling.step_supports import SUPPORT_ARG
from engine.speculation.request_table import GROUP_ARG, NO_DRAFTS_ARG
from engine.types.kv import KvTransferParams
from engine.types.samples import SampleRequest, StructuredOutputs

Value = TypeVar("Value")
_choice_grammar = lru_cache(maxsize=16)(choice_as_grammar)
"""Cached, because the samples of a request have the same choices and are submitted one by one."""


class RequestParams(SamplingParams):  # type: ignore[misc]  # vLLM's types are not followed
    """SamplingParams of a sample, which vLLM accepts also together with speculation.

    vLLM refuses `min_p` and `logit_bias` if the engine drafts, and masks end-of-sequence tokens too
    long if drafts pass the end of `min_tokens`. Here a sample with one of them gets no drafts
    (`find_skip_reason`), so its tokens come from the ordinary sampler. What vLLM validates for each
    sample is validated once per request instead, outside the event loop.
    """

    def _validate_spec_decode(self, speculative_config: Any) -> None:
        pass

    def _validate_structured_outputs(self, model: Any, config: Any, tokenizer: Any) -> None:
        """Set the backend only, because `SamplingChecks` has validated the constraint before."""
        if config.backend != XGRAMMAR:
            super()._validate_structured_outputs(model, config, tokenizer)
        elif self.structured_outputs is not None:
            self.structured_outputs._backend = XGRAMMAR

    def update_from_tokenizer(self, tokenizer: Any) -> None:
        if self.bad_words:
            self._bad_words_token_ids = bad_word_ids(tuple(self.bad_words), tokenizer)


def sampling_params(sample: SampleRequest, max_context_tokens: int) -> SamplingParams:
    """Convert a sample request to vLLM's SamplingParams.

    Fields are copied one by one, so no other field of a request reaches vLLM. `max_context_tokens`
    may be smaller than vLLM's own limit.
    """
    sampling = sample.sampling
    max_response_tokens = max_context_tokens - len(sample.prompt_token_ids)
    if max_response_tokens < 1:
        raise RequestRefused(
            f"the prompt must be shorter than the context of {max_context_tokens} tokens"
        )
    max_tokens = min(sampling.max_tokens, max_response_tokens)
    return RequestParams(
        n=1,
        max_tokens=max_tokens,
        min_tokens=min(sampling.min_tokens, max_tokens),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        allowed_token_ids=_as_list(sampling.allowed_token_ids),
        bad_words=list(sampling.bad_words),
        structured_outputs=_structured_outputs(sampling.structured_outputs),
        seed=sample.seed,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        skip_special_tokens=sampling.skip_special_tokens,
        ignore_eos=sampling.ignore_eos,
        logprobs=_num_logprobs(sample),
        flat_logprobs=True,
        detokenize=bool(sampling.stop) or sample.returns_text,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # not shared
        extra_args=_extra_args(sample),
        routed_experts_prompt_start=sample.experts_from or 0,
    )


def _num_logprobs(sample: SampleRequest) -> int | None:
    """Number of top logprobs per token; None if the sampler need not compute any.

    Supports and further logprobs are taken from the logprobs that it computes.
    """
    if not (sample.returns_logprobs or sample.support or requested_logprobs(sample).width):
        return None
    return max(sample.entropy_top_k, 0 if sample.raw_logprobs else sample.num_top_logprobs)


def requested_logprobs(sample: SampleRequest) -> RequestedLogprobs:
    return RequestedLogprobs(
        given=sample.logprob_token_ids,
        num_raw=sample.num_top_logprobs if sample.raw_logprobs else None,
    )


def _structured_outputs(wanted: StructuredOutputs | None) -> StructuredOutputsParams | None:
    if wanted is None:
        return None
    return StructuredOutputsParams(
        json=wanted.json,
        regex=wanted.regex,
        grammar=wanted.grammar if wanted.choice is None else _choice_grammar(wanted.choice),
        json_object=wanted.json_object,
        structural_tag=wanted.structural_tag,
    )


def _as_list(values: Sequence[Value] | None) -> list[Value] | None:
    return None if values is None else list(values)


def _hold(sample: SampleRequest) -> Hold | None:
    """Time for which EngineCore may hold the outputs of a sample; None if it may not.

    Stop strings end a sample by its text, which only the service knows.
    """
    if sample.sampling.stop:
        return None
    return "final" if sample.on_tokens is None else "stream"


def _extra_args(sample: SampleRequest) -> dict[str, Any] | None:
    """`extra_args` of a sample's SamplingParams. No request can set `kv_transfer_params`."""
    carried: dict[str, Any] = {}
    if (hold := _hold(sample)) is not None:
        carried[HOLD_ARG] = hold
    if sample.group is not None:
        carried[GROUP_ARG] = sample.group
    if not sample.speculation:
        carried[NO_DRAFTS_ARG] = True
    if sample.support:
        carried[SUPPORT_ARG] = True
    carried |= requested_logprobs(sample).to_extra_args()
    if sample.num_prior_tokens and sample.sampling.depends_on_response:
        carried[PRIOR_TOKENS_ARG] = sample.num_prior_tokens
    if sample.num_drawn_tokens and sample.seed is not None:
        carried[DRAWN_TOKENS_ARG] = sample.num_drawn_tokens
    if sample.num_prior_tokens and sample.sampling.stop:
        carried[PRIOR_TEXT_ARG] = sample.num_prior_tokens
    if sample.export is not None:
        num_tokens, length = sample.export.num_tokens, len(sample.prompt_token_ids)
        assert 0 < num_tokens <= length, f"{num_tokens} of {length} tokens cannot be exported"
    assert sample.load is None or sample.load.pieces, "there is something to load"
    if sample.export is not None or sample.load is not None:
        params = KvTransferParams(export=sample.export, load=sample.load)
        carried["kv_transfer_params"] = params.to_dict()
    if sample.kept_kv is not None:
        assert sample.load is None and sample.export is None, "kept KV is not transferred"
        kept = sample.kept_kv
        carried[KEEP_KV_ARG] = KeepOption(max_lag=kept.max_lag)
    if sample.experts_from is not None:
        carried[ROUTED_EXPERTS_ARG] = True
    return carried or None
