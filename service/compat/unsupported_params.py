"""Fields of other servers that would change the samples and that the engine is not asked for.

At its neutral value a field changes nothing and is let through, since these clients send all of
theirs. Otherwise the answer names what to use instead: ignored, it would change the training.
"""

from typing import Any, NamedTuple

from service.http.errors import InvalidRequest


class Refusal(NamedTuple):
    """Null is neutral for every field."""

    neutral: tuple[object, ...]
    instead: str


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

REFUSED: dict[str, Refusal] = {
    "min_p": Refusal((0,), _TRUNCATION),
    "typical_p": Refusal((1,), _TRUNCATION),
    "logit_bias": Refusal(({},), _TRUNCATION),
    "allowed_token_ids": Refusal((), _TRUNCATION),
    "bad_words": Refusal(([],), _TRUNCATION),
    "logits_processors": Refusal(([],), _TRUNCATION),
    "repetition_penalty": Refusal((1,), _PENALTY),
    "frequency_penalty": Refusal((0,), _PENALTY),
    "presence_penalty": Refusal((0,), _PENALTY),
    "length_penalty": Refusal((1,), _PENALTY),
    "min_tokens": Refusal((0,), "not served: use ignore_eos with max_tokens"),
    "min_new_tokens": Refusal((0,), "not served: use ignore_eos with max_new_tokens"),
    "stop": Refusal(([], ""), _STOP),
    "stop_regex": Refusal(([], ""), _STOP),
    "structured_outputs": Refusal(({},), _GUIDED),
    "response_format": Refusal(({"type": "text"},), _GUIDED),
    "guided_json": Refusal((), _GUIDED),
    "guided_regex": Refusal((), _GUIDED),
    "guided_choice": Refusal(([],), _GUIDED),
    "guided_grammar": Refusal((), _GUIDED),
    "json_schema": Refusal(("",), _GUIDED),
    "regex": Refusal(("",), _GUIDED),
    "ebnf": Refusal(("",), _GUIDED),
    "use_beam_search": Refusal((False,), "beams are not samples: use n"),
    "best_of": Refusal((1,), "not served: use n and choose"),
    "echo": Refusal((False,), "not served here: return_token_ids returns the prompt's token ids"),
    "suffix": Refusal(("",), "not served: put it into the prompt"),
    "truncate_prompt_tokens": Refusal((), "prompts are never cut: send the tokens that you mean"),
    "top_logprobs": Refusal((0,), _OTHERS),
    "top_logprobs_num": Refusal((0,), _OTHERS),
    "token_ids_logprob": Refusal(([],), _OTHERS),
    "prompt_logprobs": Refusal((), "not served here: ask POST /v1/score, or /v1/completions"),
    "return_hidden_states": Refusal((False,), "not served: ask for prompt KV with /v1/rollouts"),
    "return_routed_experts": Refusal((False,), "not served: routing is not recorded"),
    "return_indexer_topk": Refusal((False,), "not served: indexer choices are not recorded"),
    "chat_template": Refusal(("",), _TEMPLATE),
    "continue_final_message": Refusal((False,), _TEMPLATE),
    "add_special_tokens": Refusal(
        (False,), "not served: the chat template writes the special tokens"
    ),
    "documents": Refusal(([],), _OPTION),
    "reasoning_effort": Refusal((), _OPTION),
    "thinking_token_budget": Refusal((), _THINKING),
    "max_thinking_tokens": Refusal((), _THINKING),
    "include_reasoning": Refusal((True,), "reasoning is always returned: ignore the field"),
    "parallel_tool_calls": Refusal((True,), "tool calls are returned as the model wrote them"),
    "repetition_detection": Refusal(
        ({}, {"max_pattern_size": 0}), "not served: reward repetition less"
    ),
    "logprob_token_ids": Refusal(([],), _CHOSEN),
    "prompt_logprob_token_ids": Refusal(([],), _CHOSEN),
    "prompt_logprob_start": Refusal((0,), _PROMPT_LOGPROBS),
    "logprob_start_len": Refusal((-1,), _PROMPT_LOGPROBS),
    "trace_decode_token_ids": Refusal(
        ([],), "tokens are sampled, not forced: use POST /v1/score for given tokens"
    ),
    "watermarking": Refusal((False,), "not served: samples are never watermarked"),
    "custom_logit_processor": Refusal(("",), _TRUNCATION),
    "custom_params": Refusal(({},), _TRUNCATION),
    "structural_tag": Refusal(("",), _GUIDED),
    "output_mode": Refusal(("tokens",), "only tokens: use /v1/completions for text"),
    "multi_item_delimiter_indices": Refusal(([],), "not served: use POST /v1/score"),
    "return_token_offsets": Refusal((False,), _NOT_RETURNED),
    "return_prompt_text": Refusal((False,), _NOT_RETURNED),
    "return_sampling_mask": Refusal((False,), _NOT_RETURNED),
    "return_entropy": Refusal((False,), _NOT_RETURNED),
    "return_prompt_token_ids": Refusal((False,), _NOT_RETURNED),
    "return_flat_raw_top_logprobs": Refusal((False,), _NOT_RETURNED),
    "features": Refusal((), _TEXT_ONLY),
    "content_parts": Refusal(([],), _TEXT_ONLY),
    "image_data": Refusal(([],), _TEXT_ONLY),
    "audio_data": Refusal(([],), _TEXT_ONLY),
    "video_data": Refusal(([],), _TEXT_ONLY),
    "input_embeds": Refusal((), "not served: send input_ids"),
    "prompt_embeds": Refusal(([],), "not served: send token ids as prompt"),
    "positional_embed_overrides": Refusal((), "not served: send input_ids"),
    "session_params": Refusal(({},), "not served: send the whole prompt, its prefix is cached"),
}


def check(name: str, value: Any) -> bool:
    """Whether it is a field of this table, at its neutral value; raises at any other."""
    refusal = REFUSED.get(name)
    if refusal is None:
        return False
    if not _is_neutral(value, refusal):
        raise InvalidRequest.of_parameter(name, refusal.instead)
    return True


def _is_neutral(value: Any, refusal: Refusal) -> bool:
    """SGLang takes most fields as a list too, with one value per prompt."""
    if isinstance(value, list) and value and value not in refusal.neutral:
        return all(item is None or item in refusal.neutral for item in value)
    return value is None or value in refusal.neutral
