"""Client operation that returns the logprobs of given responses as numpy arrays."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coppice.errors import BadAnswer
from coppice.prompts import PromptLike, prompt_of, token_ids_of
from coppice.transport.messages import json_request
from coppice.transport.retry import RequestSender
from coppice.wire.columns.logprobs import TokenLogprobs
from coppice.wire.packed.requests import PACKED_MEDIA_TYPE
from coppice.wire.packed.scores import unpack_scores
from coppice.wire.rollouts import WeightsConstraint
from coppice.wire.score import ScoreAnswer, ScoredItem, ScoreItem, ScoreRequest

TokenIds = Sequence[int] | NDArray[np.integer[Any]]
Scorable = (
    tuple[PromptLike, Iterable[TokenIds]]
    | tuple[PromptLike, Iterable[TokenIds], Iterable[Iterable[TokenIds]]]
    | ScoreItem
)
"""A prompt with the responses to score, or a wire object, which is sent unchanged.

A third member holds, per response and per token, token ids whose logprobs to return there.
"""


# NumPy's == is elementwise, so these dataclasses compare by identity.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Score:
    """Logprobs of the responses to one prompt, in request order.

    `logprobs[i][j]` belongs to token j of response i. `versions[i]` is the weights version that
    scored the whole of response i. `adapters[i]` is the `name@version` of the LoRA adapter used, or
    None.
    """

    num_prompt_tokens: int
    logprobs: tuple[NDArray[np.float32], ...]
    versions: tuple[str, ...]
    adapters: tuple[str | None, ...]
    top_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Per response, the most probable tokens at each of its tokens, if they were requested."""
    given_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Per response, the logprobs of the tokens that the request gave for each of its tokens."""


def score_request(
    items: Iterable[Scorable],
    weights: WeightsConstraint | None,
    adapter: str | None,
    top_logprobs: int | None = None,
) -> ScoreRequest:
    """Builds the body of POST /v1/score. Raises TypeError or ValueError if an item is invalid."""
    wire = [_item_of(item, f"item {position}") for position, item in enumerate(items)]
    return ScoreRequest(items=wire, weights=weights, adapter=adapter, top_logprobs=top_logprobs)


def scores_of(
    answer: ScoreAnswer,
    request: ScoreRequest,
    packed: Iterable[NDArray[np.float32]] | None = None,
) -> tuple[Score, ...]:
    """Converts an answer of POST /v1/score. Raises ValueError if it does not match the request.

    `packed` are the logprobs of all responses, if they are not part of the answer.
    """
    arrays = None if packed is None else iter(packed)
    return tuple(
        _score_of(scored, item, arrays)
        for scored, item in zip(answer.items, request.items, strict=True)
    )


def _item_of(item: Scorable, where: str) -> ScoreItem:
    if isinstance(item, ScoreItem):
        return item
    try:
        prompt, responses, *more = () if isinstance(item, str) else item
        given: Any = more[0] if more else None
    except (TypeError, ValueError):
        raise TypeError(f"{where} is not a pair of a prompt and its responses") from None
    named = f"a response of {where}"
    return ScoreItem(
        prompt=prompt_of(prompt, f"the prompt of {where}"),
        responses=[token_ids_of(response, named) for response in responses],
        logprob_token_ids=None if given is None else [_rows(each, where) for each in given],
    )


def _rows(given: Iterable[TokenIds], where: str) -> list[list[int]]:
    return [token_ids_of(token_ids, f"the token ids of {where}") for token_ids in given]


def _score_of(
    scored: ScoredItem, item: ScoreItem, packed: Iterator[NDArray[np.float32]] | None
) -> Score:
    logprobs = [
        np.array(response.logprobs if packed is None else next(packed), dtype=np.float32)
        for response in scored.responses
    ]
    lengths = list(map(len, logprobs))
    if lengths != [len(response) for response in item.responses]:
        raise ValueError("the response has another number of logprobs than the request has tokens")
    return Score(
        num_prompt_tokens=scored.num_prompt_tokens,
        logprobs=tuple(logprobs),
        versions=tuple(response.version for response in scored.responses),
        adapters=tuple(response.adapter for response in scored.responses),
        top_logprobs=_tables([response.top_logprobs for response in scored.responses], lengths),
        given_logprobs=_tables([response.given_logprobs for response in scored.responses], lengths),
    )


def _tables(
    found: list[TokenLogprobs | None], lengths: list[int]
) -> tuple[TokenLogprobs, ...] | None:
    known = tuple(table for table in found if table is not None)
    if not known:
        return None
    if [table.num_positions for table in known] != lengths:
        raise ValueError("a table of the response does not match the request")
    return known


class ScoreOperations:
    """Client operation that scores given responses."""

    _sender: RequestSender

    async def score(
        self,
        prompts_and_responses: Iterable[Scorable],
        weights: WeightsConstraint | None = None,
        *,
        adapter: str | None = None,
        top_logprobs: int | None = None,
        timeout: float | None = None,
    ) -> tuple[Score, ...]:
        """Computes logprobs of given responses, at temperature 1 and without top-p or top-k.

        Each item is a prompt, in any form that `rollout` accepts, and a list of responses as token
        ids. A third member of an item holds further token ids, whose logprobs to return, per
        response and per token. `adapter` is a name as in a rollout. `top_logprobs` is the number of
        most probable tokens to return at each token. `timeout` is the longest silence in seconds;
        None means no limit.
        """
        request = score_request(prompts_and_responses, weights, adapter, top_logprobs)
        call = json_request(
            "POST",
            "/v1/score",
            request,
            headers={"Accept": f"{PACKED_MEDIA_TYPE}, application/json"},
            read_timeout=timeout,
            is_idempotent=True,
            is_packable=True,
        )
        reply = await self._sender.send(call)
        try:
            if not reply.headers.get("content-type", "").startswith(PACKED_MEDIA_TYPE):
                return scores_of(reply.read(ScoreAnswer), request)
            found = unpack_scores(reply.body)
            return scores_of(found.answer, request, found.logprobs)
        except ValueError as error:
            raise BadAnswer(str(error)) from error
