"""Token names in logprobs: the text of a token, or `token_id:` and its id."""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain
from typing import Any

from coppice.wire.rollouts import SampleAnswer
from engine.types import TopLogprobs
from service.rollouts.tokenizer import Tokenizer

Name = Callable[[int], str]


def id_name(token: int) -> str:
    """Name with the token id, which is unique, unlike text."""
    return f"token_id:{token}"


async def names(
    tokenizer: Tokenizer, collect: Callable[[], Iterable[int]], *, as_ids: bool
) -> Name:
    """Naming function for the tokens that `collect` returns; `collect` is called in a thread."""
    return id_name if as_ids else (await tokenizer.token_texts(collect)).__getitem__


def sample_token_ids(sample: SampleAnswer, per_token: Iterable[TopLogprobs]) -> Iterable[int]:
    return chain(sample.token_ids, top_token_ids(per_token))


def top_token_ids(per_token: Iterable[TopLogprobs]) -> Iterable[int]:
    return (ranked.token_id for candidates in per_token for ranked in candidates)


def chat_logprobs(
    sample: SampleAnswer, per_token: Sequence[TopLogprobs], name: Name
) -> list[dict[str, Any]]:
    """Logprobs in OpenAI's chat format, with token ids added."""
    others = [candidates[1:] for candidates in per_token] or [[]] * len(sample.token_ids)
    return [
        {
            **_entry(token, logprob, name),
            "top_logprobs": [_entry(r.token_id, r.logprob, name) for r in more],
        }
        for token, logprob, more in zip(sample.token_ids, sample.logprobs, others, strict=True)
    ]


def _entry(token: int, logprob: float, name: Name) -> dict[str, Any]:
    text = name(token)
    utf8 = list(text.encode(errors="replace"))
    return {"token": text, "token_id": token, "logprob": logprob, "bytes": utf8}


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[float | None],
    per_token: Sequence[TopLogprobs],
    name: Name,
) -> dict[str, Any]:
    """Logprobs in OpenAI's completions format.

    Offsets count characters from the first token, as in vLLM.
    """
    tokens = [name(token) for token in token_ids]
    offsets = list(accumulate((len(token) for token in tokens), initial=0))
    return {
        "tokens": tokens,
        "token_logprobs": list(logprobs),
        "top_logprobs": [_highest(candidates, name) for candidates in per_token]
        or [None] * len(tokens),
        "text_offset": offsets[:-1],
    }


def _highest(candidates: TopLogprobs, name: Name) -> dict[str, float] | None:
    """Top logprobs by token name; of several tokens with the same text, the highest logprob."""
    named: dict[str, float] = {}
    for ranked in candidates:
        text = name(ranked.token_id)
        named[text] = max(ranked.logprob, named.get(text, ranked.logprob))
    return named or None
