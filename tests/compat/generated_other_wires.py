"""Generators of requests of Anthropic's API and of vLLM's own routes."""

from random import Random
from typing import Any

from tests.compat.generated_requests import (
    BROKEN_CONSTRAINTS,
    BROKEN_SAMPLING,
    CALL,
    CONTEXT_TOKENS,
    IMAGE,
    LONG,
    MODEL,
    NO_THINKING,
    SAMPLING,
    SCHEMA,
    SEVERAL,
    Draw,
    Fields,
    GeneratedRequest,
    always,
    anthropic_tool,
    build,
    chat_tool,
    one_of,
    question,
    streamed,
    token_ids,
    without,
)

_CALL = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": True, "b": "x"}}


def _turns(draw: Random) -> list[dict[str, Any]]:
    text = question(draw)
    blocks = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]
    user = {"role": "user", "content": draw.choice([text, text, blocks])}
    thinking = {"type": "thinking", "thinking": "hm", "signature": "x"}
    parts = [{"type": "text", "text": "3"}]
    result = {"type": "tool_result", "tool_use_id": "c1", "content": draw.choice(["3", parts])}
    earlier: list[list[dict[str, Any]]] = [
        [],
        [],
        [user, {"role": "assistant", "content": "3"}],
        [user, {"role": "assistant", "content": [thinking, *parts]}],
        [user, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}],
        [{"role": "system", "content": "Be brief."}],
        [
            user,
            {"role": "assistant", "content": [_CALL]},
            {"role": "user", "content": [result, {"type": "text", "text": "Thanks."}]},
        ],
    ]
    return [*draw.choice(earlier), user]


_PROMPT: tuple[Draw, ...] = (
    one_of("system", "Be brief.", [{"type": "text", "text": "Be brief."}], None),
    one_of("tools", [anthropic_tool()], [], None),
    always(tools=[anthropic_tool()], tool_choice={"type": "auto"}),
    always(tools=[anthropic_tool()], tool_choice={"type": "none"}),
    one_of("thinking", {"type": "disabled"}, {"type": "adaptive"}, None),
    one_of("output_config", {"effort": "low"}, {"effort": "max"}, None),
    one_of("chat_template_kwargs", {"enable_thinking": False}, {"unknown": 1}),
    always(**NO_THINKING),
    always(something_unknown=1),
)
_MESSAGES: tuple[Draw, ...] = (
    *_PROMPT,
    always(tools=[anthropic_tool()], tool_choice={"type": "any"}, max_tokens=80, **NO_THINKING),
    always(
        tools=[anthropic_tool()],
        tool_choice={"type": "tool", "name": "add", "disable_parallel_tool_use": True},
        max_tokens=80,
        **NO_THINKING,
    ),
    one_of("stop_sequences", ["="], ["answer", "\n"], [], None),
    one_of("max_tokens", 1, 5, 100),
    one_of("top_p", 0.5),
    one_of("top_k", 3),
    one_of("metadata", {"user_id": "x"}),
    one_of("cache_salt", "salt"),
    always(output_config={"format": {"type": "json_schema", "schema": SCHEMA}}, **NO_THINKING),
)
_BROKEN_PROMPT: tuple[Draw, ...] = (
    *[
        one_of(
            "messages",
            *([], None, "x", [{}], [{"role": "user"}], [{"role": "tool", "content": "x"}]),
            [{"role": "user", "content": LONG}],
            [{"role": "user", "content": 5}],
            [{"role": "user", "content": [{"type": "unknown"}]}],
            [{"role": "user", "content": [{"type": "text"}]}],
            [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image",
                            "source": {"type": "base64", "media_type": "image/png", "data": "eA=="},
                        }
                    ],
                }
            ],
            [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c9"}]}],
            [{"role": "assistant", "content": "x"}],
        )
    ]
    * 3,
    without("messages"),
    one_of("model", "unknown", "", 5, None),
    one_of("system", 5, [{"type": "image"}]),
    one_of("tools", [{}], [{"name": "add"}], "x", [{"type": "web_search_20250305", "name": "x"}]),
    one_of("tool_choice", {"type": "any"}, {"type": "tool"}, {"type": "tool", "name": "x"}, "any"),
    one_of("thinking", {"type": "enabled", "budget_tokens": 2000}, {"type": "x"}, 5),
)
_BROKEN_MESSAGES: tuple[Draw, ...] = (
    *_BROKEN_PROMPT,
    one_of("max_tokens", 0, -1, 5000, "x", None),
    without("max_tokens"),
    one_of("temperature", -1, 3, "x"),
    one_of("top_p", 0, 2),
    one_of("top_k", -5, "x"),
    one_of("stop_sequences", [""], "x", [1]),
    one_of("thinking", {"type": "enabled", "budget_tokens": 10}),
    one_of("stream", "x"),
)


def messages(draw: Random) -> GeneratedRequest:
    base: Fields = {
        "model": MODEL,
        "messages": _turns(draw),
        "temperature": 0,
        "max_tokens": 20,
        "stream": draw.random() < 0.5,
    }
    return build(draw, "/v1/messages", base, _MESSAGES, _BROKEN_MESSAGES)


def count_tokens(draw: Random) -> GeneratedRequest:
    base = {"model": MODEL, "messages": _turns(draw)}
    return build(draw, "/v1/messages/count_tokens", base, _PROMPT, _BROKEN_PROMPT)


_PARAMS: tuple[Draw, ...] = (
    *(each for each in SAMPLING),
    one_of("logprobs", 0, 2, 20, None),
    one_of("prompt_logprobs", 0, 2),
    always(logprobs=1, **SEVERAL),
    one_of("structured_outputs", {"regex": "[0-9]{3}"}, {"choice": [CALL]}),
    one_of("detokenize", True, False),
    one_of("skip_clone", True),
)
_BROKEN_PARAMS: tuple[Draw, ...] = (
    *BROKEN_SAMPLING,
    *BROKEN_CONSTRAINTS,
    one_of("logprobs", -2, -1, 21, "x"),
    one_of("prompt_logprobs", -2, 21, "x"),
    one_of("trace_decode_token_ids", [5, 6]),
)
_GENERATE: tuple[Draw, ...] = (
    one_of("output_mode", "text", "tokens"),
    one_of("output_mode", "text"),
    one_of("return_token_ids", True, False),
    one_of("model", MODEL, None),
    one_of("cache_salt", "salt"),
    one_of("priority", 0),
    one_of("reasoning_ended", True, None),
    one_of("token_offsets", [[0, 1]], None),
    one_of("features", None),
    always(request_id="mine"),
    always(something_unknown=1),
)
_BROKEN_GENERATE: tuple[Draw, ...] = (
    *[one_of("token_ids", [], None, "x", [-1], [9999], [5] * CONTEXT_TOKENS, ["a"], [2**70])] * 3,
    without("token_ids"),
    without("sampling_params"),
    one_of("sampling_params", None, 5, []),
    one_of("model", "unknown", "", 5),
    one_of("output_mode", "x"),
    one_of("stream_options", {"include_usage": True}, 5),
    one_of("content_parts", [{"type": "text", "text": "x"}]),
    one_of("cache_salt", "", "a/b"),
    one_of("priority", "x"),
)


def generate(draw: Random) -> GeneratedRequest:
    params = build(draw, "", {"temperature": 0, "max_tokens": 20}, _PARAMS, _BROKEN_PARAMS).body
    base: Fields = {
        "model": MODEL,
        "token_ids": token_ids(draw),
        "sampling_params": params,
        **streamed(draw),
    }
    return build(draw, "/inference/v1/generate", base, _GENERATE, _BROKEN_GENERATE)


_TOKENIZE_CHAT = [{"role": "user", "content": "Compute 1+2."}]
_TOKENIZE: tuple[Draw, ...] = (
    one_of("add_special_tokens", True, False),
    one_of("return_token_strs", True, False, None),
    one_of("model", MODEL, None),
    without("model"),
    lambda draw: {**without("prompt")(draw), "messages": _TOKENIZE_CHAT},
    lambda draw: {
        **without("prompt")(draw),
        "messages": [*_TOKENIZE_CHAT, {"role": "assistant", "content": "3"}],
        "add_generation_prompt": False,
        "continue_final_message": draw.random() < 0.5,
    },
    lambda draw: {**without("prompt")(draw), "messages": _TOKENIZE_CHAT, "tools": [chat_tool()]},
    always(something_unknown=1),
)
_BROKEN_TOKENIZE: tuple[Draw, ...] = (
    one_of("prompt", None, 5, [1], ["x"], {}),
    without("prompt"),
    one_of("model", "unknown", "", 5),
    one_of("add_special_tokens", "x"),
    one_of("messages", [], "x", [{}], [{"role": "user", "content": 5}]),
    lambda draw: {
        **without("prompt")(draw),
        "messages": draw.choice(
            [[], "x", [{"role": "user", "content": [{"type": "image_url", "image_url": IMAGE}]}]]
        ),
    },
    lambda draw: {
        **without("prompt")(draw),
        "messages": _TOKENIZE_CHAT,
        "add_generation_prompt": True,
        "continue_final_message": True,
    },
    lambda draw: {
        **without("prompt")(draw),
        "messages": _TOKENIZE_CHAT,
        "chat_template": "{{ messages[0].content }}",
    },
)


def tokenize(draw: Random) -> GeneratedRequest:
    text = draw.choice([question(draw), "", LONG, "<|end|>x", "unit\u00e9 \U0001f600"])
    base = {"model": MODEL, "prompt": text}
    return build(draw, "/tokenize", base, _TOKENIZE, _BROKEN_TOKENIZE)


_DETOKENIZE: tuple[Draw, ...] = (
    one_of("model", MODEL, None),
    without("model"),
    always(something_unknown=1),
)
_BROKEN_DETOKENIZE: tuple[Draw, ...] = (
    one_of("tokens", None, 5, ["a"], [-1], [9999], [2**31], [2**63], [1.5], [[1]], ["5"]),
    without("tokens"),
    one_of("model", "unknown", "", 5),
)


def detokenize(draw: Random) -> GeneratedRequest:
    tokens = draw.choice([token_ids(draw), [], [1, 0, 5], [185, 200], [draw.randrange(269)]])
    base = {"model": MODEL, "tokens": tokens}
    return build(draw, "/detokenize", base, _DETOKENIZE, _BROKEN_DETOKENIZE)
