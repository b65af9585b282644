"""Generators of requests, one per wire."""

from random import Random
from typing import Any

from tests.compat.generated_requests import (
    BROKEN_CONSTRAINTS,
    BROKEN_PROMPT_OPTIONS,
    BROKEN_SAMPLING,
    CALL,
    CONSTRAINTS,
    CONTEXT_TOKENS,
    FUNCTION,
    IMAGE,
    LONG,
    MODEL,
    NO_THINKING,
    PROMPT_OPTIONS,
    SAMPLING,
    SCHEMA,
    SEVERAL,
    STOPS,
    Draw,
    Fields,
    GeneratedRequest,
    always,
    build,
    chat_tool,
    one_of,
    question,
    streamed,
    token_ids,
    without,
)

TOOL = chat_tool()
RESPONSES_TOOL = {"type": "function", **FUNCTION, "strict": True}


def _user(draw: Random) -> dict[str, Any]:
    text = question(draw)
    parts = [{"type": "text", "text": text}]
    return {"role": "user", "content": draw.choice([text, text, parts])}


def _chat_messages(draw: Random) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    turns: list[list[dict[str, Any]]] = [
        [],
        [],
        [{"role": "system", "content": "Be brief."}],
        [{"role": "developer", "content": "Be brief."}],
        [_user(draw), {"role": "assistant", "content": "3", "name": "bot"}],
        [_user(draw), {"role": "assistant", "content": "3", "reasoning_content": "hm"}],
        [
            _user(draw),
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "3", "tool_call_id": "c1"},
        ],
    ]
    return [*draw.choice(turns), _user(draw)]


_BROKEN_MESSAGES: tuple[Any, ...] = (
    [],
    None,
    "hello",
    [{}],
    [{"role": "user"}],
    [{"role": "nobody", "content": "x"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": LONG}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]}],
    [{"role": "user", "content": [{"type": "unknown"}]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}],
    [{"role": "tool", "content": "x"}],
    [{"role": "user", "content": ""}],
)
_TOOLS: tuple[Draw, ...] = (
    one_of("tools", [TOOL], [], None),
    always(tools=[TOOL], tool_choice="auto"),
    always(tools=[TOOL], tool_choice="none"),
    always(tools=[TOOL], tool_choice="required", max_tokens=80, **NO_THINKING),
    always(
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "add"}},
        max_tokens=80,
        **NO_THINKING,
    ),
    always(
        tools=[TOOL],
        tool_choice="auto",
        structured_outputs={"choice": [CALL]},
        max_tokens=200,
        **NO_THINKING,
    ),
    always(tools=[TOOL], parallel_tool_calls=False),
)
CHAT: tuple[Draw, ...] = (
    *(*SAMPLING, *PROMPT_OPTIONS, *CONSTRAINTS, *_TOOLS, *_TOOLS),
    lambda draw: {"logprobs": True, "top_logprobs": draw.choice([0, 1, 3, 20, None])},
    one_of("logprobs", True, False, None),
    always(logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True),
    always(logprobs=True, top_logprobs=2, **SEVERAL),
    one_of("max_completion_tokens", 3, 30),
    one_of("echo", True),
    always(echo=True, add_generation_prompt=False, continue_final_message=True),
    always(add_generation_prompt=False, continue_final_message=True),
    one_of("add_generation_prompt", False),
    one_of("chat_template_kwargs", {"enable_thinking": False}, {"unknown": 1}, {}),
    always(**NO_THINKING),
    always(**NO_THINKING),
    one_of("reasoning_effort", "none", "low", "high", None),
    one_of("include_reasoning", False),
    one_of("return_prompt_text", True),
    one_of("documents", [{"title": "a", "text": "b"}]),
)
_BROKEN_CHAT: tuple[Draw, ...] = (
    *(*BROKEN_SAMPLING, *BROKEN_PROMPT_OPTIONS, *BROKEN_CONSTRAINTS),
    *[one_of("messages", *_BROKEN_MESSAGES)] * 6,
    without("messages"),
    one_of("top_logprobs", 3, -1, 1000, "x"),
    always(logprobs=True, top_logprobs=-2),
    always(logprobs=True, top_logprobs=21),
    one_of("tool_choice", "auto", "required", "any", {"type": "function"}, 5),
    always(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "other"}}),
    one_of("tools", [{}], [{"type": "function"}], "x", [{"type": "other", "function": FUNCTION}]),
    always(add_generation_prompt=True, continue_final_message=True),
    one_of("chat_template_kwargs", {"tokenize": False}, {"chat_template": "x"}, 5),
    one_of("chat_template", "{{ messages[0].content }}"),
    one_of("reasoning_effort", "extreme"),
    one_of("mm_processor_kwargs", {"a": 1}),
    one_of("logprobs", 3, "x"),
)


def chat(draw: Random) -> GeneratedRequest:
    base: Fields = {
        "model": MODEL,
        "messages": _chat_messages(draw),
        "temperature": 0,
        "max_tokens": 20,
        **streamed(draw),
    }
    return build(draw, "/v1/chat/completions", base, CHAT, _BROKEN_CHAT)


def _prompts(draw: Random) -> Any:
    text = f"{question(draw)}\n"
    return draw.choice(
        [text, [text], [text, f"{question(draw)}\n"], token_ids(draw), [token_ids(draw)] * 2]
    )


COMPLETIONS: tuple[Draw, ...] = (
    *(*SAMPLING, *PROMPT_OPTIONS, *CONSTRAINTS),
    one_of("logprobs", 0, 1, 3, 20, None),
    lambda draw: {"logprobs": draw.choice([0, 2]), "echo": True},
    one_of("echo", True, False),
    always(echo=True, max_tokens=0),
    always(echo=True, max_tokens=0, logprobs=1),
    always(echo=True, **SEVERAL),
    always(logprobs=1, return_tokens_as_token_ids=True),
    always(logprobs=1, **SEVERAL),
    one_of("suffix", None, ""),
    one_of("return_token_offsets", True),
)
_BROKEN_COMPLETIONS: tuple[Draw, ...] = (
    *(*BROKEN_SAMPLING, *BROKEN_PROMPT_OPTIONS, *BROKEN_CONSTRAINTS),
    *[one_of("prompt", "", [], [[]], [""], None, 5, [["a"]], [1, "a"], [-1], [9999], LONG, [LONG])]
    * 4,
    one_of("prompt", [5] * CONTEXT_TOKENS, [5] * (CONTEXT_TOKENS - 1), [2**70], {"a": 1}),
    without("prompt"),
    one_of("logprobs", -2, -1, 21, "x", True),
    one_of("suffix", "x"),
    one_of("echo", "x", None),
    one_of("prompt_embeds", "eA==", "x"),
    always(echo=True, logprobs=1, stream=True),
)


def completions(draw: Random) -> GeneratedRequest:
    base: Fields = {
        "model": MODEL,
        "prompt": _prompts(draw),
        "temperature": 0,
        "max_tokens": 20,
        **streamed(draw),
    }
    return build(draw, "/v1/completions", base, COMPLETIONS, _BROKEN_COMPLETIONS)


def _responses_input(draw: Random) -> Any:
    text = question(draw)
    user = {"role": "user", "content": text}
    parts = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "3"}
    reasoning = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
    }
    message = {
        "type": "message",
        "role": "assistant",
        "id": "msg_1",
        "status": "completed",
        "content": [{"type": "output_text", "text": "3", "annotations": []}],
    }
    return draw.choice(
        [
            text,
            [user],
            [parts],
            [{"role": "developer", "content": "Be brief."}, user],
            [{"role": "system", "content": "Be brief."}, user],
            [user, call, result, user],
            [user, reasoning, message, user],
            [user, {"role": "assistant", "content": "3"}, user],
        ]
    )


_RESPONSES: tuple[Draw, ...] = (
    *STOPS,
    one_of("instructions", "Be brief.", None),
    one_of("max_output_tokens", 1, 10, 40, None),
    one_of("metadata", {"a": "b"}, {}, None),
    one_of("parallel_tool_calls", False, None),
    one_of("tools", [RESPONSES_TOOL], []),
    always(tools=[RESPONSES_TOOL], tool_choice="required", max_output_tokens=80, **NO_THINKING),
    always(
        tools=[RESPONSES_TOOL],
        tool_choice={"type": "function", "name": "add"},
        max_output_tokens=80,
        **NO_THINKING,
    ),
    always(
        tools=[RESPONSES_TOOL],
        structured_outputs={"choice": [CALL]},
        max_output_tokens=200,
        **NO_THINKING,
    ),
    always(tools=[RESPONSES_TOOL], tool_choice="none"),
    one_of("text", {"format": {"type": "text"}}, {"verbosity": "low"}, None),
    always(
        text={"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}},
        **NO_THINKING,
    ),
    one_of("structured_outputs", {"regex": "[0-9]{3}"}, {"choice": ["yes", "no"]}),
    always(include=["message.output_text.logprobs"], top_logprobs=2, **NO_THINKING),
    always(include=["message.output_text.logprobs"], **NO_THINKING),
    one_of("include", ["reasoning.encrypted_content"], None),
    one_of("reasoning", {"effort": "low"}, {"effort": "none"}, {"summary": "auto"}, None),
    one_of("include_reasoning", False),
    one_of("store", True, False, None),
    one_of("service_tier", "auto", "default", "flex"),
    one_of("truncation", "auto", "disabled", None),
    one_of("user", "someone"),
    one_of("prompt_cache_key", "x"),
    one_of("max_tool_calls", 3),
    one_of("presence_penalty", 0.5),
    one_of("frequency_penalty", 0.5),
    one_of("repetition_penalty", 1.1),
    one_of("logit_bias", {"30": -100}),
    one_of("seed", 3),
    one_of("top_p", 0.5),
    one_of("top_k", 3),
    one_of("enable_response_messages", True),
    one_of("chat_template_kwargs", {"enable_thinking": False}, {}),
    always(**NO_THINKING),
    always(**NO_THINKING),
    always(something_unknown=1),
)
_BROKEN_RESPONSES: tuple[Draw, ...] = (
    *[
        one_of(
            "input",
            *("", [], None, 5, LONG, [{}], [{"role": "user"}], [{"role": "x", "content": "y"}]),
            [{"type": "unknown"}],
            [{"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]}],
            [{"role": "user", "content": [{"type": "input_file", "file_data": "x"}]}],
            [{"type": "function_call_output", "call_id": "c", "output": 5}],
            [{"type": "item_reference", "id": "x"}],
        )
    ]
    * 4,
    without("input"),
    one_of("model", "unknown", "", 5, None),
    one_of("temperature", -1, 3, "x"),
    one_of("top_p", 0, 2),
    one_of("presence_penalty", 3),
    one_of("max_output_tokens", 0, -1, 5000, "x"),
    one_of("top_logprobs", 3, -1, 21, "x"),
    always(include=["message.output_text.logprobs"], top_logprobs=21),
    one_of("tools", [{}], [{"type": "web_search"}], [{"type": "function"}], "x"),
    one_of("tool_choice", "required", "any", {"type": "function", "name": "other"}, 5),
    one_of("previous_response_id", "resp_unknown", "x", 5),
    one_of("prompt", {"id": "x"}),
    one_of("text", {"format": {"type": "xml"}}, 5, {"format": {"type": "json_schema"}}),
    one_of("reasoning", {"effort": "extreme"}, 5),
    one_of("structured_outputs", {}, {"regex": "("}, {"regex": "a", "choice": ["b"]}),
    one_of("include", ["unknown"], "x"),
    one_of("truncation", "x"),
    one_of("service_tier", "x"),
    one_of("stop", [""], 5),
    one_of("stop_token_ids", [9999]),
    one_of("metadata", {"a": 1}, 5),
    one_of("previous_input_messages", [{"role": "user", "content": "x"}]),
    always(background=True, store=False),
    always(stream="x"),
)


def responses(draw: Random) -> GeneratedRequest:
    base: Fields = {
        "model": MODEL,
        "input": _responses_input(draw),
        "temperature": 0,
        "max_output_tokens": 20,
        "stream": draw.random() < 0.5,
    }
    return build(draw, "/v1/responses", base, _RESPONSES, _BROKEN_RESPONSES)
