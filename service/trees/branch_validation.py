"""Validation of branch requests and the limits of their paths."""

from coppice.wire.branching import BranchRequest
from service.http.errors import InvalidRequest
from service.trees.budget import Budget
from service.trees.path import PathBounds
from service.trees.plan import Plan, next_cut
from service.trees.tree import Segment


def check_branch(plan: Plan, parent: Segment | None, *, num_leaves: int) -> None:
    if parent is not None and parent.finish != "cut":
        raise InvalidRequest(f"nothing grows from a segment that ended as {parent.finish}")
    if parent is not None and parent.depth >= plan.branching.max_depth:
        raise InvalidRequest(f"max_depth is {plan.branching.max_depth}")
    if num_leaves > plan.branching.max_leaves:
        raise InvalidRequest(f"max_leaves is {plan.branching.max_leaves}")


def path_bounds(plan: Plan, budget: Budget, request: BranchRequest, *, start: int) -> PathBounds:
    """Limits of each path of a branch request."""
    part = budget.remaining // request.n
    if part < 1:
        raise InvalidRequest("max_new_tokens_total is used up")
    rest = plan.max_length - start
    if request.max_tokens is not None:
        cut = next_cut(start + request.max_tokens, plan.block_size)
        if cut < plan.max_length and cut - start <= part:
            return PathBounds(limit=cut - start, share=1, cut=True)
    return PathBounds(limit=min(rest, part), share=1, is_budget_limited=part < rest)
