"""Cut of a response's text at its stop string, and the matching number of tokens."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache


def response_text(
    decode: Callable[[Sequence[int]], str],
    token_ids: Sequence[int],
    stop_reason: int | str | None,
    *,
    include_stop_str: bool,
) -> str:
    """Text of a response, cut at the stop string that ended it.

    The last token completes the match, and may continue after it. As in vLLM, the text is cut
    before the match, or directly after it if `include_stop_str`.
    """
    text = decode(token_ids)
    if not isinstance(stop_reason, str):
        return text
    earliest = max(len(decode(token_ids[:-1])) - len(stop_reason) + 1, 0)
    start = text.find(stop_reason, earliest)
    if start < 0:
        return text
    return text[: start + len(stop_reason)] if include_stop_str else text[:start]


MAX_INCOMPLETE_TOKENS = 8
"""Tokens of an incomplete character are fewer. Their text is not the beginning of the character."""


def tokens_of_text(
    decode: Callable[[Sequence[int]], str], token_ids: Sequence[int], text: str
) -> tuple[int, str] | None:
    """Number of tokens at the start of a response that a text begins with, and the other text.

    Of several numbers the largest is returned, so tokens without text are included. None if no
    tokens near the end of the text have a text that it begins with.
    """

    @cache
    def text_of(num_tokens: int) -> str:
        return decode(token_ids[:num_tokens])

    def num_chars(num_tokens: int) -> int:
        return len(text_of(num_tokens))

    low, size = len(token_ids), 1
    while low and num_chars(low) > len(text):
        low, size = max(low - size, 0), 2 * size
    longer = bisect_right(range(low, len(token_ids) + 1), len(text), key=num_chars)
    last = low + longer - 1
    for number in range(last, max(last - MAX_INCOMPLETE_TOKENS, -1), -1):
        known = text_of(number)
        if text.startswith(known):
            return number, text[len(known) :]
    return None
