"""Report of the KV reuse of one group."""

from dataclasses import dataclass, field

from coppice.wire.reuse import ReuseAnswer, ReuseMode, ReuseReason
from coppice.wire.rollouts import GroupAnswer


@dataclass(slots=True, kw_only=True)
class ReuseReport:
    """KV reuse of one group; counts are prompt tokens.

    `num_computed` counts the tokens of the prefill requests before the samples. `exact` is false
    once a token was sampled from KV of another position or of a prediction.
    """

    mode: ReuseMode
    order: list[int] | None = None
    applied: bool = False
    exact: bool = True
    reason: ReuseReason | None = None
    num_computed: int = 0
    num_prepared: int = 0
    num_anchors: int = 0
    round_trips: int = field(default=1)

    def annotated(self, answer: GroupAnswer) -> GroupAnswer:
        last = answer.num_prompt_tokens - answer.num_cached_tokens
        computed = self.num_computed + last
        annotated = ReuseAnswer(
            mode=self.mode,
            tokens_reused=max(0, answer.num_prompt_tokens - computed),
            tokens_computed=computed,
            tokens_prepared=self.num_prepared,
            round_trips=self.round_trips,
            anchors=self.num_anchors,
            order=self.order,
            applied=self.applied,
            reason=self.reason,
        )
        return answer.model_copy(update={"exact": self.exact, "reuse": annotated})


def with_reuse(answer: GroupAnswer, reuse: ReuseReport | None) -> GroupAnswer:
    return answer if reuse is None else reuse.annotated(answer)
