"""Reference implementation of running requests: their text and their undecided drafts."""

from dataclasses import dataclass, field

import numpy as np

from tests.kernels.draft_index.acceptance_reference import AcceptanceEstimate
from tests.kernels.draft_index.reference_texts import PromptRecord, Text


@dataclass(eq=False, slots=True)
class PendingDraft:
    """A draft that is being compared with the tokens sampled since."""

    tokens: list[int]
    cells: list[int]
    probabilities: list[np.float32]
    position: int = 0

    def advance(self, tokens: list[int], estimate: AcceptanceEstimate) -> bool:
        """True if some of it remains to be compared with later tokens."""
        for token in tokens:
            at = self.position
            accepted = self.tokens[at] == token
            estimate.update(self.cells[at], self.probabilities[at], accepted=accepted)
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

    def append(self, tokens: list[int], version: int, estimate: AcceptanceEstimate) -> None:
        if tokens:
            self.pending = [one for one in self.pending if one.advance(tokens, estimate)]
            begin = len(self.text.tokens)
            self.text.tokens += tokens
            self.text.version = version
            self.record.index(self.text, begin)

    def set_pending(self, draft: PendingDraft) -> None:
        """Replaces a draft made here earlier that has not been compared with any token."""
        if self.pending and not self.pending[-1].position:
            self.pending.pop()
        if draft.tokens:
            self.pending.append(draft)
