"""Answer of a sample, made from the engine's completion without the tokens that do not count.

A sample that `continue_from` resumes already has tokens; its answer has these, too.
"""

from collections.abc import Iterable
from itertools import chain
from typing import TypedDict

from coppice.wire.kv_versions import KvVersionSpan, cut_kv_versions, joined_kv_versions
from coppice.wire.logprobs import TokenLogprobs
from coppice.wire.rollouts import FinishReason, SampleAnswer, VersionSpan
from coppice.wire.routed_experts import RoutedExperts
from coppice.wire.support import SupportAnswer
from coppice.wire.version_span_slicing import cut_spans, joined_spans
from engine.types import Completion
from engine.types import VersionSpan as EngineVersionSpan
from service.rollouts.group_options import GroupOptions
from service.rollouts.logprob_tables import to_sample_table
from service.rollouts.sampling import parsed_message
from service.rollouts.supports import joined, support_of


async def create(
    options: GroupOptions, index: int, result: Completion, finish_reason: FinishReason
) -> SampleAnswer:
    num_tokens, prior = num_valid_tokens(options, result), prior_tokens(options, index)
    logprobs, prior_spans = _prior(options, index)
    spans = cut_spans(wire_spans(result.versions, options.adapter), 0, num_tokens)
    token_ids = prior + result.token_ids[:num_tokens]
    stop_reason = result.stop_reason if finish_reason == "stop" else None
    return SampleAnswer(
        index=index,
        token_ids=token_ids,
        logprobs=logprobs + result.logprobs[:num_tokens],
        support=await _support(options, index, result, num_tokens),
        text=await _text(options, token_ids, stop_reason),
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        versions=joined_spans([(prior_spans, len(prior)), (spans, num_tokens)]),
        kv_versions=_kv_versions(options, index, result, num_tokens),
        **await tables_of(options, result, len(prior), num_tokens),
        raw_logprobs=_raw_logprobs(options, index, result, num_tokens),
        message=await parsed_message(options, token_ids, stop_reason),
        routed_experts=_routed_experts(options, index, result, num_tokens),
    )


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


def wire_kv_versions(result: Completion) -> list[KvVersionSpan]:
    return [
        KvVersionSpan(
            version=span.version, start=span.start, end=span.end, first_token=span.first_token
        )
        for span in result.kv_versions
    ]


def _kv_versions(
    options: GroupOptions, index: int, result: Completion, num_tokens: int
) -> list[KvVersionSpan]:
    """KV versions of a sample; those of the tokens that it already has are as they were given."""
    new = cut_kv_versions(wire_kv_versions(result), len(result.token_ids), 0, num_tokens)
    continued = options.continued[index : index + 1]
    prior = [KvVersionSpan(**span.model_dump()) for each in continued for span in each.kv_versions]
    return joined_kv_versions([(prior, len(prior_tokens(options, index))), (new, num_tokens)])


def _prior(options: GroupOptions, index: int) -> tuple[list[float], list[VersionSpan]]:
    """Logprobs and version spans of the tokens that a resumed sample already has."""
    if index >= len(options.continued):
        return [], []
    given = options.continued[index]
    return given.logprobs, [VersionSpan(**span.model_dump()) for span in given.versions]


async def _support(
    options: GroupOptions, index: int, result: Completion, num_tokens: int
) -> SupportAnswer | None:
    new = support_of(result.support, options.support_vocab_size)
    if new is None:
        return None
    prior = options.given_supports[index : index + 1]
    whole = joined([*prior, new.part(0, num_tokens)])
    assert whole is not None, "the new tokens have supports"
    return await whole.encoded()


async def _text(
    options: GroupOptions, token_ids: list[int], stop_reason: int | str | None
) -> str | None:
    if options.decode is None:
        return None
    return await options.decode(token_ids, stop_reason, options.sampling)


class AnswerTables(TypedDict):
    """Fields of an answer with the logprobs of further tokens."""

    top_logprobs: TokenLogprobs | None
    given_logprobs: TokenLogprobs | None


async def tables_of(
    options: GroupOptions, result: Completion, num_prior: int, num_tokens: int
) -> AnswerTables:
    """Tables of a completion's logprobs; None unless they are part of the answer."""
    top, given = result.top_logprobs, result.given_logprobs
    return AnswerTables(
        top_logprobs=await to_sample_table(top, num_prior, num_tokens)
        if options.answers_top_logprobs
        else None,
        given_logprobs=await to_sample_table(given, num_prior, num_tokens)
        if options.logprob_token_ids
        else None,
    )


def _raw_logprobs(
    options: GroupOptions, index: int, result: Completion, num_tokens: int
) -> list[float] | None:
    if not options.raw_logprobs:
        return None
    assert result.raw_logprobs is not None, "the engine returns the logprobs that were requested"
    prior = (given.raw_logprobs or [] for given in options.continued[index : index + 1])
    return [*chain.from_iterable(prior), *result.raw_logprobs[:num_tokens]]


def _routed_experts(
    options: GroupOptions, index: int, result: Completion, num_tokens: int
) -> RoutedExperts | None:
    """Routed experts of a sample, without those of tokens of other weights versions."""
    start = experts_from(options, index)
    if result.routed_experts is None or start is None:
        return None
    num_dropped = len(result.token_ids) - num_tokens
    rows = result.routed_experts[: len(result.routed_experts) - num_dropped]
    return RoutedExperts.of(start, rows)
