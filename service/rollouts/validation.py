"""Request validation across fields, and the capacity that a request needs."""

from coppice.wire.rollouts import Finish, GroupRequest, RolloutRequest
from service.http.errors import InvalidRequest
from service.kv_reuse.spans import check as check_reuse
from service.rollouts.finish_policy import FinishPolicy
from service.rollouts.group import derive_seed
from service.trees.plan import check as check_branching


def check(request: RolloutRequest, *, is_blocking: bool) -> None:
    """Validate a request across its fields.

    `is_blocking`: the caller receives nothing before the rollout has ended.
    """
    check_reuse(request)
    if request.branching is not None:
        for group in request.groups:
            check_branching(request.branching, n=group.n)
        if request.branching.mode == "external" and is_blocking:
            raise InvalidRequest("open a tree with Prefer: respond-async, or as a stream")
        if request.finish is not None and request.finish.policy != "first":
            raise InvalidRequest("a tree's leaves are taken as they come: finish.policy is first")
    if request.adapter is not None and request.kv is not None:
        raise InvalidRequest("prompt KV is exported of the base model alone: leave out kv")
    num_finish_samples = (request.finish and request.finish.samples) or 1
    if any(num_samples_of(request, group) < num_finish_samples for group in request.groups):
        raise InvalidRequest(
            f"finish.samples is {num_finish_samples}, and a group has fewer samples than that"
        )


def num_samples(request: RolloutRequest) -> int:
    return sum(num_samples_of(request, group) for group in request.groups)


def num_samples_of(request: RolloutRequest, group: GroupRequest) -> int:
    """Maximum number of samples that the group may have in the engine at once."""
    return group.n if request.branching is None else request.branching.max_leaves


def num_continued_tokens_of(request: RolloutRequest) -> int:
    """Number of prior tokens of all resumed samples."""
    continue_from = request.continue_from
    return (
        0
        if continue_from is None
        else sum(len(sample.token_ids) for sample in continue_from.samples)
    )


def create_finish_policy(finish: Finish, group: GroupRequest) -> FinishPolicy | None:
    if finish.samples is None:
        return None
    seed = None if group.seed is None else derive_seed(group.seed, "finish")
    return FinishPolicy(finish.policy, num_required=finish.samples, n=group.n, seed=seed)
