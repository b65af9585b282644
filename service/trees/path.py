"""What grows in the engine: one request, from a fork to its next cut or to its own end."""

from dataclasses import dataclass

from service.trees.budget import Budget
from service.trees.plan import Plan
from service.trees.tree import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How far a path may grow, and what may come of it.

    `limit` counts its tokens. `share` is how many leaves it may come to, `to_come` how many of them
    start only after it. `cut`: at its limit it is cut; `short`: its limit is the budget's doing.
    """

    limit: int
    share: int
    to_come: int = 0
    cut: bool = False
    short: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Path:
    """`start` is the length that it begins with, `depth` how often what leads there was split."""

    id: str
    name: str
    parent: Segment | None
    depth: int
    start: int
    reach: Reach

    @property
    def parent_id(self) -> str | None:
        return None if self.parent is None else self.parent.id

    @property
    def is_first(self) -> bool:
        """Of those that begin where it does."""
        return self.name.endswith("/1")


def reach_of(
    plan: Plan, budget: Budget, share: int, *, start: int, depth: int, among: int
) -> Reach:
    """Of a path that starts together with others, `among` leaves in all. Holds nothing yet."""
    rest = plan.longest - start
    if plan.branching.mode == "entropy":
        part = budget.part(1, among)
        return Reach(limit=min(rest, part), share=share, to_come=share - 1, short=part < rest)
    part = budget.part(share, among)
    cut = plan.cut(start, depth) if share > 1 else None
    if cut is not None and cut - start + share <= part:
        return Reach(limit=cut - start, share=share, to_come=share, cut=True)
    return Reach(limit=min(rest, part), share=1, short=part < rest)
