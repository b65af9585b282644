"""Sampling fields of other servers' request bodies, and their conversion to native parameters.

All spellings are served on all routes: no name has two meanings. Bounds are those of the native
parameters.
"""

import json
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, ValidationError

from coppice.wire.base import TokenIds
from coppice.wire.rollouts import MAX_SAMPLES_PER_GROUP
from coppice.wire.sampling import Sampling
from service.compat.bodies import Flag, SamplingBody
from service.errors import InvalidRequest
from service.http.bodies import fault

NATIVE_NAMES = (
    *("temperature", "top_p", "min_p", "stop_token_ids", "ignore_eos", "skip_special_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "allowed_token_ids", "bad_words"),
)
"""Fields with the name and the meaning of the native parameter; null is the default."""
ANY_JSON = "$$ANY$$"
"""Value of SGLang's `json_schema` for any JSON object."""
TEXT_FORMATS = ("response_format", "text.format", "output_config.format")
"""Constraints of the text of a message, which one with a forced tool call does not have."""

NumSamples = Annotated[
    int,
    Field(ge=1, le=MAX_SAMPLES_PER_GROUP),
    BeforeValidator(lambda value: 1 if value is None else value),
]
Strings = str | Annotated[list[str], Field(max_length=64)]


class SamplingFields(SamplingBody):
    """Sampling parameters that have the same names in all APIs, unlike the token limit.

    `response_format`, `structured_outputs`, the fields `guided_*`, and SGLang's `json_schema`,
    `regex`, `ebnf` and `structural_tag` constrain the text; at most one of them may be set.
    As in vLLM, the constraint of a chat begins after the reasoning.
    """

    is_chat: ClassVar[bool] = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[str], Field(max_length=64)] | None = None
    min_tokens: int | None = None
    min_new_tokens: int | None = None
    stop: Strings | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: Flag = False
    no_stop_trim: Flag = False
    skip_special_tokens: bool | None = None
    ignore_eos: Flag = False
    seed: int | None = None
    n: NumSamples = 1
    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None

    def sampling(self, max_tokens: int | None) -> Sampling:
        """Convert to native sampling parameters: those that the request has set.

        `top_k` -1 and 0 both disable top-k.
        """
        given = {
            **{name: getattr(self, name) for name in NATIVE_NAMES},
            "ignore_eos": self._flag("ignore_eos"),
            "max_tokens": max_tokens,
            "min_tokens": self.min_tokens
            or (self.min_tokens if self.min_new_tokens is None else self.min_new_tokens),
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "stop": self._stop(),
            "include_stop_str_in_output": self._flag("include_stop_str_in_output", "no_stop_trim"),
            "structured_outputs": self._constraint(),
        }
        found = {name: value for name, value in given.items() if value is not None}
        try:
            return Sampling.model_validate(found)
        except ValidationError as error:
            raise fault(error) from error

    def _flag(self, *names: str) -> bool | None:
        """True if one of the fields is true; None if the request has set none of them."""
        values = [getattr(self, name) for name in names if name in self.model_fields_set]
        return any(values) if values else None

    def _stop(self) -> list[str] | None:
        if isinstance(self.stop, str):
            return [self.stop] if self.stop else []
        return None if self.stop is None else list(self.stop)

    def _constraint(self) -> dict[str, Any] | None:
        """Native `structured_outputs` of the one field that constrains the text."""
        found = {name: value for name, value in self._constraints().items() if value}
        if "tool_choice" in found:  # as in vLLM; the message has no text that has the format
            found = {name: value for name, value in found.items() if name not in TEXT_FORMATS}
        if len(found) > 1:
            first, second, *_ = found
            raise InvalidRequest.of_parameter(second, f"cannot be combined with {first}")
        name, constraint = next(iter(found.items()), ("", None))
        if constraint is not None and self.is_chat and name != "tool_choice":
            return {"enable_in_reasoning": False, **constraint}
        return constraint

    def _constraints(self) -> dict[str, dict[str, Any] | None]:
        return {
            "structured_outputs": _without_unset(self.structured_outputs),
            "response_format": _response_format(self.response_format),
            "guided_json": _kind("json", self.guided_json),
            "guided_regex": _kind("regex", self.guided_regex),
            "guided_choice": _kind("choice", self.guided_choice),
            "guided_grammar": _kind("grammar", self.guided_grammar),
            "json_schema": _kind("json_object", True)
            if self.json_schema == ANY_JSON
            else _kind("json", self.json_schema),
            "regex": _kind("regex", self.regex),
            "ebnf": _kind("grammar", self.ebnf),
            "structural_tag": _kind("structural_tag", self.structural_tag),
        }


def _kind(name: str, value: object) -> dict[str, Any] | None:
    """Constraint of one kind; SGLang's clients send empty strings for none."""
    return {name: value} if value or value == {} else None


def _without_unset(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """vLLM's `structured_outputs` without the kinds that its clients send as null or false."""
    return {
        name: value
        for name, value in (given or {}).items()
        if value is not None and (value is not False or name == "enable_in_reasoning")
    }


def _response_format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """Constraint of OpenAI's `response_format`."""
    match given or {"type": "text"}:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"json": schema}
        case {"type": "structural_tag"}:
            return {"structural_tag": json.dumps(given)}
    raise InvalidRequest.of_parameter(
        "response_format",
        "type must be text, json_object, json_schema with json_schema.schema, or structural_tag",
    )
