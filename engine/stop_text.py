"""Text of a response that a stop string has ended."""

from collections.abc import Callable, Sequence


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
