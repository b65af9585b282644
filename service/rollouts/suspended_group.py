"""Continuation of a suspended group: a new group with the tokens and results of the old one.

Each sample goes on after its last token, with the same seed. It has the tokens that it would have
without the suspension, if the same weights are active.
"""

from collections.abc import Sequence
from dataclasses import replace

from coppice.wire.kv_versions import GivenKvSpan
from coppice.wire.rollouts import (
    GivenSpan,
    SampleAnswer,
    UnfinishedSample,
)
from coppice.wire.support import GivenSupport, SupportAnswer
from service.prompt_kv.prompt_source import PrefilledPrompt
from service.rollouts.group import Group
from service.rollouts.group_options import GroupOptions, num_given
from service.rollouts.request import NewRollout
from service.rollouts.supports import supports_of_answer


def can_move(request: NewRollout) -> bool:
    """True if the state of a rollout is in its request, its results and its tokens.

    Of a tree, only the result can be moved (`Rollout.can_suspend`). External trees, calls of
    sessions, exported, spliced and kept KV, routed experts, and logprobs of further tokens have
    more, and a random selection of samples without a seed cannot be repeated. Responses of other
    servers' routes cannot be continued by another replica.
    """
    finish = request.finish
    is_random = finish is not None and finish.num_samples is not None and finish.select == "random"
    is_unseeded = is_random and any(group.seed is None for group in request.groups)
    spans = any(group.spans is not None for group in request.groups)
    is_external = request.branching is not None and request.branching.mode == "external"
    more = (request.kv, request.kv_reuse, request.keep_kv, request.chain)
    tables = (request.top_logprobs, request.logprob_token_ids, request.prompt_logprobs)
    return (
        request.body is not None
        and not (spans or is_external or is_unseeded or request.return_routed_experts)
        and all(value is None for value in (*more, *tables))
    )


async def resumed(group: Group) -> Group:
    """Group that continues the suspended samples of `group`, which has ended.

    The caller passes on a reason to end it that was set meanwhile.
    """
    return Group(
        options=await _continued(group.options, group.suspended),
        source=PrefilledPrompt(),
        finish_policy=group.finish_policy,
        num_done=group.num_done,
        name=group.name,
        cached_tokens=group.cached_tokens,
        turns=group.turns,
        ended=group.ended,
        seconds_used=group.seconds_used,
        seconds_before=group.elapsed_seconds,
        sample_seconds=group.sample_seconds,
    )


async def _continued(options: GroupOptions, suspended: Sequence[SampleAnswer]) -> GroupOptions:
    parts = {part.index: part for part in suspended}
    indices = range(options.n)
    size = options.support_vocab_size
    return replace(
        options,
        continued=[unfinished(parts.get(index)) for index in indices],
        num_given_tokens=[num_given(options, index) for index in indices],
        given_supports=[]
        if size is None
        else [await supports_of_answer(_support(parts, index), size) for index in indices],
    )


def _support(parts: dict[int, SampleAnswer], index: int) -> SupportAnswer | None:
    return parts[index].support if index in parts else None


def unfinished(part: SampleAnswer | None) -> UnfinishedSample:
    """Tokens of a suspended sample; none of one that has finished.

    Constructed without validation, which refuses samples without tokens.
    """
    if part is None:
        return UnfinishedSample.model_construct(token_ids=[], logprobs=[], versions=[])
    return UnfinishedSample.model_construct(
        token_ids=part.token_ids,
        logprobs=part.logprobs,
        raw_logprobs=part.raw_logprobs,
        versions=[GivenSpan.model_construct(**dict(span)) for span in part.versions],
        kv_versions=[GivenKvSpan.model_construct(**dict(span)) for span in part.kv_versions],
        support=None
        if part.support is None
        else GivenSupport.model_construct(**dict(part.support)),
    )
