"""Path: one engine request, from a fork to its next cut or its end."""

from dataclasses import dataclass

from service.trees.budget import Budget
from service.trees.plan import Plan
from service.trees.tree import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class PathBounds:
    """Limits of a path.

    `limit` is its maximum number of tokens. `share` is its maximum number of leaves,
    `num_future_leaves` how many of them start only after it has ended. `cut`: the path is cut when
    it reaches its limit. `is_budget_limited`: the limit comes from the tree's token budget.
    """

    limit: int
    share: int
    num_future_leaves: int = 0
    cut: bool = False
    is_budget_limited: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Path:
    """Running path.

    `start` is its initial length in tokens, prompt included. `depth` is the number of splits before
    it.
    """

    id: str
    name: str
    parent: Segment | None
    depth: int
    start: int
    bounds: PathBounds

    @property
    def parent_id(self) -> str | None:
        return None if self.parent is None else self.parent.id

    @property
    def is_first(self) -> bool:
        """True for the first path of its fork."""
        return self.name.endswith("/1")


def path_bounds(
    plan: Plan, budget: Budget, share: int, *, start: int, depth: int, num_starting_leaves: int
) -> PathBounds:
    """Limits of a path that starts together with others; reserves nothing.

    `num_starting_leaves` is the number of leaves of all paths that start together.
    """
    rest = plan.max_length - start
    if plan.branching.mode == "entropy":
        part = budget.part(1, num_starting_leaves)
        return PathBounds(
            limit=min(rest, part),
            share=share,
            num_future_leaves=share - 1,
            is_budget_limited=part < rest,
        )
    part = budget.part(share, num_starting_leaves)
    cut = plan.cut(start, depth) if share > 1 else None
    if cut is not None and cut - start + share <= part:
        return PathBounds(limit=cut - start, share=share, num_future_leaves=share, cut=True)
    return PathBounds(limit=min(rest, part), share=1, is_budget_limited=part < rest)
