"""Sampling parameters of a request, from vLLM's SamplingParams to those of the service.

A parameter that the service does not carry is refused, since the samples would come from another
distribution than the caller has asked for.
"""

from collections.abc import Set as AbstractSet
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

CARRIED = (
    *("temperature", "top_p", "top_k", "min_p", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("allowed_token_ids", "bad_words", "stop", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "skip_special_tokens"),
)
MAX_BIAS = 100.0
"""Bound of vLLM's OpenAI routes, which is as good as no bound."""
MAX_TOKENS = frozenset({"max_tokens", "max_completion_tokens", "max_output_tokens"})
REFUSED = {
    "logprob_token_ids": "use logprob_token_ids of /v1/rollouts",
    "prompt_logprob_token_ids": "use POST /v1/score",
    "prompt_logprob_start": "use POST /v1/score",
    "thinking_token_budget": "set max_tokens for the whole response",
    "repetition_detection": "penalize repetition in the reward",
    "watermarking": "samples are never watermarked",
    "trace_decode_token_ids": "score given tokens with POST /v1/score",
}
_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_FORMATTING = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
_DEFAULTS = SamplingParams()


def check(params: SamplingParams) -> None:
    """Refuse parameters that the service does not carry."""
    for name, alternative in REFUSED.items():
        if getattr(params, name):
            raise VLLMValidationError(f"not supported: {alternative}", parameter=name)


def sampling_fields(
    params: SamplingParams,
    given: AbstractSet[str],
    *,
    sets_max_tokens: bool,
    reasoning_ended: bool | None,
) -> dict[str, Any]:
    """The parameters that a request has set; `given` are the names of its fields.

    With `sets_max_tokens` they include the limit that vLLM sets for a request without one. The
    constraint of a message begins after the reasoning, unless `reasoning_ended`.
    """
    values = {name: getattr(params, name) for name in CARRIED}
    fields = {
        name: value
        for name, value in values.items()
        if value is not None and (name in given or value != getattr(_DEFAULTS, name))
    }
    if "top_k" in fields:
        fields["top_k"] = max(fields["top_k"], 0)
    if params.logit_bias:
        fields["logit_bias"] = {
            str(token): min(MAX_BIAS, max(-MAX_BIAS, bias))
            for token, bias in params.logit_bias.items()
        }
    if sets_max_tokens or not MAX_TOKENS.isdisjoint(given):
        fields["max_tokens"] = params.max_tokens
    if params.structured_outputs is not None:
        constraint = _constraint(params.structured_outputs)
        if constraint:
            fields["structured_outputs"] = constraint | {
                "enable_in_reasoning": bool(reasoning_ended)
            }
    return fields


def _constraint(outputs: StructuredOutputsParams) -> dict[str, Any]:
    for name in _FORMATTING:
        if getattr(outputs, name):
            raise VLLMValidationError(
                "not supported: the schema determines the text",
                parameter=f"structured_outputs.{name}",
            )
    found = {name: getattr(outputs, name) for name in _CONSTRAINTS}
    return {name: value for name, value in found.items() if value is not None}
