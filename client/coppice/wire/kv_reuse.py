"""Wire types for the approximate reuse of cached KV of prompt spans in other prompts."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from coppice.wire.base import AnswerModel, JsonInteger, RequestModel

KvReuseMode = Literal["off", "splice", "predict"]
KvReuseReason = Literal[
    "disabled",
    "unsupported_cache",
    "no_shm",
    "not_movable",
    "nothing_to_reuse",
    "cache_full",
    "not_written",
    "not_loaded",
    "no_observations",
    "entropy_too_high",
    "internal",
]
"""Reason why a prompt was prefilled in full, and is exact, although KV reuse was requested."""


class KvReuse(RequestModel):
    """Rollout option: how to reuse the KV of prompt spans that have a cache key.

    `splice` is approximate: the KV of each span with a cache key was computed without the rest of
    the prompt and is moved to its new position. The first `recompute_tokens` tokens of each span
    are prefilled, as are those up to the next KV block boundary.

    `predict` is approximate: the KV is predicted from observations. These are prompts that were
    prefilled in full and differ only in the texts of their spans with a cache key. The last token
    is prefilled, as are the tokens after the last span with a cache key if they differ. If there
    are too few observations or none is similar enough, the prompt is prefilled, is exact, and
    becomes an observation. Observations are similar enough if the entropy of their similarities is
    at most `max_entropy` times its maximum.
    """

    mode: KvReuseMode
    recompute_tokens: Annotated[int, Field(ge=0, le=65_536), JsonInteger()] | None = None
    max_entropy: Annotated[float, Field(ge=0.0, le=1.0)] | None = None

    @model_validator(mode="after")
    def _of_its_mode(self) -> Self:
        if self.recompute_tokens is not None and self.mode != "splice":
            raise ValueError("recompute_tokens needs mode splice")
        if self.max_entropy is not None and self.mode != "predict":
            raise ValueError("max_entropy needs mode predict")
        return self


class KvReuseAnswer(AnswerModel):
    """KV reuse of a prompt given as spans, in numbers of tokens.

    `num_reused_tokens` were cached, spliced or predicted. `num_computed_tokens` were prefilled
    before the first sample. `num_prepared_tokens` were prefilled as separate spans that were not
    cached yet. `num_round_trips` is the number of sequential engine requests before the first
    token: 1, or 2 if spans had to be prefilled first. `num_observations` is the number of prompts
    used for the prediction.
    """

    mode: KvReuseMode
    num_reused_tokens: int
    num_computed_tokens: int
    num_prepared_tokens: int = 0
    num_round_trips: int = 1
    num_observations: int = 0
    reason: KvReuseReason | None = None
