"""The small model that drafts: which version serves, how well it does, how its training goes."""

from typing import Literal

from coppice.wire.base import AnswerModel

TrainingState = Literal["off", "running", "paused", "failed"]


class DrafterAcceptance(AnswerModel):
    """What a drafter has done for one version of the weights. `first_accepted` of `first_drafted`
    is how often the first token of a draft was right, however long drafts were."""

    drafter: str
    weights: str
    drafted: int
    accepted: int
    first_drafted: int
    first_accepted: int


class DrafterTraining(AnswerModel):
    """`loss`: of late, a token. `samples_dropped`: ended faster than they could be handed over."""

    state: TrainingState
    num_steps: int
    num_tokens: int
    loss: float
    samples_dropped: int


class DrafterAnswer(AnswerModel):
    """GET /v1/drafter as JSON. `candidate` is on trial, or waits for it; the latest of `acceptance`
    comes last; the others count trials by how they ended."""

    serving: str
    candidate: str | None = None
    acceptance: list[DrafterAcceptance]
    promoted: int
    rolled_back: int
    failed: int
    training: DrafterTraining
