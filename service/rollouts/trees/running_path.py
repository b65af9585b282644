"""Running path (branch) of a rollout tree, its bounds, and the tree's token budget."""

from dataclasses import dataclass, replace

from coppice.wire.columns.token_columns import TokenLists
from coppice.wire.rollouts import SegmentFinish
from engine.types.samples import Completion
from service.rollouts.groups.options import GroupOptions
from service.rollouts.groups.sample_answer import new_tokens
from service.rollouts.trees.branching_plan import Plan, distribute_leaves, select_entropy_cuts
from service.rollouts.trees.segment import Segment
from service.rollouts.trees.tree_answer import COMPLETE_FINISHES


class Budget:
    """Token budget of one rollout tree; every `reserve` must be followed by one `release`.

    A running path reserves its maximum length, so the bound is never exceeded. Unused tokens return
    to the budget for the paths that start next. Every future leaf gets an equal part of what
    remains.
    """

    def __init__(self, tokens: int) -> None:
        self.remaining = tokens
        self.num_future_leaves = 0

    def part(self, leaves: int, num_starting_leaves: int) -> int:
        """Number of tokens of the remaining budget for a new path with `leaves` leaves.

        The remaining tokens are divided equally among the `num_starting_leaves` leaves of all paths
        that start now, this path included, and the future leaves.
        """
        return self.remaining * leaves // (num_starting_leaves + self.num_future_leaves)

    def reserve(self, bounds: "PathBounds") -> None:
        assert 0 < bounds.limit <= self.remaining, "the path exceeds the tree's token budget"
        self.remaining -= bounds.limit
        self.num_future_leaves += bounds.num_future_leaves

    def release(self, bounds: "PathBounds", *, used: int) -> None:
        assert 0 <= used <= bounds.limit, "a path used more tokens than it had reserved"
        self.remaining += bounds.limit - used
        self.num_future_leaves -= bounds.num_future_leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class PathBounds:
    """Limits of one path of a rollout tree: its tokens, and the leaves that may grow from it.

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
    """Running path of a rollout tree: one engine request that continues the segment `parent`."""

    id: str
    name: str
    parent: Segment
    bounds: PathBounds

    @property
    def start(self) -> int:
        """Length in tokens, prompt included, at which the path begins."""
        return self.parent.end

    @property
    def depth(self) -> int:
        """Number of splits before the path."""
        return self.parent.depth + 1

    @property
    def parent_id(self) -> str | None:
        """Id of the segment that the path continues; None for the prompt."""
        return self.parent.id or None

    @property
    def is_first(self) -> bool:
        """True for the first of the paths that continue the same segment."""
        return self.name.endswith("/1")


async def path_tokens(plan: Plan, options: GroupOptions, result: Completion) -> TokenLists:
    """Valid tokens of a path that has ended."""
    tokens = await new_tokens(options, result)
    if plan.needs_entropy and plan.entropy.source == "sampled_token":
        return replace(tokens, entropy=[-logprob for logprob in tokens.logprobs])
    return tokens


def entropy_forks(
    plan: Plan, path: Path, tokens: TokenLists, finish: SegmentFinish
) -> tuple[list[int], list[list[int]]]:
    """Path lengths at which to cut a path, and the leaves of each new path there."""
    max_cuts = min(plan.entropy.top_n, plan.max_depth - path.depth, path.bounds.share - 1)
    if plan.branching.mode != "entropy" or finish not in COMPLETE_FINISHES or max_cuts < 1:
        return [], []
    entropy = tokens.entropy or []
    cuts = select_entropy_cuts(plan, entropy, start=path.start, max_cuts=max_cuts)
    capacities = [plan.capacity(path.depth + i + 1) for i in range(len(cuts))]
    per_cut = plan.factor(path.depth) - 1
    return cuts, distribute_leaves(path.bounds.share - 1, capacities, per_cut=per_cut)


def path_bounds(
    plan: Plan, budget: Budget, parent: Segment, share: int, num_starting_leaves: int
) -> PathBounds:
    """Compute the limits of a new path below `parent`; reserves no tokens.

    `num_starting_leaves` is the number of leaves of all paths that start together.
    """
    start = parent.end
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
    cut = plan.cut(start, parent.depth + 1) if share > 1 else None
    if cut is not None and cut - start + share <= part:
        return PathBounds(limit=cut - start, share=share, num_future_leaves=share, cut=True)
    return PathBounds(limit=min(rest, part), share=1, is_budget_limited=part < rest)
