"""What a request asks for: what is wrong with it as a whole, and how much it takes."""

from coppice.wire.rollouts import Finish, GroupRequest, RolloutRequest
from service.http.errors import InvalidRequest
from service.kv_reuse.validation import check as check_reuse
from service.rollouts.finish_policy import Enough
from service.rollouts.group import stream
from service.trees.plan import check as check_branching


def check(request: RolloutRequest, *, waits: bool) -> None:
    """What its fields do not say one by one. `waits`: its caller hears nothing before the end."""
    check_reuse(request)
    if request.branching is not None:
        for group in request.groups:
            check_branching(request.branching, n=group.n)
        if request.branching.mode == "external" and waits:
            raise InvalidRequest("open a tree with Prefer: respond-async, or as a stream")
        if request.finish is not None and request.finish.policy != "first":
            raise InvalidRequest("a tree's leaves are taken as they come: finish.policy is first")
    if request.adapter is not None and request.kv is not None:
        raise InvalidRequest("prompt KV is exported of the base model alone: leave out kv")
    enough = (request.finish and request.finish.samples) or 1
    if any(num_samples_of(request, group) < enough for group in request.groups):
        raise InvalidRequest(f"finish.samples is {enough}, and a group has fewer samples than that")


def num_samples(request: RolloutRequest) -> int:
    return sum(num_samples_of(request, group) for group in request.groups)


def num_samples_of(request: RolloutRequest, group: GroupRequest) -> int:
    """The most that it may have in the engine at once."""
    return group.n if request.branching is None else request.branching.max_leaves


def num_continued(request: RolloutRequest) -> int:
    """Tokens that samples bring along."""
    given = request.continue_from
    return 0 if given is None else sum(len(sample.token_ids) for sample in given.samples)


def rule_of(finish: Finish, group: GroupRequest) -> Enough | None:
    if finish.samples is None:
        return None
    seed = None if group.seed is None else stream(group.seed, "finish")
    return Enough(finish.policy, needed=finish.samples, n=group.n, seed=seed)
