"""Unsupported parameters and routes of vLLM, SGLang and OpenAI; errors name the alternative.

A parameter at its neutral value has no effect and is accepted, since these clients send all of
their fields. Any other value is rejected, because ignoring it would silently change the training.
"""

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from fastapi import APIRouter, Response

from service.auth.access import allow_any_key, requires_role
from service.compat.openai_errors import OpenAIRoute, as_openai
from service.http.errors import InvalidJson, InvalidRequest, Unsupported
from service.http.responses import AUTH_ERRORS, declare_responses


class UnsupportedParam(NamedTuple):
    """Unsupported request field: its values without effect, and the alternative to suggest.

    Null never has an effect.
    """

    allowed_values: tuple[object, ...]
    suggestion: str


_TRUNCATION = "not supported, because it would change the logprobs: use top_p or top_k"
_PENALTY = (
    "not supported, because the tokens would not be sampled from the model's own distribution: "
    "penalize repetition in the reward"
)
_STOP = "stop strings are not supported: use stop_token_ids"
_GUIDED = "guided decoding is not supported: parse the response, and reward valid output"
_TEXT_ONLY = "only text models are served: send text or token ids"
_OTHERS = "not supported on this route: use logprobs of /v1/completions, or POST /v1/score"
_CHOSEN = "logprobs of given tokens are not supported: use logprobs, which returns the top-k tokens"
_TEMPLATE = (
    "only the chat template of the server is used: send token ids to /v1/completions instead"
)
_OPTION = "not supported: pass options of the chat template in chat_template_kwargs"
_THINKING = "reasoning has no limit of its own: set max_tokens for the whole response"
_PROMPT_LOGPROBS = "not supported: use prompt_logprobs of /v1/completions, or POST /v1/score"
_NOT_RETURNED = "the response has no such field: leave the parameter out"

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
    "min_tokens": UnsupportedParam((0,), "not supported: use ignore_eos with max_tokens"),
    "min_new_tokens": UnsupportedParam((0,), "not supported: use ignore_eos with max_new_tokens"),
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
    "use_beam_search": UnsupportedParam(
        (False,), "beam search is not supported: use n for several samples"
    ),
    "best_of": UnsupportedParam(
        (1,), "not supported: use n, and select the best sample in the client"
    ),
    "echo": UnsupportedParam(
        (False,), "not supported on this route: use return_token_ids to get the prompt's token ids"
    ),
    "suffix": UnsupportedParam(("",), "not supported: append the text to the prompt"),
    "truncate_prompt_tokens": UnsupportedParam(
        (), "prompts are never truncated: truncate the prompt in the client"
    ),
    "top_logprobs": UnsupportedParam((0,), _OTHERS),
    "top_logprobs_num": UnsupportedParam((0,), _OTHERS),
    "token_ids_logprob": UnsupportedParam(([],), _OTHERS),
    "prompt_logprobs": UnsupportedParam(
        (), "not supported on this route: use POST /v1/score, or prompt_logprobs of /v1/completions"
    ),
    "return_hidden_states": UnsupportedParam(
        (False,), "not supported: use /v1/rollouts, which can export the prompt KV"
    ),
    "return_routed_experts": UnsupportedParam(
        (False,), "not supported: expert routing is not recorded; leave the field out"
    ),
    "return_indexer_topk": UnsupportedParam(
        (False,), "not supported: indexer choices are not recorded; leave the field out"
    ),
    "chat_template": UnsupportedParam(("",), _TEMPLATE),
    "continue_final_message": UnsupportedParam((False,), _TEMPLATE),
    "add_special_tokens": UnsupportedParam(
        (False,), "not supported: the chat template adds the special tokens; leave the field out"
    ),
    "documents": UnsupportedParam(([],), _OPTION),
    "reasoning_effort": UnsupportedParam((), _OPTION),
    "thinking_token_budget": UnsupportedParam((), _THINKING),
    "max_thinking_tokens": UnsupportedParam((), _THINKING),
    "include_reasoning": UnsupportedParam(
        (True,), "reasoning is always returned: leave the field out, and ignore the reasoning"
    ),
    "parallel_tool_calls": UnsupportedParam(
        (True,), "tool calls are returned as generated: leave the field out"
    ),
    "repetition_detection": UnsupportedParam(
        ({}, {"max_pattern_size": 0}), "not supported: penalize repetition in the reward"
    ),
    "logprob_token_ids": UnsupportedParam(([],), _CHOSEN),
    "prompt_logprob_token_ids": UnsupportedParam(([],), _CHOSEN),
    "prompt_logprob_start": UnsupportedParam((0,), _PROMPT_LOGPROBS),
    "logprob_start_len": UnsupportedParam((-1,), _PROMPT_LOGPROBS),
    "trace_decode_token_ids": UnsupportedParam(
        ([],), "tokens are always sampled: use POST /v1/score for the logprobs of given tokens"
    ),
    "watermarking": UnsupportedParam(
        (False,), "not supported: samples are never watermarked; leave the field out"
    ),
    "custom_logit_processor": UnsupportedParam(("",), _TRUNCATION),
    "custom_params": UnsupportedParam(({},), _TRUNCATION),
    "structural_tag": UnsupportedParam(("",), _GUIDED),
    "output_mode": UnsupportedParam(
        ("tokens",), "only tokens are returned: use /v1/completions for text"
    ),
    "multi_item_delimiter_indices": UnsupportedParam(([],), "not supported: use POST /v1/score"),
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
    "input_embeds": UnsupportedParam((), "not supported: send input_ids"),
    "prompt_embeds": UnsupportedParam(([],), "not supported: send token ids as the prompt"),
    "positional_embed_overrides": UnsupportedParam((), "not supported: send input_ids"),
    "session_params": UnsupportedParam(
        ({},), "not supported: send the whole prompt; its prefix is cached"
    ),
}


def check_param(name: str, value: Any) -> bool:
    """Raise InvalidRequest if a request field is unsupported and its value has an effect.

    Returns whether the field is in `UNSUPPORTED`.
    """
    param = UNSUPPORTED.get(name)
    if param is None:
        return False
    if not _is_neutral(value, param):
        raise InvalidRequest.of_parameter(name, param.suggestion)
    return True


def _is_neutral(value: Any, param: UnsupportedParam) -> bool:
    """True if the value of an unsupported request field, or each element of it, has no effect.

    SGLang accepts most fields also as a list with one value per prompt.
    """
    if isinstance(value, list) and value and value not in param.allowed_values:
        return all(item is None or item in param.allowed_values for item in value)
    return value is None or value in param.allowed_values


NCCL = (
    "weight transfer over NCCL is not supported: publish the weights over HTTP "
    "(coppice.integrations.trl.install(), or PUT /v1/weights), or send the path of a directory of "
    "safetensors files as weight_dir"
)
_TENSORS = (
    "weight transfer over NCCL and as pickled tensors is not supported: publish the weights over "
    "HTTP (PUT /v1/weights), or send the path of a directory to POST /update_weights_from_disk"
)
_ADAPTER_TENSORS = (
    "adapters as pickled tensors are not supported: send the path of a directory to POST "
    "/load_lora_adapter, or upload the adapter with PUT /v1/adapters"
)
_MEMORY = "the engine does not release its GPU memory: run the trainer on another device"
_RPC = (
    "calls of worker methods are not supported: publish weights with PUT /v1/weights, or send the "
    "path of a directory to POST /update_weights"
)
SKYRL = (
    "SkyRL's own routes are not supported: send token ids to /inference/v1/generate, and publish "
    "weights with PUT /v1/weights, or with vLLM's POST /update_weights"
)
_GENERATIVE = "only a generative model is served: send the request to an embedding server"
_OTHER_CHAT = "not supported: use /v1/chat/completions"
_RENDER = "not supported: use /tokenize with messages, and send its token ids to /v1/completions"

VLLM_ROUTES = {
    "/init_weight_transfer_engine": NCCL,
    "/init_broadcaster": NCCL,
    "/sleep": _MEMORY,
    "/wake_up": _MEMORY,
    "/collective_rpc": _RPC,
    "/v1/chat/completions/render": _RENDER,
}
SGLANG_ROUTES = {
    "/init_weights_update_group": _TENSORS,
    "/update_weights_from_distributed": _TENSORS,
    "/update_weights_from_tensor": _TENSORS,
    "/update_weights_from_ipc": _TENSORS,
    "/pull_weights": _TENSORS,
    "/load_lora_adapter_from_tensors": _ADAPTER_TENSORS,
    "/release_memory_occupation": _MEMORY,
    "/resume_memory_occupation": _MEMORY,
}
OPENAI_ROUTES = {
    **dict.fromkeys(("/v1/embeddings", "/v1/rerank", "/pooling", "/classify"), _GENERATIVE),
    **dict.fromkeys(("/v1/responses", "/v1/messages"), _OTHER_CHAT),
}
_ADMIN_RESPONSES = declare_responses({}, *AUTH_ERRORS, Unsupported)
_CALLER_RESPONSES = as_openai(declare_responses({}, *AUTH_ERRORS, InvalidJson, Unsupported))


def _refusal(suggestion: str) -> Callable[[], Awaitable[Response]]:
    async def refuse() -> Response:
        raise Unsupported(suggestion)

    return refuse


def _admin_routes(suggestions: dict[str, str]) -> APIRouter:
    router = APIRouter()
    for path, suggestion in suggestions.items():
        refuse = requires_role("admin")(_refusal(suggestion))
        router.post(path, responses=_ADMIN_RESPONSES)(refuse)
    return router


def _caller_routes(suggestions: dict[str, str]) -> APIRouter:
    router = APIRouter(route_class=OpenAIRoute)
    for path, suggestion in suggestions.items():
        refuse = allow_any_key(_refusal(suggestion))
        router.get(path, responses=_CALLER_RESPONSES)(refuse)
        router.post(path, responses=_CALLER_RESPONSES)(refuse)
    return router


openai = _caller_routes(OPENAI_ROUTES)
vllm = _admin_routes(VLLM_ROUTES)
sglang = _admin_routes(SGLANG_ROUTES)
skyrl = APIRouter(route_class=OpenAIRoute)


@skyrl.get("/skyrl/v1/{rest:path}", responses=_CALLER_RESPONSES)
@skyrl.post("/skyrl/v1/{rest:path}", responses=_CALLER_RESPONSES)
@allow_any_key
async def refuse_skyrl(rest: str) -> Response:
    raise Unsupported(SKYRL)
