"""Segments of trees in the states of moved rollouts and sessions, and their validation."""

import math
from collections.abc import Iterable
from itertools import pairwise

from coppice.wire.base import MAX_TOKENS
from coppice.wire.rollouts import SegmentAnswer
from coppice.wire.support import rows_of
from service.http.errors import InvalidRequest
from service.rollouts.supports import Supports
from service.trees.segment_tree import GeneratedTokens

MAX_DIGITS = 10


def check_ids(segments: Iterable[SegmentAnswer], prefix: str, end: int, where: str) -> None:
    """Refuse ids that are not `prefix` and a number below `end`, repeated ids, unknown parents."""
    found: set[str | None] = {None}
    for segment in segments:
        head, _, number = segment.id.rpartition(".")
        if head != prefix or not is_number(number) or int(number) >= end:
            raise invalid(where, "segments", "an id is not one of the tree")
        if segment.id in found or segment.parent not in found:
            raise invalid(where, "segments", "a segment is repeated or has no parent")
        found.add(segment.id)


def is_number(text: str) -> bool:
    """True for a decimal number without leading zeros."""
    is_decimal = text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS
    return is_decimal and (text == "0" or text[0] != "0")


def sampled_tokens(answer: SegmentAnswer, where: str, vocab_size: int) -> GeneratedTokens:
    """Tokens of a sampled segment; raises InvalidRequest if the segment is inconsistent."""
    _check_tables(answer, where, vocab_size)
    try:
        rows = None if answer.support is None else rows_of(answer.support)
    except ValueError as error:
        raise invalid(where, "support", str(error)) from error
    return GeneratedTokens(
        token_ids=answer.token_ids,
        logprobs=answer.logprobs,
        entropy=answer.entropy,
        versions=answer.versions,
        kv_versions=answer.kv_versions,
        support=None if rows is None else Supports(rows, vocab_size),
        top_logprobs=answer.top_logprobs,
        raw_logprobs=answer.raw_logprobs,
    )


def _check_tables(answer: SegmentAnswer, where: str, vocab_size: int) -> None:
    """Refuse a segment whose logprobs, versions and supports are not those of its tokens."""
    num, top, support = len(answer.token_ids), answer.top_logprobs, answer.support
    if min(answer.token_ids, default=0) < 0 or max(answer.token_ids, default=0) >= vocab_size:
        raise invalid(where, "segments", "a segment needs tokens of the vocabulary")
    if len(answer.logprobs) != num or any(map(math.isnan, answer.logprobs)):
        raise invalid(where, "logprobs", "a segment needs one per token")
    for name, values in (("entropy", answer.entropy), ("raw_logprobs", answer.raw_logprobs)):
        if values is not None and (len(values) != num or any(map(math.isnan, values))):
            raise invalid(where, name, "a segment needs one per token")
    if top is not None and top.num_positions != num:
        raise invalid(where, "top_logprobs", "a segment needs those of each token")
    if support is not None and (support.vocab_size, len(support.lengths)) != (vocab_size, num):
        raise invalid(where, "support", "a segment needs one per token, of the same vocabulary")
    _check_versions(answer, where)


def _check_versions(answer: SegmentAnswer, where: str) -> None:
    num = len(answer.token_ids)
    borders = [0, *(span.end for span in answer.versions)]
    starts = [span.start for span in answer.versions]
    if starts != borders[:-1] or borders[-1] != num or any(a >= b for a, b in pairwise(borders)):
        raise invalid(where, "versions", "the spans must cover the tokens")
    first_tokens = [span.first_token for span in answer.kv_versions]
    is_ascending = first_tokens == sorted(first_tokens) and first_tokens[:1] in ([], [0])
    if not is_ascending or (first_tokens and first_tokens[-1] >= num):
        raise invalid(where, "kv_versions", "the first tokens must ascend from 0")
    if any(not 0 <= span.start < span.end <= 2 * MAX_TOKENS for span in answer.kv_versions):
        raise invalid(where, "kv_versions", "the spans must have positions")


def invalid(where: str, name: str, message: str) -> InvalidRequest:
    return InvalidRequest.of_parameter(f"{where}.{name}", message)
