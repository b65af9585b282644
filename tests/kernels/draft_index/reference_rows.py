"""What runs, slowly: a request's text, and the drafts for it that are not decided yet."""

from dataclasses import dataclass, field

import numpy as np

from kernels.draft_index.calibration import Calibration
from tests.kernels.draft_index.reference_texts import PromptRecord, Text


@dataclass(eq=False, slots=True)
class PendingDraft:
    """A draft that is being compared with what comes."""

    tokens: list[int]
    cells: list[int]
    probabilities: list[np.float32]
    position: int = 0

    def advance(self, tokens: list[int], calibration: Calibration) -> bool:
        """Whether there is more of it to compare with what comes later."""
        for token in tokens:
            at = self.position
            accepted = self.tokens[at] == token
            calibration.update(self.cells[at], self.probabilities[at], accepted=accepted)
            self.position += 1
            if not accepted or self.position == len(self.tokens):
                return False
        return True


@dataclass(eq=False, slots=True, kw_only=True)
class Row:
    prompt: int
    record: PromptRecord
    text: Text
    pending: list[PendingDraft] = field(default_factory=list)

    def append(self, tokens: list[int], version: int, calibration: Calibration) -> None:
        if tokens:
            self.pending = [one for one in self.pending if one.advance(tokens, calibration)]
            begin = len(self.text.tokens)
            self.text.tokens += tokens
            self.text.version = version
            self.record.index(self.text, begin)

    def set_pending(self, draft: PendingDraft) -> None:
        """In place of one that was made here before and has seen no token yet."""
        if self.pending and not self.pending[-1].position:
            self.pending.pop()
        if draft.tokens:
            self.pending.append(draft)
