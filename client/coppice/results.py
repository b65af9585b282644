"""What a rollout answers, as a trainer wants it: arrays of token ids and of logprobs.

The arrays are writable and owned by nobody else, so torch.from_numpy takes them without a copy.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coppice.wire.rollouts import (
    FinishReason,
    GroupHead,
    Outcome,
    RolloutAnswer,
    SampleAnswer,
    Usage,
    VersionSpan,
)


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """One prompt and its samples, in order of their index."""

    id: str
    index: int
    outcome: Outcome
    exact: bool
    num_prompt_tokens: int
    num_cached_tokens: int
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutResult:
    """All groups, in the order in which they were asked for."""

    id: str
    outcome: Outcome
    groups: tuple[Group, ...]
    usage: Usage


def sample_of(answer: SampleAnswer) -> Sample:
    return Sample(
        index=answer.index,
        token_ids=np.array(answer.token_ids, dtype=np.int64),
        logprobs=np.array(answer.logprobs, dtype=np.float32),
        text=answer.text,
        finish_reason=answer.finish_reason,
        versions=tuple(answer.versions),
    )


def group_of(head: GroupHead, samples: Iterable[Sample]) -> Group:
    return Group(
        id=head.id,
        index=head.index,
        outcome=head.outcome,
        exact=head.exact,
        num_prompt_tokens=head.num_prompt_tokens,
        num_cached_tokens=head.num_cached_tokens,
        samples=tuple(sorted(samples, key=lambda sample: sample.index)),
    )


def result_of(answer: RolloutAnswer) -> RolloutResult:
    groups = [group_of(group, map(sample_of, group.samples)) for group in answer.groups]
    return RolloutResult(
        id=answer.id,
        outcome=answer.outcome,
        groups=tuple(sorted(groups, key=lambda group: group.index)),
        usage=answer.usage,
    )
