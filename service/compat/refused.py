"""Fields of other servers that would change the samples and that the engine is not asked for.

At its neutral value a field changes nothing and is let through, since these clients send all of
theirs. Otherwise the answer names what to use instead: ignored, it would change the training.
"""

from typing import Any, NamedTuple

from service.errors import InvalidRequest


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
    "echo": Refusal((False,), "not served: the prompt's token ids are answered instead"),
    "suffix": Refusal(("",), "not served: put it into the prompt"),
    "truncate_prompt_tokens": Refusal((), "prompts are never cut: send the tokens that you mean"),
    "top_logprobs": Refusal((0,), _OTHERS),
    "top_logprobs_num": Refusal((0,), _OTHERS),
    "token_ids_logprob": Refusal(([],), _OTHERS),
    "prompt_logprobs": Refusal((), "not served here: ask POST /v1/score, or /v1/completions"),
    "return_hidden_states": Refusal((False,), "not served: ask for prompt KV with /v1/rollouts"),
    "return_routed_experts": Refusal((False,), "not served: routing is not recorded"),
    "features": Refusal((), _TEXT_ONLY),
    "content_parts": Refusal(([],), _TEXT_ONLY),
    "image_data": Refusal(([],), _TEXT_ONLY),
    "audio_data": Refusal(([],), _TEXT_ONLY),
    "video_data": Refusal(([],), _TEXT_ONLY),
    "input_embeds": Refusal((), "not served: send input_ids"),
    "session_params": Refusal(({},), "not served: send the whole prompt, its prefix is cached"),
}


def check(name: str, value: Any) -> bool:
    """Whether it is a field of this table, at its neutral value; raises at any other."""
    refusal = REFUSED.get(name)
    if refusal is None:
        return False
    if value is not None and value not in refusal.neutral:
        raise InvalidRequest.of_parameter(name, refusal.instead)
    return True
