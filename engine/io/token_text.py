"""Text of single tokens, as in vLLM's logprobs."""

from collections.abc import Sequence
from typing import Any

from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens


def texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """Decoded text per token. An incomplete character becomes the replacement character."""
    known = [token for token in token_ids if token < len(tokenizer)]
    found = dict(zip(known, convert_ids_list_to_tokens(tokenizer, known), strict=True))
    return [found.get(token, "") for token in token_ids]


def pieces(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """Vocabulary entry per token. A model's vocabulary may be padded beyond the tokenizer's."""
    return [piece or "" for piece in tokenizer.convert_ids_to_tokens(list(token_ids))]
