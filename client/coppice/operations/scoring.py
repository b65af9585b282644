"""Scoring operation: logprobs of given responses, as numpy arrays."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coppice.errors import BadAnswer
from coppice.prompts import PromptLike, prompt_of, token_ids_of
from coppice.transport.messages import json_request
from coppice.transport.retry import RequestSender
from coppice.wire.rollouts import WeightsConstraint
from coppice.wire.score import ScoreAnswer, ScoredItem, ScoreItem, ScoreRequest

TokenIds = Sequence[int] | NDArray[np.integer[Any]]
Scorable = tuple[PromptLike, Iterable[TokenIds]] | ScoreItem
"""A prompt with the responses to score, or a wire object, which is sent unchanged."""


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


def score_request(
    items: Iterable[Scorable], weights: WeightsConstraint | None, adapter: str | None
) -> ScoreRequest:
    """Builds the body of POST /v1/score. Raises TypeError or ValueError if an item is invalid."""
    wire = [_item_of(item, f"item {position}") for position, item in enumerate(items)]
    return ScoreRequest(items=wire, weights=weights, adapter=adapter)


def scores_of(answer: ScoreAnswer, request: ScoreRequest) -> tuple[Score, ...]:
    """Converts an answer of POST /v1/score. Raises ValueError if it does not match the request."""
    return tuple(
        _score_of(scored, asked) for scored, asked in zip(answer.items, request.items, strict=True)
    )


def _item_of(item: Scorable, where: str) -> ScoreItem:
    if isinstance(item, ScoreItem):
        return item
    try:
        prompt, responses = item
    except (TypeError, ValueError):
        raise TypeError(f"{where} is not a pair of a prompt and its responses") from None
    named = f"a response of {where}"
    return ScoreItem(
        prompt=prompt_of(prompt, f"the prompt of {where}"),
        responses=[token_ids_of(response, named) for response in responses],
    )


def _score_of(scored: ScoredItem, asked: ScoreItem) -> Score:
    lengths = [len(response.logprobs) for response in scored.responses]
    if lengths != [len(response) for response in asked.responses]:
        raise ValueError("the response has another number of logprobs than the request has tokens")
    return Score(
        num_prompt_tokens=scored.num_prompt_tokens,
        logprobs=tuple(np.array(item.logprobs, dtype=np.float32) for item in scored.responses),
        versions=tuple(item.version for item in scored.responses),
        adapters=tuple(item.adapter for item in scored.responses),
    )


class ScoreOperations:
    """Client operation that scores given responses."""

    _sender: RequestSender

    async def score(
        self,
        prompts_and_responses: Iterable[Scorable],
        weights: WeightsConstraint | None = None,
        *,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> tuple[Score, ...]:
        """Computes logprobs of given responses, at temperature 1 and without top-p or top-k.

        Each item is a prompt, in any form that `rollout` accepts, and a list of responses as token
        ids. `adapter` is a name as in a rollout. `timeout` is the longest silence in seconds; None
        means no limit.
        """
        request = score_request(prompts_and_responses, weights, adapter)
        call = json_request("POST", "/v1/score", request, read_timeout=timeout, is_idempotent=True)
        answer = (await self._sender.send(call)).read(ScoreAnswer)
        try:
            return scores_of(answer, request)
        except ValueError as error:
            raise BadAnswer(str(error)) from error
