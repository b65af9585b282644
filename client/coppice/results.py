"""What a rollout answers, as a trainer wants it: arrays of token ids and of logprobs.

The arrays are writable and owned by nobody else, so torch.from_numpy takes them without a copy.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coppice.wire.kv import KvHandle, KvReason
from coppice.wire.packed import Packed
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
    kv: KvHandle | None = None
    kv_reason: KvReason | None = None
    """Why there is no handle, where one was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutResult:
    """All groups, in the order in which they were asked for."""

    id: str
    outcome: Outcome
    groups: tuple[Group, ...]
    usage: Usage


def sample_of(answer: SampleAnswer) -> Sample:
    return _sample_of(answer, answer.token_ids, answer.logprobs)


def group_of(head: GroupHead, samples: Iterable[Sample]) -> Group:
    return Group(
        id=head.id,
        index=head.index,
        outcome=head.outcome,
        exact=head.exact,
        num_prompt_tokens=head.num_prompt_tokens,
        num_cached_tokens=head.num_cached_tokens,
        kv=head.kv,
        kv_reason=head.kv_reason,
        samples=tuple(sorted(samples, key=lambda sample: sample.index)),
    )


def result_of(answer: RolloutAnswer) -> RolloutResult:
    return _result_of(answer, map(sample_of, _samples_of(answer)))


def result_of_packed(packed: Packed) -> RolloutResult:
    """ValueError if the arrays are not of these samples."""
    answers = list(_samples_of(packed.answer))
    lengths = np.diff(packed.offsets)
    if len(lengths) != len(answers) or (lengths < 0).any() or packed.offsets[0] != 0:
        raise ValueError("the offsets are not of these samples")
    if not packed.offsets[-1] == len(packed.token_ids) == len(packed.logprobs):
        raise ValueError("the offsets are not of these tokens")
    borders = packed.offsets[1:-1]
    parts = zip(
        answers,
        np.split(packed.token_ids, borders),
        np.split(packed.logprobs, borders),
        # Without a sample there are no borders, and still one part.
        strict=bool(answers),
    )
    return _result_of(packed.answer, (_sample_of(*part) for part in parts))


def _samples_of(answer: RolloutAnswer) -> Iterator[SampleAnswer]:
    return (sample for group in answer.groups for sample in group.samples)


def _result_of(answer: RolloutAnswer, samples: Iterator[Sample]) -> RolloutResult:
    """The samples are those of the answer, in its order."""
    groups = [group_of(group, [next(samples) for _ in group.samples]) for group in answer.groups]
    return RolloutResult(
        id=answer.id,
        outcome=answer.outcome,
        groups=tuple(sorted(groups, key=lambda group: group.index)),
        usage=answer.usage,
    )


def _sample_of(answer: SampleAnswer, token_ids: ArrayLike, logprobs: ArrayLike) -> Sample:
    return Sample(
        index=answer.index,
        token_ids=np.array(token_ids, dtype=np.int64),
        logprobs=np.array(logprobs, dtype=np.float32),
        text=answer.text,
        finish_reason=answer.finish_reason,
        versions=tuple(answer.versions),
    )
