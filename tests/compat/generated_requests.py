"""Random requests of OpenAI's, Anthropic's and vLLM's APIs, valid ones and broken ones.

The samples are greedy, or have one candidate per token, so that two servers can be compared. The
prompts are those that the bundled model has learnt, so that its maxima are clear.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

MODEL = "seedling"
CONTEXT_TOKENS = 1024
BROKEN = 0.3
"""Part of the requests that have a broken field."""
SEVERAL = {"temperature": 1.0, "top_k": 1, "n": 2}
"""Two samples: greedy ones can be only one."""

Fields = dict[str, Any]
REMOVED = object()
Draw = Callable[[Random], Fields]


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedRequest:
    path: str
    body: Fields


def question(draw: Random) -> str:
    return f"Compute {draw.randint(10, 49)}+{draw.randint(10, 49)}."


def one_of(name: str, *values: Any) -> Draw:
    """A field with one of the values."""
    return lambda draw: {name: draw.choice(values)}


def always(**fields: Any) -> Draw:
    return lambda draw: fields


SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["answer"],
    "additionalProperties": False,
}
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": true, "b": "x"}}\n</tool_call>'
IMAGE = "data:image/png;base64,iVBORw0KGgo="

LONG = "Compute 1+1. " * 200
NO_THINKING: Fields = {"chat_template_kwargs": {"enable_thinking": False}}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": PARAMETERS}


def chat_tool() -> Fields:
    return {"type": "function", "function": FUNCTION}


def anthropic_tool() -> Fields:
    return {"name": "add", "description": "Adds.", "input_schema": PARAMETERS}


def token_ids(draw: Random) -> list[int]:
    """The token ids of a question of the same form as `question`."""
    digits = [draw.randint(18, 21), draw.randint(17, 26), 12, draw.randint(18, 21)]
    return [267, 222, *digits, draw.randint(17, 26), 15, 200]


STOPS: tuple[Draw, ...] = (
    one_of("stop", "=", "\n", "answer", ["wer", "="], [], None, "nothing like it"),
    lambda draw: {"stop": draw.choice(["=", "ans"]), "include_stop_str_in_output": True},
    one_of("stop_token_ids", [30], [200, 268], [], None),
    one_of("ignore_eos", True),
    one_of("skip_special_tokens", False),
    lambda draw: {"ignore_eos": True, "skip_special_tokens": False},
)
SAMPLING: tuple[Draw, ...] = (
    *STOPS,
    one_of("min_tokens", 3, 20),
    lambda draw: {"min_tokens": 12, "stop": ["="], "stop_token_ids": [30]},
    one_of("logit_bias", {"30": -100}, {"21": 100.0}, {"21": 1000.0}, {"30": -1000}, {}, None),
    one_of("bad_words", ["answer"], ["=", "+"], [], ["answ", "answ"], ["=1", "=2", "=3", "=4"]),
    one_of("allowed_token_ids", list(range(17, 31)), [18, 1], None),
    one_of("presence_penalty", 0.5, -0.5, None),
    one_of("frequency_penalty", 0.5, -0.5, 2),
    one_of("repetition_penalty", 1.1, 1, None),
    one_of("seed", 0, -1, 2**62, 2**63 - 1, -(2**63)),
    one_of("top_p", 0.5, None),
    one_of("top_k", 5, -1, 0),
    one_of("min_p", 0.1),
    one_of("spaces_between_special_tokens", False),
    one_of("user", "someone"),
    one_of("cache_salt", "salt"),
    one_of("priority", 0),
    one_of("session_id", "mine"),
    one_of("stream_interval", 1, 4),
    one_of("max_tokens", 1, 5, 300),
    one_of("use_beam_search", False),
    one_of("length_penalty", 2.0),
    one_of("watermarking", False, None),
    one_of("thinking_token_budget", -1, None),
    always(**SEVERAL),
    always(**SEVERAL, return_token_ids=True),
    always(request_id="mine"),
    always(something_unknown=1),
)
BROKEN_SAMPLING: tuple[Draw, ...] = (
    one_of("temperature", -1, 2.5, "hot", [], "0", True),
    one_of("top_p", 0, 1.5, "much"),
    one_of("top_k", -2, 1.5, "1"),
    one_of("min_p", 1.5, -0.1),
    one_of("n", 0, -1, 2, "2", 1.5, 100_000),
    one_of("max_tokens", 0, -1, 1025, 10**9, "x", 2.5, 2**70),
    one_of("stop", [""], "", 5, ["a", 1], ["x"] * 300),
    one_of("stop_token_ids", [9999], [-1], ["a"], 5, [2**70]),
    one_of("logit_bias", {"9999": 1}, {"-1": 1}, {"x": 1}, {"5": "x"}, [1], {"5": None}),
    one_of("bad_words", [""], [" "], "answer", [1], None),
    one_of("allowed_token_ids", [], [9999], [-1], "1", [0.5]),
    one_of("min_tokens", -1, 100, "x", None),
    one_of("presence_penalty", 3, -2.5, "x"),
    one_of("frequency_penalty", 3, -2.5, "x"),
    one_of("repetition_penalty", 0, -1, "x", 0.001, 1000),
    one_of("seed", 2**64, "x", 1.5),
    one_of("stream_options", {"include_usage": True}, {"include_usage": "x"}, 1, {}),
    one_of("cache_salt", "", "a/b", 5, "x" * 200),
    one_of("priority", 1, "x", 2**64),
    one_of("stream_interval", 0, "x"),
    one_of("model", "unknown", "", 5, None),
    one_of("thinking_token_budget", -2, 5, "x"),
    always(n=2, temperature=0),
    always(min_tokens=5, max_tokens=2),
)
PROMPT_OPTIONS: tuple[Draw, ...] = (
    one_of("truncate_prompt_tokens", 4, 1, -1, 900, None),
    one_of("truncation_side", "left", "right", None),
    always(truncate_prompt_tokens=5, truncation_side="right"),
    one_of("add_special_tokens", True, False),
    one_of("prompt_logprobs", 0, 1, 3, None),
    one_of("return_token_ids", True, False),
)
BROKEN_PROMPT_OPTIONS: tuple[Draw, ...] = (
    one_of("truncate_prompt_tokens", -2, 0, 2000, "x"),
    one_of("truncation_side", "middle"),
    one_of("prompt_logprobs", -2, -1, 21, 1000, "x"),
    one_of("return_token_ids", "maybe"),
    always(stream=True, prompt_logprobs=1),
)
CONSTRAINTS: tuple[Draw, ...] = (
    one_of("response_format", {"type": "text"}, None),
    always(
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
        }
    ),
    one_of(
        "structured_outputs",
        {"choice": ["yes", "no"]},
        {"regex": "[0-9]{3}"},
        {"json": SCHEMA},
        {"grammar": 'root ::= "1" "2"'},
        {"regex": "[a-c]{4}", "disable_any_whitespace": False},
    ),
)
BROKEN_CONSTRAINTS: tuple[Draw, ...] = (
    one_of(
        "response_format",
        {"type": "xml"},
        {"type": "json_schema"},
        {},
        "json",
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}},
        {"type": "structural_tag"},
        {"type": "structural_tag", "structures": [], "triggers": []},
    ),
    one_of(
        "structured_outputs",
        {},
        {"regex": "("},
        {"regex": ""},
        {"regex": "a", "choice": ["b"]},
        {"choice": []},
        {"grammar": "nonsense"},
        {"json": "{"},
        {"json": {"type": "nonsense"}},
        {"unknown": 1},
        {"json_object": False},
        {"structural_tag": "x"},
        "x",
    ),
    always(structured_outputs={"regex": "a+"}, response_format={"type": "json_object"}),
)


def build(
    draw: Random,
    path: str,
    base: Fields,
    valid: Sequence[Draw],
    broken: Sequence[Draw],
) -> GeneratedRequest:
    """A request of up to three options, and perhaps a broken one."""
    body = dict(base)
    for option in draw.sample(valid, draw.randint(0, 3)):
        body |= option(draw)
    if draw.random() < BROKEN:
        body |= draw.choice(broken)(draw)
    kept = {name: value for name, value in body.items() if value is not REMOVED}
    return GeneratedRequest(path=path, body=kept)


def streamed(draw: Random) -> Fields:
    usage = {"include_usage": True, "continuous_usage_stats": draw.random() < 0.5}
    options: Fields = draw.choice([{}, {"stream_options": usage}, {"stream_options": None}])
    return {"stream": True, **options} if draw.random() < 0.5 else {}


def without(*names: str) -> Draw:
    """Removal of fields."""
    return lambda draw: dict.fromkeys(names, REMOVED)
