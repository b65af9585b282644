"""Finished sample with its token ids and logprobs as numpy arrays."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coppice.wire.rollouts import FinishReason, VersionSpan


# NumPy's == is elementwise, so these dataclasses compare by identity.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One finished sample.

    logprobs[i] belongs to token_ids[i]. `versions` gives the weights version of each token, as
    ranges of token indices.
    """

    index: int
    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    text: str | None
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]

    def token_versions(self) -> list[str]:
        """The weights version that generated each token."""
        return [span.version for span in self.versions for _ in range(span.start, span.end)]
