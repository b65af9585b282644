"""Conversion of unfinished samples to the wire format of `continue_from`."""

from collections.abc import Iterable

from coppice.samples import Sample
from coppice.wire.rollouts import ContinueFrom, GivenSpan, UnfinishedSample


def to_continue_from(samples: Iterable[Iterable[Sample]]) -> ContinueFrom | None:
    """Builds `continue_from`, from one list of samples per prompt.

    Samples without tokens are left out: there is nothing to resume.
    """
    given = [
        _unfinished(sample, group)
        for group, of_group in enumerate(samples)
        for sample in of_group
        if len(sample.token_ids)
    ]
    return ContinueFrom(samples=given) if given else None


def _unfinished(sample: Sample, group: int) -> UnfinishedSample:
    return UnfinishedSample(
        group=group,
        token_ids=sample.token_ids.tolist(),
        logprobs=sample.logprobs.tolist(),
        versions=[
            GivenSpan(version=span.version, start=span.start, end=span.end, adapter=span.adapter)
            for span in sample.versions
        ],
    )
