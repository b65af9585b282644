"""Wire types of the draft model: version, acceptance and training state."""

from typing import Literal

from coppice.wire.base import AnswerModel

TrainingState = Literal["off", "running", "paused", "failed"]


class DrafterAcceptance(AnswerModel):
    """Acceptance counts of one drafter under one weights version.

    `first_accepted` / `first_drafted` is the acceptance rate of the first token of each draft,
    which does not depend on the draft length.
    """

    drafter: str
    weights: str
    drafted: int
    accepted: int
    first_drafted: int
    first_accepted: int


class DrafterTraining(AnswerModel):
    """Training state of the drafter.

    `loss` is a recent average per token. `samples_dropped` counts samples that finished faster than
    they could be handed to the trainer.
    """

    state: TrainingState
    num_steps: int
    num_tokens: int
    loss: float
    samples_dropped: int


class DrafterAnswer(AnswerModel):
    """Answer of GET /v1/drafter as JSON.

    `candidate` is in its trial, or waits for it. `acceptance` is ordered from the oldest to the
    latest. `promoted`, `rolled_back` and `failed` count trials by outcome.
    """

    serving: str
    candidate: str | None = None
    acceptance: list[DrafterAcceptance]
    promoted: int
    rolled_back: int
    failed: int
    training: DrafterTraining
