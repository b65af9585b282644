"""Samples and segments in the states of moved rollouts and sessions: their validation."""

import re
from collections.abc import Iterable

from coppice.wire.base import MAX_TOKENS
from coppice.wire.columns.token_columns import COLUMNS, TokenFields, TokenLists, columns_of
from coppice.wire.rollouts import SegmentAnswer
from service.errors import InvalidRequest

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


def sampled_tokens(answer: SegmentAnswer, where: str, vocab_size: int) -> TokenLists:
    """Tokens of a sampled segment; raises InvalidRequest if the segment is inconsistent."""
    tokens = checked_tokens(answer, where, vocab_size)
    if tokens.kv_versions and tokens.kv_versions[0].first_token:
        raise invalid(where, "kv_versions", "they must begin with the first token")
    return tokens


def checked_tokens(answer: TokenFields, where: str, vocab_size: int) -> TokenLists:
    """Tokens of a sample or segment; refuses those of which a column does not fit the others.

    It may take long for many tokens and is called in a thread.
    """
    num_tokens, support = len(answer.token_ids), answer.support
    if min(answer.token_ids, default=0) < 0 or max(answer.token_ids, default=0) >= vocab_size:
        raise invalid(where, "token_ids", f"token ids must be below {vocab_size}")
    if support is not None and support.vocab_size != vocab_size:
        raise invalid(where, "support", f"needs one of a vocabulary of {vocab_size}")
    try:
        tokens = columns_of(answer)
    except ValueError as error:
        raise invalid(where, "support", str(error)) from error
    for name, values in tokens.columns().items():
        if values is not None and not COLUMNS[name].fits(values, num_tokens):
            raise invalid(where, name, "does not fit the tokens")
    labels = {span.version for span in tokens.versions}
    labels |= {span.version for span in tokens.kv_versions}
    if not all(map(VERSION.fullmatch, labels)):
        raise invalid(where, "versions", "a label is not that of a weights version")
    if any(span.end > 2 * MAX_TOKENS for span in tokens.kv_versions):
        raise invalid(where, "kv_versions", "a span has too many positions")
    return tokens


def invalid(where: str, name: str, message: str) -> InvalidRequest:
    return InvalidRequest.of_parameter(f"{where}.{name}", message)
