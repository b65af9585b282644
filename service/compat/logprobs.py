"""Top-k logprobs of response and prompt tokens, in the formats of OpenAI and vLLM.

The number per token is limited by `engine.max_logprobs`. Prompt logprobs are computed once for all
samples of a prompt, by scoring it: requests that compute prompt logprobs could not share the cached
prefix. They are computed before the samples, so that a rejection, or a drain that begins meanwhile,
costs no sample.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Annotated, Any

from pydantic import Field

from engine.types.samples import TopLogprobRows, TopLogprobs
from service.compat.request import CompatRequest
from service.errors import InvalidRequest
from service.rollouts.request import NewRollout
from service.rollouts.rollout import Rollout
from service.rollouts.scoring import ScoringOptions
from service.rollouts.tokenizer import Tokenizer

NumLogprobs = Annotated[int, Field(ge=0, le=1024)]
MAX_PROMPT_LOGPROBS = 2**20
"""Maximum number of prompt logprobs in a response, over all choices; each takes about 50 bytes."""
PromptLogprobs = list[TopLogprobRows] | None
TokenName = Callable[[int], str]
"""Returns the name of a token in logprobs: its text, or `token_id:` and its id."""


def sample_logprobs(
    rollout: Rollout, group: int, index: int, start: int = 0, end: int | None = None
) -> Sequence[TopLogprobs]:
    """Top-k logprobs for the tokens `start` to `end` of a sample; empty if the request wants none.

    A session may have requested more of them for its own tree: these are left out.
    """
    found = rollout.groups[group].top_logprobs.get(index, [])[start:end]
    count = rollout.groups[group].options.num_returned_top_logprobs
    if count is None:
        return found
    if not count:
        return []
    if isinstance(found, TopLogprobRows):
        return found.columns(count)
    return [candidates[: count + 1] for candidates in found]


async def compute_prompt_logprobs(
    call: CompatRequest, request: NewRollout, prompts: Sequence[list[int]], count: int | None
) -> PromptLogprobs:
    if count is None:
        return None
    _check_size(prompts, count, n=request.groups[0].n)
    options = ScoringOptions(request.weights, request.adapter)
    return await call.server.scoring.prompts(
        prompts, count, owner=call.caller.name, options=options
    )


def _check_size(prompts: Sequence[list[int]], count: int, *, n: int) -> None:
    """Reject a request whose prompt logprobs would make the response too large.

    Every choice repeats the logprobs of its prompt, so a small request could produce a response of
    gigabytes.
    """
    num_values = sum(map(len, prompts)) * (count + 1) * n
    if num_values > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest.of_parameter(
            "prompt_logprobs",
            f"the response would hold {num_values} logprobs over all choices, and the limit is "
            f"{MAX_PROMPT_LOGPROBS}: send fewer prompts, n: 1, or use POST /v1/score",
        )


def as_prompt_logprobs(prompts: PromptLogprobs, index: int) -> list[dict[str, Any] | None] | None:
    """Logprobs of one prompt's tokens in vLLM's format, with None for the first token."""
    if prompts is None:
        return None
    return [
        {f"{r.token_id}": {"logprob": r.logprob, "rank": r.rank} for r in candidates} or None
        for candidates in prompts[index]
    ]


def id_name(token: int) -> str:
    """Name of a token in logprobs by its id (`token_id:42`), which is unique, unlike its text."""
    return f"token_id:{token}"


async def token_names(
    tokenizer: Tokenizer, collect: Callable[[], Iterable[int]], *, as_ids: bool
) -> TokenName:
    """Function that returns the name of a token in logprobs: its text, or its id if `as_ids`.

    Supports the tokens that `collect` returns; `collect` is called in a thread.
    """
    return id_name if as_ids else (await tokenizer.token_texts(collect)).__getitem__


def with_top_token_ids(token_ids: Iterable[int], per_token: Iterable[TopLogprobs]) -> Iterable[int]:
    return chain(token_ids, top_token_ids(per_token))


def top_token_ids(per_token: Iterable[TopLogprobs]) -> Iterable[int]:
    return (ranked.token_id for candidates in per_token for ranked in candidates)


def chat_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    per_token: Sequence[TopLogprobs],
    name: TokenName,
) -> list[dict[str, Any]]:
    """Logprobs of sampled tokens in OpenAI's chat format, with token ids added."""
    return entries(token_ids, logprobs, per_token, partial(_with_bytes, name))


def entries(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    per_token: Sequence[TopLogprobs],
    entry: Callable[[int, float], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Entries of sampled tokens with those of the top k, which a sampled token may be one of."""
    others = [candidates[1:] for candidates in per_token] or [[]] * len(token_ids)
    return [
        {**entry(token, logprob), "top_logprobs": [entry(r.token_id, r.logprob) for r in more]}
        for token, logprob, more in zip(token_ids, logprobs, others, strict=True)
    ]


def _with_bytes(name: TokenName, token: int, logprob: float) -> dict[str, Any]:
    text = name(token)
    utf8 = list(text.encode(errors="replace"))
    return {"token": text, "token_id": token, "logprob": logprob, "bytes": utf8}


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[float | None],
    per_token: Sequence[TopLogprobs],
    name: TokenName,
    offset: int = 0,
) -> dict[str, Any]:
    """Logprobs of a list of tokens in OpenAI's completions format.

    Offsets count characters from the first token, as in vLLM. `offset` is that of the first token.
    """
    tokens = [name(token) for token in token_ids]
    offsets = list(accumulate((len(token) for token in tokens), initial=offset))
    return {
        "tokens": tokens,
        "token_logprobs": list(logprobs),
        "top_logprobs": [_highest(candidates, name) for candidates in per_token]
        or [None] * len(tokens),
        "text_offset": offsets[:-1],
    }


def _highest(candidates: TopLogprobs, name: TokenName) -> dict[str, float] | None:
    """Top-k logprobs at one position, by token name; tokens with equal text keep the highest."""
    named: dict[str, float] = {}
    for ranked in candidates:
        text = name(ranked.token_id)
        named[text] = max(ranked.logprob, named.get(text, ranked.logprob))
    return named or None
