"""Patch of vLLM's stop string match: also across the end of a resumed response's prefix.

A sample that is resumed, or that continues a segment of a tree, has the first tokens of its
response at the end of its prompt. vLLM matches stop strings against the text of the new tokens
only. Here this text begins with the end of the text of the earlier tokens.
"""

import functools
from collections.abc import Sequence
from typing import Any

PRIOR_TEXT_ARG = "coppice_num_prior_text_tokens"
CONTEXT_TOKENS = 8
"""Number of tokens before a text, on which its first characters may depend."""
SPARE_TOKENS = 16
TOKENS_PER_CHAR = 4
"""Tokens without text of their own, such as the bytes of a character, are at most this many."""


def prior_text(
    tokenizer: Any, token_ids: Sequence[int], num_prior: int, num_chars: int, *, skip_special: bool
) -> str:
    """Text of the last `num_prior` tokens, or at least its last `num_chars` characters.

    The number of decoded tokens is bounded by `num_chars`.
    """
    number = min(num_prior, TOKENS_PER_CHAR * num_chars + SPARE_TOKENS)
    context = list(token_ids[-number - CONTEXT_TOKENS : -number])

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=skip_special))

    return decode([*context, *token_ids[-number:]])[len(decode(context)) :]


def prepend_prior_text(detokenizer: Any, tokenizer: Any, request: Any) -> Any:
    """Add the text of the earlier tokens of a response to a new detokenizer."""
    params = request.sampling_params
    number = (params.extra_args or {}).get(PRIOR_TEXT_ARG, 0)
    if number:
        detokenizer.output_text = prior_text(
            tokenizer,
            request.prompt_token_ids,
            number,
            max(map(len, params.stop)),
            skip_special=params.skip_special_tokens,
        )
    return detokenizer


@functools.cache
def install() -> None:
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    create = IncrementalDetokenizer.from_new_request.__func__

    def create_with_prior_text(cls: Any, tokenizer: Any, request: Any) -> Any:
        return prepend_prior_text(create(cls, tokenizer, request), tokenizer, request)

    IncrementalDetokenizer.from_new_request = classmethod(create_with_prior_text)
