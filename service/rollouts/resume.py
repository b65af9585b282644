"""Resumption of unfinished samples of an earlier rollout (`continue_from`).

The prior tokens stay as they were sampled: their logprobs are those of the weights that generated
them, and their version spans name these. The following tokens are sampled with the active weights.
If the weights are still the same, the KV blocks of the prior tokens may still be cached.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from coppice.wire.rollouts import RolloutRequest, UnfinishedSample, VersionSpan
from service.http.errors import InvalidRequest, PromptTooLong
from service.rollouts.scheduling import TimeSlice

ContinuedSamples = list[UnfinishedSample]


def samples_to_continue(request: RolloutRequest) -> Mapping[int, ContinuedSamples]:
    """Samples to resume by group index; within a group they become its first samples."""
    continued = defaultdict[int, ContinuedSamples](list)
    for sample in () if request.continue_from is None else request.continue_from.samples:
        continued[sample.group].append(sample)
    return continued


def version_spans_of(continued: UnfinishedSample) -> list[VersionSpan]:
    return [VersionSpan(**span.model_dump()) for span in continued.versions]


async def check_continue_from(
    request: RolloutRequest,
    prompts: Sequence[Sequence[int]],
    *,
    max_context_tokens: int,
    vocab_size: int,
) -> None:
    if request.continue_from is None:
        return
    if request.branching is not None:
        raise InvalidRequest("a tree begins anew: it takes no continue_from")
    turn = TimeSlice()
    for index, continued in samples_to_continue(request).items():
        if index >= len(prompts):
            raise InvalidRequest("continue_from names a group that is not there")
        if len(continued) > request.groups[index].n:
            raise InvalidRequest("continue_from has more samples than their group")
        for sample in continued:
            _check(sample, request, len(prompts[index]), max_context_tokens, vocab_size)
            await turn.pause()


def _check(
    sample: UnfinishedSample,
    request: RolloutRequest,
    num_prompt_tokens: int,
    max_context_tokens: int,
    vocab_size: int,
) -> None:
    num_tokens = len(sample.token_ids)
    if len(sample.logprobs) != num_tokens:
        raise InvalidRequest("continue_from needs one logprob a token")
    _check_spans(sample, request)
    if max(sample.token_ids) >= vocab_size:
        raise InvalidRequest(f"token ids must be below {vocab_size}")
    if num_tokens >= (request.sampling.max_tokens or max_context_tokens):
        raise InvalidRequest("a sample to go on with has max_tokens already")
    if num_prompt_tokens + num_tokens >= max_context_tokens:
        raise PromptTooLong(
            f"{num_prompt_tokens} prompt tokens and {num_tokens} to go on from; "
            f"the context holds {max_context_tokens}"
        )


def _check_spans(sample: UnfinishedSample, request: RolloutRequest) -> None:
    at = 0
    for span in sample.versions:
        if span.start != at or span.end <= at:
            raise InvalidRequest("the versions of continue_from must follow one another")
        at = span.end
    if at != len(sample.token_ids):
        raise InvalidRequest("the versions of continue_from must cover its tokens")
    exact_version = request.policy and request.policy.exact_version
    if exact_version is not None and any(span.version != exact_version for span in sample.versions):
        raise InvalidRequest(f"continue_from has tokens of other versions than {exact_version!r}")
