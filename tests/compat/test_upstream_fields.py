"""Every request field of vLLM and SGLang: supported, refused, dropped, or without effect here.

A field added by a newer vLLM is in none of these tables and fails the test until its treatment is
decided.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from vllm.renderers.chat_utils import CustomChatCompletionMessageParam
from vllm.sampling_params import SamplingParams

from service.compat.bodies import IGNORED_FIELDS
from service.compat.openai_chat import ChatBody, ChatMessage
from service.compat.openai_completions import CompletionBody
from service.compat.sglang_generate import SglangBody, SglangSampling
from service.compat.unsupported import UNSUPPORTED
from service.compat.vllm_tokens import DetokenizeBody, GenerateBody, GenerateSampling, TokenizeBody
from tests.compat.third_party import foreign

pytestmark = pytest.mark.slow

# Reasons why a field affects neither the samples nor their answer.
NEUTRAL = {
    "user": "names an end user",
    "request_id": "the server's own id is answered",
    "session_id": "for routers in front of several servers",
    "routing_key": "for routers",
    "conversation_id": "for tracking",
    "skip_special_tokens": "formats text; token ids have every token",
    "spaces_between_special_tokens": "formats text",
    "include_stop_str_in_output": "formats text",
    "no_stop_trim": "formats text",
    "return_text_in_logprobs": "the ids are answered",
    "detokenize": "text is answered anyway",
    "truncation_side": "truncate_prompt_tokens is refused",
    "stream_options": "streams end with [DONE] either way",
    "stream_interval": "samples are streamed whole",
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
    "modalities": "media are refused",
    "need_wait_for_mm_inputs": "media are refused",
    "num_items_assigned": "media are refused",
    "encoder_urls": "media are refused",
    "max_dynamic_patch": "media are refused",
    "min_dynamic_patch": "media are refused",
    "image_max_dynamic_patch": "media are refused",
    "video_max_dynamic_patch": "media are refused",
    "return_bytes": "media are refused",
    "token_offsets": "describes the prompt's source text",
    "reasoning_ended": "structured outputs are refused",
    "reasoning_parser_kwargs": "structured outputs are refused",
    "require_reasoning": "structured outputs are refused",
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
    "routed_dp_rank": "one rank of data parallelism",
    "data_parallel_rank": "one rank of data parallelism",
}

# managers/io_struct.py and sampling/sampling_params.py of SGLang at 001067fffe, which is not
# installed here.
SGLANG_REQUEST = """
    rid session_id text input_ids input_embeds image_data video_data audio_data mm_hashes
    mm_content_hashes use_audio_in_video video_config sampling_params return_logprob
    logprob_start_len top_logprobs_num token_ids_logprob return_sampling_mask
    return_text_in_logprobs return_flat_raw_top_logprobs return_flat_raw_top_logprobs_b64 stream
    log_metrics return_hidden_states return_routed_experts routed_experts_start_len
    return_indexer_topk modalities session_params lora_path lora_id custom_logit_processor
    positional_embed_overrides bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key
    decode_tp_size routed_dp_rank data_parallel_rank disagg_prefill_dp_rank kv_router_hint
    routing_key conversation_id http_worker_ipc background require_reasoning max_thinking_tokens
    priority extra_key no_logs custom_labels return_bytes return_entropy return_prompt_token_ids
    external_trace_header received_time need_wait_for_mm_inputs num_items_assigned encoder_urls
    max_dynamic_patch min_dynamic_patch image_max_dynamic_patch video_max_dynamic_patch
    images_config multi_item_delimiter_indices cache_salt
"""
SGLANG_SAMPLING = """
    max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty
    presence_penalty repetition_penalty min_new_tokens n json_schema regex ebnf structural_tag
    ignore_eos skip_special_tokens spaces_between_special_tokens no_stop_trim custom_params
    stream_interval logit_bias sampling_seed
"""

REQUESTS: dict[str, tuple[Iterable[str], type[BaseModel]]] = {
    "chat": (ChatCompletionRequest.model_fields, ChatBody),
    "message": (CustomChatCompletionMessageParam.__annotations__, ChatMessage),
    "completion": (CompletionRequest.model_fields, CompletionBody),
    "generate": (GenerateRequest.model_fields, GenerateBody),
    "generate sampling": (
        [name for name in SamplingParams.__struct_fields__ if not name.startswith("_")],
        GenerateSampling,
    ),
    "tokenize": (TokenizeCompletionRequest.model_fields, TokenizeBody),
    "tokenize chat": (TokenizeChatRequest.model_fields, TokenizeBody),
    "detokenize": (DetokenizeRequest.model_fields, DetokenizeBody),
    "sglang": (SGLANG_REQUEST.split(), SglangBody),
    "sglang sampling": (SGLANG_SAMPLING.split(), SglangSampling),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_every_field_of_other_servers_is_in_a_table(name: str) -> None:
    theirs, ours = REQUESTS[name]
    accounted = {*ours.model_fields, *UNSUPPORTED, *IGNORED_FIELDS, *NEUTRAL}
    assert set(theirs) - accounted == set()


def test_no_field_is_in_two_tables() -> None:
    assert not (
        set(UNSUPPORTED) & IGNORED_FIELDS
        or set(UNSUPPORTED) & set(NEUTRAL)
        or IGNORED_FIELDS & set(NEUTRAL)
    )


def test_every_table_names_existing_fields() -> None:
    theirs = {field for fields, _ in REQUESTS.values() for field in fields}
    assert set(NEUTRAL) - theirs == set()


COMPLETION: dict[str, Any] = {"prompt": [5], "max_tokens": 1}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "body", "name", "value"),
    [
        ("/v1/chat/completions", CHAT, "chat_template", "{{ 1 }}"),
        ("/v1/chat/completions", CHAT, "continue_final_message", True),
        ("/v1/chat/completions", CHAT, "documents", [{"text": "a"}]),
        ("/v1/chat/completions", CHAT, "reasoning_effort", "none"),
        ("/v1/chat/completions", CHAT, "thinking_token_budget", 0),
        ("/v1/chat/completions", CHAT, "add_special_tokens", True),
        ("/v1/chat/completions", CHAT, "include_reasoning", False),
        ("/v1/chat/completions", CHAT, "parallel_tool_calls", False),
        ("/v1/completions", COMPLETION, "repetition_detection", {"max_pattern_size": 3}),
        ("/v1/completions", COMPLETION, "logprob_token_ids", [1]),
        ("/v1/completions", COMPLETION, "prompt_embeds", "AAAA"),
        ("/v1/completions", COMPLETION, "add_special_tokens", False),
        ("/inference/v1/generate", {"token_ids": [5]}, "output_mode", "text"),
        ("/generate", {"input_ids": [5]}, "logprob_start_len", 0),
        ("/generate", {"input_ids": [5]}, "logprob_start_len", [-1, 0]),
        ("/generate", {"input_ids": [5]}, "custom_logit_processor", "x"),
    ],
)
async def test_field_that_changes_the_answer_is_refused_by_name(
    tmp_path: Path, path: str, body: dict[str, Any], name: str, value: object
) -> None:
    async with foreign(tmp_path) as served:
        if name == "add_special_tokens" and path == "/v1/completions":
            body = {"prompt": "ab", "max_tokens": 1}
        _, problem = await served.refused(path, {**body, name: value})
    assert problem["errors"][0]["location"] == name
    assert served.engine.submitted == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_null_is_accepted_where_vllm_accepts_it(tmp_path: Path, path: str) -> None:
    """Clients generated from vLLM's models send every field."""
    model, body = {
        "/v1/chat/completions": (ChatCompletionRequest, CHAT),
        "/v1/completions": (CompletionRequest, COMPLETION),
    }[path]
    nullable = {
        name: None
        for name, field in model.model_fields.items()
        if type(None) in getattr(field.annotation, "__args__", ()) and name not in body
    }
    assert len(nullable) > 20
    async with foreign(tmp_path) as served:
        await served.post(path, {**body, **nullable})


async def test_reasoning_of_earlier_turns_reaches_the_template(tmp_path: Path) -> None:
    """vLLM's renderer reads `reasoning` alone, and sets both for the template."""
    for name in ("reasoning", "reasoning_content"):
        turn = ChatMessage.model_validate({"role": "assistant", "content": "b", name: "why"})
        assert turn.to_template_message()["reasoning"] == "why"
