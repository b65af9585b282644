"""Every request field of vLLM and SGLang: supported, refused, dropped, or without effect here.

A field added by a newer vLLM is in none of these tables and fails the test until its treatment is
decided.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from anthropic.types.beta.message_create_params import (
    MessageCreateParamsBase as BetaMessageCreateParams,
)
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsBase
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from openai.types.completion_create_params import (
    CompletionCreateParamsBase as CompletionParams,
)
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from pydantic import BaseModel
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
)
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from vllm.renderers.chat_utils import CustomChatCompletionMessageParam
from vllm.sampling_params import SamplingParams

from service.compat.anthropic.bodies import CountTokensBody, MessagesBody
from service.compat.bodies import CompatModel
from service.compat.openai.chat import ChatBody, ChatMessage
from service.compat.openai.completions import CompletionBody
from service.compat.responses.bodies import ResponsesBody
from service.compat.sglang.generate import SglangBody, SglangSampling
from service.compat.unsupported_fields import NEUTRAL, REFUSED
from service.compat.vllm.tokens import DetokenizeBody, GenerateBody, GenerateSampling, TokenizeBody
from tests.compat.test_sampling_fields import VALUES
from tests.compat.third_party import foreign

pytestmark = pytest.mark.slow

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

# entrypoints/openai/protocol.py of SGLang at 004c82e07d.
SGLANG_COMPLETION = """
    model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty
    seed stop stream stream_options suffix temperature top_p user return_hidden_states
    return_routed_experts routed_experts_start_len return_cached_tokens_details return_token_ids
    top_k min_p min_tokens json_schema regex ebnf repetition_penalty stop_token_ids stop_regex
    no_stop_trim ignore_eos skip_special_tokens lora_path session_id session_params response_format
    custom_params custom_logit_processor images_config bootstrap_host bootstrap_port bootstrap_room
    routed_dp_rank disagg_prefill_dp_rank data_parallel_rank rid extra_key cache_salt
    ngram_corpus_id priority custom_labels
"""
SGLANG_CHAT = """
    messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens
    max_completion_tokens n presence_penalty response_format seed stop stream stream_options
    temperature top_p user tools tool_choice parallel_tool_calls return_hidden_states
    return_routed_experts routed_experts_start_len return_cached_tokens_details
    return_prompt_token_ids return_token_ids return_meta_info reasoning_effort reasoning task top_k
    min_p min_tokens regex ebnf repetition_penalty stop_token_ids stop_regex no_stop_trim ignore_eos
    continue_final_message skip_special_tokens lora_path session_id session_params
    separate_reasoning stream_reasoning chat_template_kwargs max_dynamic_patch min_dynamic_patch
    use_audio_in_video images_config custom_logit_processor custom_params input_ids rid extra_key
    cache_salt ngram_corpus_id priority bootstrap_host bootstrap_port bootstrap_room routed_dp_rank
    disagg_prefill_dp_rank data_parallel_rank
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
    "sglang completion": (SGLANG_COMPLETION.split(), CompletionBody),
    "sglang chat": (SGLANG_CHAT.split(), ChatBody),
    "openai chat": (CompletionCreateParamsBase.__annotations__, ChatBody),
    "openai completion": (CompletionParams.__annotations__, CompletionBody),
    "responses": (ResponsesRequest.model_fields, ResponsesBody),
    "openai responses": (ResponseCreateParamsBase.__annotations__, ResponsesBody),
    "messages": (AnthropicMessagesRequest.model_fields, MessagesBody),
    "anthropic messages": (MessageCreateParamsBase.__annotations__, MessagesBody),
    # `betas` is a header.
    "anthropic beta messages": (
        BetaMessageCreateParams.__annotations__.keys() - {"betas"},
        MessagesBody,
    ),
    "count tokens": (AnthropicCountTokensRequest.model_fields, CountTokensBody),
    "anthropic count tokens": (MessageCountTokensParams.__annotations__, CountTokensBody),
    "sglang sampling": (SGLANG_SAMPLING.split(), SglangSampling),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_every_field_of_other_servers_is_in_a_table(name: str) -> None:
    theirs, ours = REQUESTS[name]
    of_route = ours.refused if issubclass(ours, CompatModel) else {}
    assert set(theirs) - {*ours.model_fields, *REFUSED, *NEUTRAL, *of_route} == set()


def test_every_sampling_field_of_vllm_is_tried_on_every_route() -> None:
    assert VALUES.keys() == set(REQUESTS["generate sampling"][0])


def test_no_field_is_both_neutral_and_refused() -> None:
    assert not REFUSED.keys() & NEUTRAL.keys()


# Of earlier versions of vLLM, or sent by its clients.
EARLIER = {
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend"),
    *("guided_whitespace_pattern", "length_penalty", "logits_processors", "typical_p"),
    *("best_of", "extra_args", "top_logprobs_num", "content_parts", "max_thinking_tokens"),
}


def test_every_table_names_existing_fields() -> None:
    theirs = {field for fields, _ in REQUESTS.values() for field in fields}
    assert NEUTRAL.keys() - theirs - EARLIER == {"client_metadata"}, "of the Codex CLI"
    assert REFUSED.keys() - theirs - EARLIER == {"extra_body"}, (
        "of no server: rLLM's gateway adds it"
    )


COMPLETION: dict[str, Any] = {"prompt": [5], "max_tokens": 1}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "body", "name", "value"),
    [
        ("/v1/chat/completions", CHAT, "chat_template", "{{ 1 }}"),
        ("/v1/chat/completions", CHAT, "input_ids", [1]),
        ("/v1/chat/completions", CHAT, "lora_path", "a"),
        ("/v1/chat/completions", CHAT, "no_such_field", 0),
        ("/v1/completions", COMPLETION, "temprature", 0.5),
        ("/generate", {"input_ids": [5]}, "no_such_field", True),
        ("/v1/chat/completions", CHAT, "documents", [{"text": "a"}]),
        ("/v1/chat/completions", CHAT, "thinking_token_budget", 0),
        ("/v1/chat/completions", CHAT, "add_special_tokens", True),
        ("/v1/chat/completions", CHAT, "include_reasoning", False),
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
