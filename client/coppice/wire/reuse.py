"""Wire types for the reuse of KV of prompt spans at other positions or after other prefixes."""

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
"""Reason why a prompt was prefilled in full, and is exact, although KV reuse was requested."""


class Reuse(RequestModel):
    """KV reuse of named prompt segments.

    `order` is exact: named segments come first, in the order that gives the longest cached prefix.
    With `apply` false the prompt is not changed, and the answer only reports the order.

    `recompute` is approximate: the KV of each named segment was computed without the rest of the
    prompt and is moved to its new position. The first `first_tokens` tokens of each segment are
    prefilled, as are those up to the next KV block boundary.

    `anchors` is approximate: the KV is predicted from anchors. These are prompts that were
    prefilled in full and differ only in the contents of the named segments. The last token is
    prefilled, as are the tokens after the last named segment if they differ. If there are too few
    anchors or none is similar enough, the prompt is prefilled, is exact, and becomes an anchor.
    Anchors are similar enough if the entropy of their similarities is at most `threshold` times its
    maximum.
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
    """KV reuse of a prompt given as segments, in numbers of prompt tokens.

    `tokens_reused` were cached, spliced or predicted. `tokens_computed` were prefilled before the
    first sample. `tokens_prepared` were prefilled as separate segments that were not cached yet.
    `round_trips` is the number of sequential engine requests before the first token: 1, or 2 if
    segments had to be prefilled first. `anchors` is the number of prompts used for the prediction.
    `order` lists the segments' indices in the order with the longest cached prefix; `applied` tells
    whether the prompt was sent in that order.
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
