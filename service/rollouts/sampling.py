"""Conversion of sampling parameters to the engine's, and parsing of a response as a message."""

import json
from collections.abc import Sequence
from dataclasses import replace

from coppice.wire import sampling as wire
from coppice.wire.chat import ParsedMessage, ParsedToolCall
from engine.errors import ChecksUnavailable, SamplingRefused
from engine.protocol.generation import Generation
from engine.types.samples import Sampling, StructuredOutputs
from service.errors import InvalidRequest, Overloaded
from service.fair_threads import RETRY_SECONDS, client_name, queue_errors
from service.rollouts.groups.options import GroupOptions

DEFAULT = wire.Sampling()


def to_engine_sampling(wanted: wire.Sampling, room: int) -> Sampling:
    """Sampling parameters for the engine; `room` is the number of tokens that fit the context."""
    max_tokens = min(wanted.max_tokens or room, room)
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=min(wanted.min_tokens, max_tokens),
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        top_k=wanted.top_k,
        min_p=wanted.min_p,
        presence_penalty=wanted.presence_penalty,
        frequency_penalty=wanted.frequency_penalty,
        repetition_penalty=wanted.repetition_penalty,
        logit_bias={int(token): bias for token, bias in wanted.logit_bias.items()},
        allowed_token_ids=_as_tuple(wanted.allowed_token_ids),
        bad_words=tuple(wanted.bad_words),
        structured_outputs=_structured_outputs(wanted.structured_outputs),
        stop=tuple(wanted.stop),
        stop_token_ids=tuple(wanted.stop_token_ids),
        include_stop_str_in_output=wanted.include_stop_str_in_output,
        skip_special_tokens=wanted.skip_special_tokens,
        ignore_eos=wanted.ignore_eos,
    )


def limited(sampling: Sampling, room: int) -> Sampling:
    """The same parameters with at most `room` tokens; everything else is shared."""
    max_tokens = min(sampling.max_tokens, room)
    return replace(sampling, max_tokens=max_tokens, min_tokens=min(sampling.min_tokens, max_tokens))


async def check_sampling(engine: Generation, wanted: wire.Sampling) -> None:
    """Refuse parameters that the engine cannot apply, before anything is submitted."""
    if wanted == DEFAULT:
        return
    sampling = to_engine_sampling(wanted, engine.info.max_context_tokens)
    try:
        with queue_errors():
            await engine.check_sampling(sampling, client_name("grammars"))
    except SamplingRefused as error:
        raise InvalidRequest.of_parameter(f"sampling.{error.field}", str(error)) from error
    except ChecksUnavailable as error:
        raise Overloaded(str(error), retry_after_seconds=RETRY_SECONDS) from error


def _as_tuple(token_ids: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if token_ids is None else tuple(token_ids)


def _structured_outputs(wanted: wire.StructuredOutputs | None) -> StructuredOutputs | None:
    if wanted is None:
        return None
    schema = wanted.json_schema
    return StructuredOutputs(
        json=json.dumps(schema) if isinstance(schema, dict) else schema,
        regex=wanted.regex,
        choice=None if wanted.choice is None else tuple(wanted.choice),
        grammar=wanted.grammar,
        json_object=wanted.json_object,
        structural_tag=wanted.structural_tag,
        enable_in_reasoning=wanted.enable_in_reasoning,
    )


async def parsed_message(
    options: GroupOptions, token_ids: list[int], stop_reason: int | str | None
) -> ParsedMessage | None:
    """A response to messages, split by the engine's parsers, if it was requested."""
    if options.parse is None:
        return None
    found = await options.parse(token_ids, stop_reason, options.sampling)
    calls = [
        ParsedToolCall(id=call.id, name=call.name, arguments=call.arguments)
        for call in found.tool_calls
    ]
    return ParsedMessage(
        content=found.content, reasoning=found.reasoning, tool_calls=calls, parsed=found.parsed
    )
