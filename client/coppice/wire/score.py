"""Wire types of POST /v1/score: teacher-forced logprobs of given responses."""

from typing import Annotated

from pydantic import Field

from coppice.wire.base import (
    MAX_TOKENS,
    AdapterLabel,
    AdapterName,
    AnswerModel,
    RequestModel,
    TokenIds,
)
from coppice.wire.rollouts import MAX_SAMPLES_PER_GROUP, Prompt, WeightsConstraint

Response = Annotated[TokenIds, Field(min_length=1, max_length=MAX_TOKENS)]


class ScoreItem(RequestModel):
    """One prompt and the responses to score."""

    prompt: Prompt
    responses: Annotated[
        list[Response], Field(min_length=1, max_length=MAX_SAMPLES_PER_GROUP, fail_fast=True)
    ]


class ScoreRequest(RequestModel):
    """Body of POST /v1/score, which scores by the model's own distribution, at temperature 1."""

    items: Annotated[list[ScoreItem], Field(min_length=1, max_length=4096, fail_fast=True)]
    weights: WeightsConstraint | None = None
    adapter: AdapterName | None = None


class ScoredResponse(AnswerModel):
    """Logprobs of one scored response; logprobs[i] belongs to token i of the response.

    The whole response is scored by one weights version and one version of the adapter.
    """

    logprobs: list[float]
    version: str
    adapter: AdapterLabel = None


class ScoredItem(AnswerModel):
    """Scores of all responses to one prompt, in request order."""

    num_prompt_tokens: int
    responses: list[ScoredResponse]


class ScoreAnswer(AnswerModel):
    """Answer of POST /v1/score: the scores of all prompts, in request order."""

    items: list[ScoredItem]
