"""Top-k and per-token-id logprobs: checks of a request's limits, and arrays for the answer."""

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from coppice.wire.columns.logprobs import PromptLogprobs, TokenLogprobs
from engine.types.info import EngineInfo
from engine.types.samples import TopLogprobRows
from service.errors import InvalidRequest
from service.rollouts.request import NewRollout

MAX_REQUEST_LOGPROBS = 2**24
"""Maximum number of logprobs of further tokens per request; each takes 8 bytes in memory."""
MAX_COMPUTED_LOGPROBS = 2**26
"""Maximum number that the engine computes per request, also at positions of prompts; each takes 12
bytes while a response is scored."""
INLINE_LOGPROBS = 2**14
"""Larger tables are made in a thread."""


def check_count(info: EngineInfo, **counts: int | None) -> None:
    for name, count in counts.items():
        if (count or 0) > info.max_logprobs:
            raise InvalidRequest.of_parameter(
                name, f"at most {info.max_logprobs} (engine.max_logprobs)"
            )


def check_finite(computed: TopLogprobRows | Sequence[float], version: str) -> None:
    """Reject a request whose tokens have the logprob NaN, which JSON has no number for."""
    logprobs = computed.logprobs if isinstance(computed, TopLogprobRows) else computed
    if np.isnan(logprobs).any():
        raise InvalidRequest(f"the logits of these tokens are NaN with the weights {version}")


def check_total(name: str, num_positions: int, k: int) -> None:
    """Reject a request whose answer would hold too many logprobs."""
    if num_positions * k > MAX_REQUEST_LOGPROBS:
        raise InvalidRequest.of_parameter(
            name,
            f"{k} logprobs at up to {num_positions} positions; a request may have at most "
            f"{MAX_REQUEST_LOGPROBS} in all: set a lower max_tokens, or send fewer samples",
        )


def check_rollout(
    request: NewRollout, prompts: Sequence[Sequence[int]], num_samples: int, info: EngineInfo
) -> None:
    check_count(info, top_logprobs=request.top_logprobs, prompt_logprobs=request.prompt_logprobs)
    given = request.logprob_token_ids or ()
    check_count(info, logprob_token_ids=len(given))
    if max(given, default=0) >= info.vocab_size:
        raise InvalidRequest.of_parameter(
            "logprob_token_ids", f"token ids must be below {info.vocab_size}"
        )
    further = max(request.num_top_logprobs, (request.top_logprobs or 0) + len(given))
    _check_samples(request, prompts, num_samples, further, info)
    if request.return_routed_experts:
        _check_experts(request, info)
    if request.prompt_logprobs:
        check_total("prompt_logprobs", sum(map(len, prompts)), request.prompt_logprobs)


def _check_samples(
    request: NewRollout,
    prompts: Sequence[Sequence[int]],
    num_samples: int,
    k: int,
    info: EngineInfo,
) -> None:
    """Reject a request whose samples could have too many logprobs, at `k` per token."""
    longest = info.max_context_tokens - min(map(len, prompts))
    positions = num_samples * min(request.sampling.max_tokens or longest, longest)
    is_flat = request.branching is not None and request.branching.flatten
    copies = 2 if is_flat else 1  # the tables of the segments and of the samples
    check_total("top_logprobs", copies * positions, k)


def _check_experts(request: NewRollout, info: EngineInfo) -> None:
    if not info.returns_routed_experts:
        raise InvalidRequest.of_parameter(
            "return_routed_experts", "the server was started without engine.return_routed_experts"
        )
    if request.branching is not None or request.kv_reuse is not None:
        raise InvalidRequest.of_parameter(
            "return_routed_experts", "cannot be combined with branching or kv_reuse"
        )


def table_of(rows: TopLogprobRows) -> TokenLogprobs:
    """Table of the top k at each position, without tokens that the sampling excluded."""
    logprobs, token_ids = rows.logprobs[:, 1:], rows.token_ids[:, 1:]
    is_entry = logprobs > -np.inf
    return TokenLogprobs(
        offsets=np.concatenate([[0], np.cumsum(is_entry.sum(axis=1))]),
        token_ids=token_ids[is_entry],
        logprobs=logprobs[is_entry],
    )


async def to_table(rows: TopLogprobRows) -> TokenLogprobs:
    if rows.logprobs.size <= INLINE_LOGPROBS:
        return table_of(rows)
    return await asyncio.to_thread(table_of, rows)


async def to_prompt_logprobs(rows: TopLogprobRows, version: str) -> PromptLogprobs:
    return PromptLogprobs(
        logprobs=rows.logprobs[1:, 0], top_logprobs=await to_table(rows[1:]), version=version
    )


def padded_token_ids(num_prompt_tokens: int, given: list[list[int]]) -> NDArray[np.int32]:
    """Given token ids as an array [prompt and response tokens, entries], padded with zeros."""
    padded = np.zeros((num_prompt_tokens + len(given), max(map(len, given))), np.int32)
    for position, token_ids in enumerate(given, num_prompt_tokens):
        padded[position, : len(token_ids)] = token_ids
    return padded


def given_table(rows: TopLogprobRows, given: list[list[int]]) -> TokenLogprobs:
    """Table of given token ids, without the padding of `padded_token_ids`."""
    lengths = np.array(list(map(len, given)))
    is_entry = np.arange(rows.logprobs.shape[1] - 1) < lengths[:, None]
    return TokenLogprobs(
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        token_ids=rows.token_ids[:, 1:][is_entry],
        logprobs=rows.logprobs[:, 1:][is_entry],
    )
