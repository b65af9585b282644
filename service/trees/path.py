"""What grows in the engine: one request, from a fork to its next cut or to its own end."""

from dataclasses import dataclass

from service.trees.budget import Budget
from service.trees.plan import Plan
from service.trees.tree import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class PathBounds:
    """How far a path may grow, and what may come of it.

    `limit` counts its tokens. `share` is how many leaves it may come to, `num_future_leaves` how
    many of them start only after it. `cut`: at its limit it is cut; `is_budget_limited`: its limit
    is the budget's doing.
    """

    limit: int
    share: int
    num_future_leaves: int = 0
    cut: bool = False
    is_budget_limited: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Path:
    """`start` is the length that it begins with, `depth` how often what leads there was split."""

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
        """Of those that begin where it does."""
        return self.name.endswith("/1")


def path_bounds(
    plan: Plan, budget: Budget, share: int, *, start: int, depth: int, num_starting_leaves: int
) -> PathBounds:
    """Of a path that starts together with others, `num_starting_leaves` leaves in all. Holds
    nothing yet."""
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
