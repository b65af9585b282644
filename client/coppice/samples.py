"""A finished sample, as a trainer wants it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coppice.wire.rollouts import FinishReason, VersionSpan


# Arrays have no truth value for ==, so these compare by identity.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One finished sample. logprobs[i] belongs to token_ids[i], which versions label in spans."""

    index: int
    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    text: str | None
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]

    def token_versions(self) -> list[str]:
        """The weights version that made each token."""
        return [span.version for span in self.versions for _ in range(span.start, span.end)]
