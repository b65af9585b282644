"""Continuation of a suspended group as a new group with the same tokens and results.

Each sample goes on after its last token, with the same seed. It has the tokens that it would have
without the suspension, if the same weights are active.
"""

from dataclasses import replace

from coppice.wire.columns.token_columns import TokenColumns, TokenLists
from service.rollouts.groups.flat_sampler import FlatSampler
from service.rollouts.groups.group import Group
from service.rollouts.groups.options import num_given
from service.rollouts.request import NewRollout

NO_TOKENS: TokenLists = TokenColumns(token_ids=[], logprobs=[], versions=())
"""Tokens of a sample that has finished, or that has none yet and begins anew."""


def can_move(request: NewRollout) -> bool:
    """True if the state of a rollout is in its request, its results and its tokens.

    Of a tree, only the result can be moved (`Rollout.can_suspend`). External trees, images, calls
    of sessions, exported, spliced and kept KV, and logprobs of the prompt have more, and a random
    selection of samples without a seed cannot be repeated. Responses of other servers' routes
    cannot be continued by another replica.
    """
    finish = request.finish
    is_random = finish is not None and finish.num_samples is not None and finish.select == "random"
    is_unseeded = is_random and any(group.seed is None for group in request.groups)
    spans = any(group.spans is not None or group.num_images for group in request.groups)
    is_external = request.branching is not None and request.branching.mode == "external"
    more = (request.kv, request.kv_reuse, request.keep_kv, request.chain, request.prompt_logprobs)
    return (
        request.body is not None
        and not (spans or is_external or is_unseeded)
        and all(value is None for value in more)
    )


def resumed(group: Group) -> Group:
    """Group that continues the suspended samples of `group`, which has ended.

    A reason to end it that was set meanwhile is passed on.
    """
    options, indices = group.options, range(group.options.n)
    tokens = [group.suspended.get(index, NO_TOKENS) for index in indices]
    return Group(
        options=replace(
            options,
            continued=[part if part.token_ids else NO_TOKENS for part in tokens],
            num_given_tokens=[num_given(options, index) for index in indices],
        ),
        sampler=FlatSampler(),
        finish_policy=group.finish_policy,
        end_reason=None if group.end_reason == "suspended" else group.end_reason,
        num_done=group.num_done,
        name=group.name,
        cached_tokens=group.cached_tokens,
        turns=group.turns,
        ended=group.ended,
        seconds_used=group.seconds_used,
        seconds_before=group.elapsed_seconds,
        sample_seconds=group.sample_seconds,
    )
