"""Conversion of prompts (text, token ids, messages or spans) to the wire format."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coppice.wire.chat import Message
from coppice.wire.rollouts import GroupRequest, Prompt, PromptSpan

PromptLike = (
    str
    | Sequence[int]
    | NDArray[np.integer[Any]]
    | Sequence[Message]
    | Sequence[Mapping[str, Any]]
    | Sequence[PromptSpan]
    | Prompt
    | GroupRequest
)
"""Text, token ids, chat messages, prompt spans, or a wire object, which is sent unchanged."""

_SINGLE = (str, bytes, Mapping, Message, Prompt, GroupRequest)


def groups_of(
    prompts: Iterable[PromptLike],
    *,
    n: int = 1,
    seed: int | None = None,
    seeds: Sequence[Sequence[int]] | None = None,
) -> list[GroupRequest]:
    """Builds one group request per prompt; the prompt at index i has the seed `seed + i`.

    `seeds` has one list per prompt, with one seed per sample.

    A GroupRequest keeps its own n and seed.
    """
    if isinstance(prompts, _SINGLE):
        raise TypeError("prompts must be a list of prompts; put a single prompt into a list")
    groups = []
    for position, prompt in enumerate(prompts):
        if not isinstance(prompt, GroupRequest):
            own_seed = None if seed is None else seed + position
            prompt = GroupRequest(
                prompt=prompt_of(prompt, f"prompts[{position}]"),
                n=n,
                seed=own_seed,
                seeds=None if seeds is None else list(seeds[position]),
            )
        groups.append(prompt)
    return groups


def prompt_of(prompt: Any, where: str) -> Prompt:
    """Converts a prompt of any form to the wire type; error messages call the prompt `where`."""
    if isinstance(prompt, GroupRequest):
        return prompt.prompt
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, str):
        return Prompt(text=prompt)
    if isinstance(prompt, bytes | Mapping | Message) or not isinstance(prompt, Iterable):
        raise TypeError(
            f"{where} is {type(prompt).__name__}, not a prompt: text, token ids or messages;"
            " put a single prompt into a list"
        )
    parts = _parts_of(prompt)
    if not parts:
        raise ValueError(f"{where} is empty")
    if isinstance(parts[0], PromptSpan):
        return Prompt(spans=parts)
    if isinstance(parts[0], Mapping | Message):
        return Prompt(messages=[_message_of(part) for part in parts])
    return Prompt(token_ids=token_ids_of(parts, where))


def token_ids_of(token_ids: Any, where: str) -> list[int]:
    """Token ids of a list, an array or a tensor, which error messages call `where`."""
    return [_token_id_of(token_id, where) for token_id in _parts_of(token_ids)]


def _parts_of(many: Any) -> list[Any]:
    """Elements of a sequence as Python objects; an array is converted by a single tolist()."""
    parts: list[Any] = many.tolist() if hasattr(many, "tolist") else list(many)
    return parts


def _message_of(message: Any) -> Message:
    return message if isinstance(message, Message) else Message.model_validate(message)


def _token_id_of(token_id: Any, where: str) -> int:
    try:
        return operator.index(token_id)
    except TypeError:
        raise TypeError(
            f"{where} contains {type(token_id).__name__} instead of token ids"
        ) from None
