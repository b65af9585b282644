"""Tables of the request fields of other servers' APIs that are refused or ignored.

The routes are allow-lists. A field is served if the body model of its route has it. Any other field
is in one of the tables below: a refused field would change the samples or the answer, and a neutral
one has no effect on them. A field in no table is refused, too: nobody has decided what it means.
docs/migrate/refused.md is generated from these tables and the body models.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from service.errors import InvalidRequest


class Refused(NamedTuple):
    """Refused request field: its values without effect, and the alternative to suggest.

    Null never has an effect.
    """

    allowed_values: tuple[object, ...]
    suggestion: str


_PROCESSOR = (
    "not supported: code of callers is not run; use logit_bias, allowed_token_ids or bad_words"
)
_TRUNCATED = (
    "not supported on this route: truncate the token ids in the client, or use /v1/completions"
)
_STOP = "not supported: use stop strings or stop_token_ids"
_TEXT_ONLY = "only text models are served: send text or token ids"
_OTHERS = "not supported on this route: use logprobs of /v1/completions, or POST /v1/score"
_CHOSEN = "not supported on this route: use logprob_token_ids of /v1/rollouts or /v1/score"
_TEMPLATE = (
    "only the chat template of the server is used: send token ids to /v1/completions instead"
)
_OPTION = "not supported: pass options of the chat template in chat_template_kwargs"
_THINKING = "reasoning has no limit of its own: set max_tokens for the whole response"
_PROMPT_LOGPROBS = "not supported: use prompt_logprobs of /v1/completions, or POST /v1/score"
_BACKEND = "the engine selects the backend: leave the field out"
_NOT_RETURNED = "the response has no such field: leave the parameter out"
_CLIENT_TOOLS = "not supported: run tools in the client, and send their results"
_EDITS = "messages are rendered as they are sent: edit them in the client"
_EXTRA_BODY = (
    "an argument of OpenAI's client, not a field: send its fields in the request itself; accepted "
    "if they are there, too"
)
_NO_EDITS: tuple[object, ...] = (
    {},
    [],
    {"edits": []},
    {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
)

REFUSED: dict[str, Refused] = {
    "typical_p": Refused((1,), "not supported: use top_p, top_k or min_p"),
    "logits_processors": Refused(([],), _PROCESSOR),
    "length_penalty": Refused((1,), "beam search is not supported: leave the field out"),
    "stop_regex": Refused(([], ""), _STOP),
    "use_beam_search": Refused((False,), "beam search is not supported: use n for several samples"),
    "best_of": Refused((1,), "not supported: use n, and select the best sample in the client"),
    "echo": Refused((False,), "not supported on this route: send the prompt to /v1/completions"),
    "suffix": Refused(("",), "not supported: append the text to the prompt"),
    "truncate_prompt_tokens": Refused((), _TRUNCATED),
    "truncation_side": Refused(("left", "right"), _TRUNCATED),
    "top_logprobs": Refused((0,), _OTHERS),
    "top_logprobs_num": Refused((0,), _OTHERS),
    "token_ids_logprob": Refused(([],), _OTHERS),
    "prompt_logprobs": Refused(
        (), "not supported on this route: use POST /v1/score, or prompt_logprobs of /v1/completions"
    ),
    "return_hidden_states": Refused(
        (False,), "not supported: use /v1/rollouts, which can export the prompt KV"
    ),
    "return_routed_experts": Refused(
        (False,), "not supported on this route: use return_routed_experts of /v1/rollouts"
    ),
    "return_indexer_topk": Refused(
        (False,), "not supported: indexer choices are not recorded; leave the field out"
    ),
    "chat_template": Refused(("",), _TEMPLATE),
    "add_special_tokens": Refused(
        (False,), "not supported: the chat template adds the special tokens; leave the field out"
    ),
    "documents": Refused(([],), _OPTION),
    "thinking_token_budget": Refused((), _THINKING),
    "max_thinking_tokens": Refused((), _THINKING),
    "include_reasoning": Refused(
        (True,), "reasoning is always returned: leave the field out, and ignore the reasoning"
    ),
    "repetition_detection": Refused(
        ({}, {"max_pattern_size": 0}), "not supported: penalize repetition in the reward"
    ),
    "logprob_token_ids": Refused(([],), _CHOSEN),
    "prompt_logprob_token_ids": Refused(([],), _CHOSEN),
    "prompt_logprob_start": Refused((0,), _PROMPT_LOGPROBS),
    "logprob_start_len": Refused((-1,), _PROMPT_LOGPROBS),
    "trace_decode_token_ids": Refused(
        ([],), "tokens are always sampled: use POST /v1/score for the logprobs of given tokens"
    ),
    "watermarking": Refused(
        (False,), "not supported: samples are never watermarked; leave the field out"
    ),
    "custom_logit_processor": Refused(("",), _PROCESSOR),
    "custom_params": Refused(({},), _PROCESSOR),
    "output_mode": Refused(("tokens",), "only tokens are returned: use /v1/completions for text"),
    "multi_item_delimiter_indices": Refused(([],), "not supported: use POST /v1/score"),
    "return_token_offsets": Refused((False,), _NOT_RETURNED),
    "return_prompt_text": Refused((False,), _NOT_RETURNED),
    "return_sampling_mask": Refused((False,), "not supported: use return_support"),
    "return_entropy": Refused((False,), _NOT_RETURNED),
    "return_prompt_token_ids": Refused((False,), _NOT_RETURNED),
    "return_flat_raw_top_logprobs": Refused((False,), _NOT_RETURNED),
    "features": Refused((), _TEXT_ONLY),
    "content_parts": Refused(([],), _TEXT_ONLY),
    "image_data": Refused(([],), _TEXT_ONLY),
    "audio_data": Refused(([],), _TEXT_ONLY),
    "video_data": Refused(([],), _TEXT_ONLY),
    "input_embeds": Refused((), "not supported: send input_ids"),
    "prompt_embeds": Refused(([],), "not supported: send token ids as the prompt"),
    "positional_embed_overrides": Refused((), "not supported: send input_ids"),
    "session_params": Refused(({},), "not supported: send the whole prompt; its prefix is cached"),
    "lora_path": Refused((), "not supported on this route: send the adapter's name as model"),
    "input_ids": Refused((), "not supported on this route: send token ids to /v1/completions"),
    "reasoning": Refused(({},), _OPTION),
    "task": Refused((), _OPTION),
    "separate_reasoning": Refused(
        (True,), "reasoning is separated if engine.reasoning_parser is set: leave the field out"
    ),
    "stream_reasoning": Refused(
        (True,), "reasoning is streamed as it is sampled: leave the field out"
    ),
    "require_reasoning": Refused((False,), "set structured_outputs.enable_in_reasoning instead"),
    "reasoning_ended": Refused((True,), "set structured_outputs.enable_in_reasoning instead"),
    "guided_decoding_backend": Refused(("auto", "xgrammar"), _BACKEND),
    "guided_whitespace_pattern": Refused((), _BACKEND),
    "return_cached_tokens_details": Refused((False,), _NOT_RETURNED),
    "return_meta_info": Refused((False,), _NOT_RETURNED),
    "modalities": Refused((["text"], []), _TEXT_ONLY),
    "audio": Refused((), _TEXT_ONLY),
    "functions": Refused(([],), "not supported: use tools"),
    "function_call": Refused(("none",), "not supported: use tool_choice"),
    "web_search_options": Refused((), "not supported: call tools in the client"),
    "moderation": Refused((), "not supported: check the response in the client"),
    "container": Refused((), _CLIENT_TOOLS),
    "mcp_servers": Refused(([],), _CLIENT_TOOLS),
    "context_management": Refused(_NO_EDITS, _EDITS),
    "compaction": Refused(({},), _EDITS),
    "truncation": Refused(("disabled",), "prompts are not truncated: shorten the input"),
    "conversation": Refused((), "conversations are not stored: use previous_response_id"),
    "enable_response_messages": Refused((False,), "use return_token_ids to get the token ids"),
    "previous_input_messages": Refused(([],), "not supported: send the messages in input"),
    "image": Refused((), _TEXT_ONLY),
    "thread": Refused((), "not supported: send all messages"),
    "extra_body": Refused(({},), _EXTRA_BODY),
    "fallbacks": Refused(([],), "one model is served: repeat the request at another server"),
}

RESPONSES_REFUSED: dict[str, Refused] = {
    "background": Refused((False,), "not supported: wait for the response, or stream it"),
    "prompt": Refused((), "prompt templates are not stored: send instructions and input"),
}
"""Fields that only /v1/responses refuses: elsewhere they have another meaning."""

INTERNALS = "controls engine internals; it is not passed on"

# Reasons why a field affects neither the samples nor their answer.
NEUTRAL: dict[str, str] = {
    "user": "names an end user",
    "request_id": "the server's own id is answered",
    "session_id": "for routers in front of several servers",
    "routing_key": "for routers",
    "conversation_id": "for tracking",
    "spaces_between_special_tokens": "formats text",
    "return_text_in_logprobs": "the ids are answered",
    "detokenize": "text is answered anyway",
    "stream_interval": "tokens are streamed as they are sampled",
    "routed_experts_prompt_start": "return_routed_experts is refused",
    "routed_experts_start_len": "return_routed_experts is refused",
    "return_flat_raw_top_logprobs_b64": "return_flat_raw_top_logprobs is refused",
    "media_io_kwargs": "media are refused",
    "mm_processor_kwargs": "media are refused",
    "mm_payload": "media are refused",
    "return_mm_kwargs": "media are refused",
    "mm_hashes": "media are refused",
    "mm_content_hashes": "media are refused",
    "use_audio_in_video": "media are refused",
    "video_config": "media are refused",
    "images_config": "media are refused",
    "need_wait_for_mm_inputs": "media are refused",
    "num_items_assigned": "media are refused",
    "encoder_urls": "media are refused",
    "max_dynamic_patch": "media are refused",
    "min_dynamic_patch": "media are refused",
    "image_max_dynamic_patch": "media are refused",
    "video_max_dynamic_patch": "media are refused",
    "return_bytes": "media are refused",
    "token_offsets": "describes the prompt's source text",
    "reasoning_parser_kwargs": "reasoning_ended is refused",
    "flat_logprobs": "how vLLM stores logprobs inside",
    "output_kind": "how vLLM hands out outputs inside",
    "skip_clone": "how vLLM copies inside",
    "output_text_buffer_length": "computed by vLLM",
    "skip_reading_prefix_cache": "speed",
    "cache_salt": "SGLang's; speed",
    "log_metrics": "operation",
    "no_logs": "prompts and responses are never logged",
    "custom_labels": "operation",
    "external_trace_header": "operation",
    "received_time": "operation",
    "http_worker_ipc": "operation",
    "background": "operation",
    "lora_id": "set by SGLang itself from lora_path",
    "bootstrap_host": "transfer of keys and values between SGLang's servers",
    "bootstrap_port": "transfer of keys and values between SGLang's servers",
    "bootstrap_room": "transfer of keys and values between SGLang's servers",
    "bootstrap_pair_key": "transfer of keys and values between SGLang's servers",
    "decode_tp_size": "transfer of keys and values between SGLang's servers",
    "disagg_prefill_dp_rank": "transfer of keys and values between SGLang's servers",
    "kv_router_hint": "transfer of keys and values between SGLang's servers",
    "routed_dp_rank": "the server chooses the engine of a group",
    "data_parallel_rank": "the server chooses the engine of a group",
    "rid": "the server's own id is answered",
    "extra_key": "SGLang's; speed",
    "ngram_corpus_id": "speed",
    "prediction": "speed",
    "client_metadata": "operation",
    "metadata": "operation",
    "store": "nothing is stored",
    "service_tier": "operation",
    "safety_identifier": "names an end user",
    "prompt_cache_key": "speed",
    "prompt_cache_retention": "speed",
    "prompt_cache_options": "speed",
    "cache_control": "prefixes of prompts are always cached",
    "billing_policy": "operation",
    "diagnostics": "operation",
    "fallback_credit_token": "operation",
    "inference_geo": "operation",
    "speed": "speed",
    "user_profile_id": "names an end user",
    "workspace_id": "operation",
    "access_programs": "operation",
    "verbosity": "no chat template reads it",
    "max_tool_calls": "counts tools that the server runs; it runs none",
    "kv_transfer_params": INTERNALS,
    "ec_transfer_params": INTERNALS,
    "vllm_xargs": INTERNALS,
    "extra_args": INTERNALS,
}

INTERNAL_FIELDS = frozenset(name for name, reason in NEUTRAL.items() if reason == INTERNALS)
UNKNOWN = (
    "the field is not served on this route: leave it out, or see docs/migrate/refused.md for what "
    "is served"
)


def check_field(name: str, value: Any, refused: Mapping[str, Refused] = REFUSED) -> None:
    """Raise InvalidRequest if a field that is not served has an effect or is not known.

    `refused` are fields that only its route refuses; the tables have the others.
    """
    field = refused.get(name) or REFUSED.get(name)
    if value is None or (field is None and name in NEUTRAL):
        return
    if field is None:
        raise InvalidRequest.of_parameter(name, UNKNOWN)
    if not _is_neutral(value, field):
        raise InvalidRequest.of_parameter(name, field.suggestion)


def _is_neutral(value: Any, field: Refused) -> bool:
    """True if the value of a refused request field, or each element of it, has no effect.

    SGLang accepts most fields also as a list with one value per prompt.
    """
    if isinstance(value, list) and value and value not in field.allowed_values:
        return all(item is None or item in field.allowed_values for item in value)
    return value in field.allowed_values
