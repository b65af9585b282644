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
from coppice.wire.columns.logprobs import NumTopLogprobs, OptionalLogprobs, PositionTokenIds
from coppice.wire.rollouts import MAX_SAMPLES_PER_GROUP, Prompt, WeightsConstraint

Response = Annotated[TokenIds, Field(min_length=1, max_length=MAX_TOKENS)]

ResponseTokenIds = Annotated[
    list[PositionTokenIds], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True)
]


class ScoreItem(RequestModel):
    """One prompt and the responses to score.

    `logprob_token_ids[i][j]` are tokens whose logprobs to return at token j of response i, besides
    that of the token itself.
    """

    prompt: Prompt
    responses: Annotated[
        list[Response], Field(min_length=1, max_length=MAX_SAMPLES_PER_GROUP, fail_fast=True)
    ]
    logprob_token_ids: (
        Annotated[
            list[ResponseTokenIds],
            Field(min_length=1, max_length=MAX_SAMPLES_PER_GROUP, fail_fast=True),
        ]
        | None
    ) = None


class ScoreRequest(RequestModel):
    """Body of POST /v1/score, which scores by the model's own distribution, at temperature 1."""

    items: Annotated[list[ScoreItem], Field(min_length=1, max_length=4096, fail_fast=True)]
    weights: WeightsConstraint | None = None
    adapter: AdapterName | None = None
    top_logprobs: NumTopLogprobs | None = None


class ScoredResponse(AnswerModel):
    """Logprobs of one scored response; logprobs[i] belongs to token i of the response.

    The whole response is scored by one weights version and one version of the adapter.
    """

    logprobs: list[float]
    version: str
    adapter: AdapterLabel = None
    top_logprobs: OptionalLogprobs = None
    """Most probable tokens at each token of the response."""
    given_logprobs: OptionalLogprobs = None
    """Logprobs of the tokens in `logprob_token_ids`, in their order."""


class ScoredItem(AnswerModel):
    """Scores of all responses to one prompt, in request order."""

    num_prompt_tokens: int
    responses: list[ScoredResponse]


class ScoreAnswer(AnswerModel):
    """Answer of POST /v1/score: the scores of all prompts, in request order."""

    items: list[ScoredItem]
