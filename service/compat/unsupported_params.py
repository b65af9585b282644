"""Request fields of other servers that would change the samples and are not supported.

A field at its neutral value has no effect and is accepted, since these clients send all of their
fields. Any other value is rejected with an alternative: if it were ignored, it would silently
change the training.
"""

from typing import Any, NamedTuple

from service.http.errors import InvalidRequest


class UnsupportedParam(NamedTuple):
    """Neutral values of a field, and the alternative to suggest; null is always neutral."""

    allowed_values: tuple[object, ...]
    suggestion: str


_TRUNCATION = (
    "not served, because the log-probabilities would not be the model's: use top_p or top_k"
)
_PENALTY = "not served, because the samples would not be the model's own: reward repetition less"
_STOP = "strings are not matched against tokens: use stop_token_ids"
_GUIDED = "guided decoding is not served: parse the response and reward it"
_TEXT_ONLY = "only text models are served"
_OTHERS = "not here: ask for logprobs of /v1/completions, or POST /v1/score"
_CHOSEN = "log-probabilities of chosen tokens are not served: use logprobs, which returns the top-k"
_TEMPLATE = "only the model's own chat template is rendered: send token ids to /v1/completions"
_OPTION = "not served: pass what the chat template reads in chat_template_kwargs"
_THINKING = "reasoning is not cut off: set max_tokens for the whole response"
_PROMPT_LOGPROBS = "not served: use prompt_logprobs of /v1/completions, or POST /v1/score"
_NOT_RETURNED = "the response has no such field: leave it out"

UNSUPPORTED: dict[str, UnsupportedParam] = {
    "min_p": UnsupportedParam((0,), _TRUNCATION),
    "typical_p": UnsupportedParam((1,), _TRUNCATION),
    "logit_bias": UnsupportedParam(({},), _TRUNCATION),
    "allowed_token_ids": UnsupportedParam((), _TRUNCATION),
    "bad_words": UnsupportedParam(([],), _TRUNCATION),
    "logits_processors": UnsupportedParam(([],), _TRUNCATION),
    "repetition_penalty": UnsupportedParam((1,), _PENALTY),
    "frequency_penalty": UnsupportedParam((0,), _PENALTY),
    "presence_penalty": UnsupportedParam((0,), _PENALTY),
    "length_penalty": UnsupportedParam((1,), _PENALTY),
    "min_tokens": UnsupportedParam((0,), "not served: use ignore_eos with max_tokens"),
    "min_new_tokens": UnsupportedParam((0,), "not served: use ignore_eos with max_new_tokens"),
    "stop": UnsupportedParam(([], ""), _STOP),
    "stop_regex": UnsupportedParam(([], ""), _STOP),
    "structured_outputs": UnsupportedParam(({},), _GUIDED),
    "response_format": UnsupportedParam(({"type": "text"},), _GUIDED),
    "guided_json": UnsupportedParam((), _GUIDED),
    "guided_regex": UnsupportedParam((), _GUIDED),
    "guided_choice": UnsupportedParam(([],), _GUIDED),
    "guided_grammar": UnsupportedParam((), _GUIDED),
    "json_schema": UnsupportedParam(("",), _GUIDED),
    "regex": UnsupportedParam(("",), _GUIDED),
    "ebnf": UnsupportedParam(("",), _GUIDED),
    "use_beam_search": UnsupportedParam((False,), "beams are not samples: use n"),
    "best_of": UnsupportedParam((1,), "not served: use n and choose"),
    "echo": UnsupportedParam(
        (False,), "not served here: return_token_ids returns the prompt's token ids"
    ),
    "suffix": UnsupportedParam(("",), "not served: put it into the prompt"),
    "truncate_prompt_tokens": UnsupportedParam(
        (), "prompts are never cut: send the tokens that you mean"
    ),
    "top_logprobs": UnsupportedParam((0,), _OTHERS),
    "top_logprobs_num": UnsupportedParam((0,), _OTHERS),
    "token_ids_logprob": UnsupportedParam(([],), _OTHERS),
    "prompt_logprobs": UnsupportedParam(
        (), "not served here: ask POST /v1/score, or /v1/completions"
    ),
    "return_hidden_states": UnsupportedParam(
        (False,), "not served: ask for prompt KV with /v1/rollouts"
    ),
    "return_routed_experts": UnsupportedParam((False,), "not served: routing is not recorded"),
    "return_indexer_topk": UnsupportedParam(
        (False,), "not served: indexer choices are not recorded"
    ),
    "chat_template": UnsupportedParam(("",), _TEMPLATE),
    "continue_final_message": UnsupportedParam((False,), _TEMPLATE),
    "add_special_tokens": UnsupportedParam(
        (False,), "not served: the chat template writes the special tokens"
    ),
    "documents": UnsupportedParam(([],), _OPTION),
    "reasoning_effort": UnsupportedParam((), _OPTION),
    "thinking_token_budget": UnsupportedParam((), _THINKING),
    "max_thinking_tokens": UnsupportedParam((), _THINKING),
    "include_reasoning": UnsupportedParam(
        (True,), "reasoning is always returned: ignore the field"
    ),
    "parallel_tool_calls": UnsupportedParam(
        (True,), "tool calls are returned as the model wrote them"
    ),
    "repetition_detection": UnsupportedParam(
        ({}, {"max_pattern_size": 0}), "not served: reward repetition less"
    ),
    "logprob_token_ids": UnsupportedParam(([],), _CHOSEN),
    "prompt_logprob_token_ids": UnsupportedParam(([],), _CHOSEN),
    "prompt_logprob_start": UnsupportedParam((0,), _PROMPT_LOGPROBS),
    "logprob_start_len": UnsupportedParam((-1,), _PROMPT_LOGPROBS),
    "trace_decode_token_ids": UnsupportedParam(
        ([],), "tokens are sampled, not forced: use POST /v1/score for given tokens"
    ),
    "watermarking": UnsupportedParam((False,), "not served: samples are never watermarked"),
    "custom_logit_processor": UnsupportedParam(("",), _TRUNCATION),
    "custom_params": UnsupportedParam(({},), _TRUNCATION),
    "structural_tag": UnsupportedParam(("",), _GUIDED),
    "output_mode": UnsupportedParam(("tokens",), "only tokens: use /v1/completions for text"),
    "multi_item_delimiter_indices": UnsupportedParam(([],), "not served: use POST /v1/score"),
    "return_token_offsets": UnsupportedParam((False,), _NOT_RETURNED),
    "return_prompt_text": UnsupportedParam((False,), _NOT_RETURNED),
    "return_sampling_mask": UnsupportedParam((False,), _NOT_RETURNED),
    "return_entropy": UnsupportedParam((False,), _NOT_RETURNED),
    "return_prompt_token_ids": UnsupportedParam((False,), _NOT_RETURNED),
    "return_flat_raw_top_logprobs": UnsupportedParam((False,), _NOT_RETURNED),
    "features": UnsupportedParam((), _TEXT_ONLY),
    "content_parts": UnsupportedParam(([],), _TEXT_ONLY),
    "image_data": UnsupportedParam(([],), _TEXT_ONLY),
    "audio_data": UnsupportedParam(([],), _TEXT_ONLY),
    "video_data": UnsupportedParam(([],), _TEXT_ONLY),
    "input_embeds": UnsupportedParam((), "not served: send input_ids"),
    "prompt_embeds": UnsupportedParam(([],), "not served: send token ids as prompt"),
    "positional_embed_overrides": UnsupportedParam((), "not served: send input_ids"),
    "session_params": UnsupportedParam(
        ({},), "not served: send the whole prompt, its prefix is cached"
    ),
}


def check(name: str, value: Any) -> bool:
    """True if the field is in UNSUPPORTED and has a neutral value; raises at any other value."""
    param = UNSUPPORTED.get(name)
    if param is None:
        return False
    if not _is_neutral(value, param):
        raise InvalidRequest.of_parameter(name, param.suggestion)
    return True


def _is_neutral(value: Any, param: UnsupportedParam) -> bool:
    """True if the value, or each element of a list, is neutral.

    SGLang accepts most fields also as a list with one value per prompt.
    """
    if isinstance(value, list) and value and value not in param.allowed_values:
        return all(item is None or item in param.allowed_values for item in value)
    return value is None or value in param.allowed_values
