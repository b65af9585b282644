"""Samples and segments in the states of moved rollouts and sessions: their validation."""

import math
import re
from collections.abc import Iterable
from itertools import pairwise

from coppice.wire.base import MAX_TOKENS
from coppice.wire.rollouts import SampleAnswer, SegmentAnswer
from coppice.wire.support import rows_of
from service.errors import InvalidRequest
from service.rollouts.supports import Supports
from service.rollouts.trees.segment_tree import GeneratedTokens

MAX_DIGITS = 10
VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_ids(segments: Iterable[SegmentAnswer], prefix: str, end: int, where: str) -> None:
    """Refuse ids that are not `prefix` and a number below `end`, repeated ids, unknown parents."""
    found: set[str | None] = {None}
    for segment in segments:
        head, _, number = segment.id.rpartition(".")
        if head != prefix or not _is_number(number) or int(number) >= end:
            raise invalid(where, "segments", "an id is not one of the tree")
        if segment.id in found or segment.parent not in found:
            raise invalid(where, "segments", "a segment is repeated or has no parent")
        found.add(segment.id)


def _is_number(text: str) -> bool:
    """True for a decimal number without leading zeros."""
    is_decimal = text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS
    return is_decimal and (text == "0" or text[0] != "0")


def sampled_tokens(answer: SegmentAnswer, where: str, vocab_size: int) -> GeneratedTokens:
    """Tokens of a sampled segment; raises InvalidRequest if the segment is inconsistent."""
    rows = check_tables(answer, where, vocab_size)
    if answer.kv_versions and answer.kv_versions[0].first_token:
        raise invalid(where, "kv_versions", "they must begin with the first token")
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


def check_tables(
    answer: SampleAnswer | SegmentAnswer, where: str, vocab_size: int
) -> list[bytes] | None:
    """Rows of the supports; refuses logprobs, versions and supports that do not fit the tokens.

    It may take long for many tokens and is called in a thread.
    """
    num, top, support = len(answer.token_ids), answer.top_logprobs, answer.support
    if min(answer.token_ids, default=0) < 0 or max(answer.token_ids, default=0) >= vocab_size:
        raise invalid(where, "token_ids", f"token ids must be below {vocab_size}")
    entropy = answer.entropy if isinstance(answer, SegmentAnswer) else None
    tables = {"logprobs": answer.logprobs, "raw_logprobs": answer.raw_logprobs, "entropy": entropy}
    for name, values in tables.items():
        if values is not None and (len(values) != num or any(map(math.isnan, values))):
            raise invalid(where, name, "needs one number per token")
    if top is not None and top.num_positions != num:
        raise invalid(where, "top_logprobs", "needs those of each token")
    if support is not None and (support.vocab_size, len(support.lengths)) != (vocab_size, num):
        raise invalid(where, "support", "needs one per token, of the same vocabulary")
    _check_versions(answer, where)
    try:
        return None if support is None else rows_of(support)
    except ValueError as error:
        raise invalid(where, "support", str(error)) from error


def _check_versions(answer: SampleAnswer | SegmentAnswer, where: str) -> None:
    num = len(answer.token_ids)
    borders = [0, *(span.end for span in answer.versions)]
    starts = [span.start for span in answer.versions]
    if starts != borders[:-1] or borders[-1] != num or any(a >= b for a, b in pairwise(borders)):
        raise invalid(where, "versions", "the spans must cover the tokens")
    labels = {span.version for span in answer.versions}
    labels |= {span.version for span in answer.kv_versions}
    if not all(map(VERSION.fullmatch, labels)):
        raise invalid(where, "versions", "a label is not that of a weights version")
    first_tokens = [span.first_token for span in answer.kv_versions]
    if first_tokens != sorted(first_tokens) or not all(0 <= each < num for each in first_tokens):
        raise invalid(where, "kv_versions", "the first tokens must ascend")
    if any(not 0 <= span.start < span.end <= 2 * MAX_TOKENS for span in answer.kv_versions):
        raise invalid(where, "kv_versions", "the spans must have positions")


def invalid(where: str, name: str, message: str) -> InvalidRequest:
    return InvalidRequest.of_parameter(f"{where}.{name}", message)
