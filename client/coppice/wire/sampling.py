"""Wire types of sampling: distribution, constraints and stop conditions."""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from coppice.wire.base import MAX_TOKENS, JsonInteger, RequestModel, TokenIds

MAX_GRAMMAR_CHARS = 2**16
"""Limit of the characters of a schema, grammar or structural tag, and of all choices together."""
MAX_JSON_DEPTH = 64
"""Limit of nested objects and arrays in a JSON schema, as in vLLM."""
MAX_STOP_TOKEN_IDS_WITH_MIN_TOKENS = 112
"""vLLM's GPU sampler masks at most 128 stop tokens, end-of-sequence tokens included."""

StopString = Annotated[str, Field(min_length=1, max_length=512)]
Grammar = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
Choice = Annotated[str, Field(min_length=1, max_length=4096)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]


def _check_schema(schema: dict[str, Any]) -> None:
    """Check the size of a JSON schema: characters, and levels of objects and arrays.

    Every value has at least one character, so a schema with too many values or with long strings
    is rejected before all of it is read.
    """
    level: list[Any] = [schema]
    num_chars = 0
    for _ in range(MAX_JSON_DEPTH):
        num_chars += sum(map(len, level))
        _check_num_chars(num_chars)
        keys = [key for node in level if isinstance(node, dict) for key in node]
        members = [m for node in level for m in (node.values() if isinstance(node, dict) else node)]
        num_chars += sum(len(text) for text in (*keys, *members) if isinstance(text, str))
        _check_num_chars(num_chars)
        level = [member for member in members if isinstance(member, dict | list)]
    if level:
        raise ValueError(f"objects and arrays may nest at most {MAX_JSON_DEPTH} levels")
    _check_num_chars(len(json.dumps(schema)))


def _check_num_chars(num_chars: int) -> None:
    if num_chars > MAX_GRAMMAR_CHARS:
        raise ValueError(f"the limit is {MAX_GRAMMAR_CHARS} characters of JSON")


def _check_total_chars(choices: list[str]) -> list[str]:
    if sum(map(len, choices)) > MAX_GRAMMAR_CHARS:
        raise ValueError(f"the choices may have at most {MAX_GRAMMAR_CHARS} characters in total")
    return choices


def _keys_as_text(bias: object) -> object:
    """Token ids as JSON keys, which are strings; Python callers may give integers."""
    if not isinstance(bias, Mapping):
        return bias
    return {str(key) if type(key) is int else key: value for key, value in bias.items()}


_TOKEN_KEY = re.compile("0|[1-9][0-9]{0,8}")


def _check_token_keys(bias: dict[str, float]) -> dict[str, float]:
    if not all(_TOKEN_KEY.fullmatch(key) for key in bias):
        raise ValueError("the keys must be token ids")
    return bias


class StructuredOutputs(RequestModel):
    """Constraint on the text of a response, as exactly one kind. Names are those of vLLM.

    Every sampled token keeps the response a prefix of a text that satisfies the constraint, and
    the response ends with it. Unless `enable_in_reasoning`, this holds after the reasoning.
    """

    model_config = ConfigDict(serialize_by_alias=True)

    json_schema: Grammar | dict[str, Any] | None = Field(default=None, alias="json")
    regex: Annotated[str, Field(max_length=8192)] | None = None
    choice: (
        Annotated[
            list[Choice],
            Field(min_length=1, max_length=1024, fail_fast=True),
            AfterValidator(_check_total_chars),
        ]
        | None
    ) = None
    grammar: Grammar | None = None
    json_object: bool | None = None
    structural_tag: Grammar | None = None
    enable_in_reasoning: bool = True

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        kinds = (self.json_schema, self.regex, self.choice, self.grammar, self.structural_tag)
        if sum(kind is not None for kind in kinds) + (self.json_object is not None) != 1:
            raise ValueError(
                "give exactly one of json, regex, choice, grammar, json_object and structural_tag"
            )
        if self.json_object is False:
            raise ValueError("json_object must be true")
        if isinstance(self.json_schema, dict):
            _check_schema(self.json_schema)
        return self


class Sampling(RequestModel):
    """Sampling distribution and stop conditions. Names are those of vLLM's SamplingParams.

    The returned logprobs are those of the distribution that is sampled: after penalties, biases,
    masks, temperature and truncation. At temperature 0 sampling is greedy, and logprobs are those
    at temperature 1 without top_p, top_k and min_p.
    """

    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS), JsonInteger()] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS), JsonInteger()] = 0
    temperature: Annotated[float, Field(ge=0.0, le=2.0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1), JsonInteger()] = 0
    min_p: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100.0, allow_inf_nan=False)] = 1.0
    logit_bias: Annotated[
        dict[str, Bias],
        Field(max_length=1024),
        BeforeValidator(_keys_as_text),
        AfterValidator(_check_token_keys),
    ] = {}
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1, max_length=1024)] | None = None
    bad_words: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=128)]], Field(max_length=64)
    ] = []
    structured_outputs: StructuredOutputs | None = None
    stop: Annotated[list[StopString], Field(max_length=64)] = []
    stop_token_ids: Annotated[TokenIds, Field(max_length=256)] = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError("min_tokens must not exceed max_tokens")
        if self.min_tokens and len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS_WITH_MIN_TOKENS:
            raise ValueError(
                f"with min_tokens, at most {MAX_STOP_TOKEN_IDS_WITH_MIN_TOKENS} stop_token_ids"
            )
        return self
