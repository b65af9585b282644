"""POST /v1/score: log-probabilities of given responses, teacher-forced."""

from typing import Annotated

from pydantic import Field

from coppice.wire.base import (
    AdapterLabel,
    AdapterName,
    AnswerModel,
    RequestModel,
    TokenIds,
)
from coppice.wire.rollouts import MAX_SAMPLES_PER_GROUP, MAX_TOKENS, Policy, Prompt

Response = Annotated[TokenIds, Field(min_length=1, max_length=MAX_TOKENS)]


class ScoreItem(RequestModel):
    """One prompt and the responses to score after it."""

    prompt: Prompt
    responses: Annotated[
        list[Response], Field(min_length=1, max_length=MAX_SAMPLES_PER_GROUP, fail_fast=True)
    ]


class ScoreRequest(RequestModel):
    """The body of POST /v1/score. The distribution is the model's own, at temperature 1."""

    items: Annotated[list[ScoreItem], Field(min_length=1, max_length=4096, fail_fast=True)]
    policy: Policy | None = None
    adapter: AdapterName | None = None


class ScoredResponse(AnswerModel):
    """logprobs[i] is of the response's token i. All of one version, never of two, and under one
    version of the adapter that was asked for."""

    logprobs: list[float]
    version: str
    adapter: AdapterLabel = None


class ScoredItem(AnswerModel):
    """An item's responses, in the order they were given."""

    num_prompt_tokens: int
    responses: list[ScoredResponse]


class ScoreAnswer(AnswerModel):
    """Answer of POST /v1/score."""

    items: list[ScoredItem]
