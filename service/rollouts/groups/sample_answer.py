"""Conversion of the engine's completion to the answer of a sample.

A sample that `continue_from` resumes already has tokens; its answer has these, too.
"""

import asyncio
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from coppice.wire.columns.kinds import Values
from coppice.wire.columns.kv_version_spans import KvVersionSpan
from coppice.wire.columns.logprobs import TokenLogprobs
from coppice.wire.columns.routed_experts import RoutedExperts
from coppice.wire.columns.token_columns import COLUMNS, TokenColumns, TokenLists
from coppice.wire.columns.weights_version_spans import VersionSpan
from coppice.wire.rollouts import FinishReason, SampleAnswer
from engine.types.samples import Completion, TopLogprobRows
from engine.types.samples import VersionSpan as EngineVersionSpan
from service.rollouts.groups.logprob_tables import to_table
from service.rollouts.groups.options import GroupOptions
from service.rollouts.groups.supports import support_of
from service.rollouts.sampling import parsed_message

ENCODED_IN_LOOP = 2**20
"""Bytes of supports that are encoded on the event loop, in a few milliseconds."""
ROW_BYTES = 256
"""Bytes that take about as long to encode as one more row of a support."""


async def create(
    options: GroupOptions,
    index: int,
    tokens: TokenLists,
    finish_reason: FinishReason,
    stop_reason: int | str | None,
) -> SampleAnswer:
    if finish_reason != "stop":
        stop_reason = None
    return SampleAnswer(
        **await answer_fields(tokens, SampleAnswer),
        index=index,
        text=await _text(options, tokens.token_ids, stop_reason),
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        message=await parsed_message(options, tokens.token_ids, stop_reason),
    )


async def sample_tokens(options: GroupOptions, index: int, result: Completion) -> TokenLists:
    """Tokens of a sample, after those that it already has."""
    new = await new_tokens(options, result, experts_from=experts_from(options, index))
    return TokenColumns.joined([*options.continued[index : index + 1], new])


async def new_tokens(
    options: GroupOptions, result: Completion, *, experts_from: int | None = None
) -> TokenLists:
    """Valid tokens of a completion, with the columns that were requested."""
    columns = {name: getattr(result, name) for name, k in COLUMNS.items() if isinstance(k, Values)}
    experts, top, given = result.routed_experts, options.answers_top_logprobs, result.given_logprobs
    tokens: TokenLists = TokenColumns(
        **columns,
        versions=tuple(wire_spans(result.versions, options.adapter)),
        kv_versions=tuple(
            KvVersionSpan(version=s.version, start=s.start, end=s.end, first_token=s.first_token)
            for s in result.kv_versions
        ),
        support=support_of(result.support, options.support_vocab_size),
        top_logprobs=await _table(result, result.top_logprobs) if top else None,
        given_logprobs=await _table(result, given) if options.template.logprob_token_ids else None,
        routed_experts=None
        if experts is None or experts_from is None
        else RoutedExperts.of(experts_from, experts),
    )
    num_tokens = num_valid_tokens(options, result)
    return tokens if num_tokens == len(result.token_ids) else tokens.part(0, num_tokens)


async def _table(result: Completion, rows: TopLogprobRows | None) -> TokenLogprobs:
    return TokenLogprobs.empty(len(result.token_ids)) if rows is None else await to_table(rows)


async def answer_fields(tokens: TokenLists, model: type[BaseModel]) -> dict[str, Any]:
    """Fields of an answer. Large supports are encoded beside the event loop, in a thread."""
    rows = () if tokens.support is None else tokens.support.rows
    if sum(map(len, rows)) + ROW_BYTES * len(rows) < ENCODED_IN_LOOP:
        return tokens.wire_fields(model)
    return await asyncio.to_thread(tokens.wire_fields, model)


def prior_tokens(options: GroupOptions, index: int) -> list[int]:
    """Tokens that a sample resumed by `continue_from` already has; empty for other samples."""
    continued = options.continued
    return continued[index].token_ids if index < len(continued) else []


def experts_from(options: GroupOptions, index: int) -> int | None:
    """First position whose routed experts are returned; None if they were not requested.

    The model has read all tokens that a resumed sample already has, except for the last.
    """
    if not options.returns_routed_experts:
        return None
    num_prior = len(prior_tokens(options, index))
    return len(options.prompt_token_ids) + num_prior - 1 if num_prior else 0


def valid_end(options: GroupOptions, versions: Iterable[EngineVersionSpan], end: int) -> int:
    """Index of the first token that another version than `exact_version` generated, or `end`.

    If the group requires no exact version, it is `end`.
    """
    if options.exact_version is None:
        return end
    others = (span.start for span in versions if span.version != options.exact_version)
    return min(others, default=end)


def num_valid_tokens(options: GroupOptions, result: Completion) -> int:
    """Number of leading tokens that the required `exact_version` generated."""
    return valid_end(options, result.versions, len(result.token_ids))


def wire_spans(versions: Iterable[EngineVersionSpan], adapter: str | None) -> list[VersionSpan]:
    return [
        VersionSpan(version=span.version, start=span.start, end=span.end, adapter=adapter)
        for span in versions
    ]


async def _text(
    options: GroupOptions, token_ids: list[int], stop_reason: int | str | None
) -> str | None:
    if options.decode is None:
        return None
    return await options.decode(token_ids, stop_reason, options.sampling)
