"""Reuse of a segment's keys and values behind another prefix than it was computed behind."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from coppice.wire.base import AnswerModel, JsonInteger, RequestModel

ReuseMode = Literal["off", "order", "recompute", "anchors"]
ReuseReason = Literal[
    "disabled",
    "unsupported_cache",
    "no_shm",
    "not_movable",
    "nothing_placed",
    "store_full",
    "not_written",
    "not_loaded",
    "no_anchor",
    "not_shareable",
    "internal",
]
"""Why a prompt was computed whole, and is exact, though segments were to be placed."""


class Reuse(RequestModel):
    """What may be done so that segments with a name are not computed again.

    `order` is exact: they come first, in the order that makes most of them a prefix that is cached;
    with `apply` false the prompt stays as it is, and the answer says the order alone.

    `recompute` is approximate: but for the first `first_tokens` tokens of each, which are computed,
    and those up to where a cache block begins, their keys and values are those of the segment
    alone, moved to where it stands.

    `anchors` is approximate: keys and values of all but the last token, and but for what follows
    the last name where that differs, are predicted from prompts that differ from this one in what
    their named segments say, and were computed. Where too few are kept, or none is near enough,
    this one is computed, exactly, and kept for others. They are near enough where the entropy of
    how near they are is at most `threshold` of the most that it may be.
    """

    mode: ReuseMode
    apply: bool | None = None
    first_tokens: Annotated[int, Field(ge=0, le=65_536), JsonInteger()] | None = None
    threshold: Annotated[float, Field(ge=0.0, le=1.0)] | None = None

    @model_validator(mode="after")
    def _of_its_mode(self) -> Self:
        if self.apply is not None and self.mode != "order":
            raise ValueError("apply is for the mode order")
        if self.first_tokens is not None and self.mode != "recompute":
            raise ValueError("first_tokens is for the mode recompute")
        if self.threshold is not None and self.mode != "anchors":
            raise ValueError("threshold is for the mode anchors")
        return self


class ReuseAnswer(AnswerModel):
    """What became of a prompt in segments. Counts are of prompt tokens.

    `tokens_reused` were cached, placed or predicted, `tokens_computed` computed, before the first
    sample; `tokens_prepared` of segments alone, because they were not kept yet. `round_trips` are
    the requests that followed one another until there was a first token: 1, or 2 where segments had
    to be computed before. From so many `anchors` the prompt was predicted. `order` are the
    segments' indices in the order that was, or would be, most of a prefix.
    """

    mode: ReuseMode
    tokens_reused: int
    tokens_computed: int
    tokens_prepared: int = 0
    round_trips: int = 1
    anchors: int = 0
    order: list[int] | None = None
    applied: bool = False
    reason: ReuseReason | None = None
