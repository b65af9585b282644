"""State of a suspended tree, as it is sent to another replica and restored there.

Its segments are records of the rollout's log. The random numbers of paths follow from the names of
segments and paths. The tree's token budget and its counts follow from segments and paths.
"""

from collections import Counter
from collections.abc import Sequence

from coppice.wire.moves import MovedPath, MovedTree
from coppice.wire.rollouts import SegmentAnswer
from service.http.errors import InvalidRequest
from service.moves.segment_state import invalid, is_number, sampled_tokens
from service.rollouts.fairness import TimeSlice
from service.trees.path_request import Path, PathBounds
from service.trees.plan import Plan
from service.trees.segment_tree import GeneratedTokens, Segment, Tree
from service.trees.tree_group import TreeGroup

WHERE = "groups"
"""Field of the request that errors name."""
NO_TOKENS = GeneratedTokens(token_ids=[], logprobs=[], entropy=None, versions=[], support=None)


async def moved_tree(group: TreeGroup, segment_ids: Sequence[str]) -> MovedTree:
    """State of a suspended tree; `segment_ids` are those of its records."""
    paths, turn = list[MovedPath](), TimeSlice()
    for path in group.suspended_paths:
        paths.append(await _moved_path(path))
        await turn.pause()
    segments = (group.tree.get_segment(segment_id) for segment_id in segment_ids)
    return MovedTree.model_construct(
        block_size=group.plan.block_size,
        segment_names=[segment.name for segment in segments if segment is not None],
        paths=paths,
    )


async def _moved_path(path: Path) -> MovedPath:
    tokens, bounds = path.tokens or NO_TOKENS, path.bounds
    segment = Segment(
        id=path.name,
        name=path.name,
        parent=path.parent_id,
        depth=path.depth,
        tokens=tokens,
        finish="aborted",
    )
    support = None if tokens.support is None else await tokens.support.encoded()
    return MovedPath.model_construct(
        segment=segment.answer(support, None),
        max_tokens=bounds.limit,
        num_leaves=bounds.share,
        is_cut=bounds.cut,
        is_budget_limited=bounds.is_budget_limited,
    )


def restore_tree(
    group: TreeGroup, moved: MovedTree, segments: Sequence[SegmentAnswer], vocab_size: int
) -> None:
    """Give a new group the tree of a moved one; raises InvalidRequest if it does not fit.

    `segments` are the records of the group, whose ids have been checked. It may take long and is
    called in a thread.
    """
    here, there = group.plan.block_size, moved.block_size
    if here != there:
        raise _invalid("tree", f"is cut at blocks of {there} tokens; here they have {here}")
    if len(moved.segment_names) != len(segments):
        raise _invalid("tree", "needs one name per segment")
    restored = _RestoredTree(group, vocab_size)
    for name, answer in zip(moved.segment_names, segments, strict=True):
        restored.add_segment(name, answer)
    for part in moved.paths:
        restored.add_path(part)
    restored.check_limits()
    group.tree = Tree(str(group.options.index), restored.segments())
    group.suspended_paths, group.num_children = restored.paths, restored.num_children
    finishes = [segment.finish for segment in restored.segments()]
    group.num_done = sum(finish != "cut" for finish in finishes)
    group.num_complete = sum(finish in group.complete_finishes for finish in finishes)


class _RestoredTree:
    """Segments and paths of a moved tree, which are checked one after the other."""

    def __init__(self, group: TreeGroup, vocab_size: int) -> None:
        self.paths: list[Path] = []
        self.num_children = Counter[str]()
        self._group = group
        self._vocab_size = vocab_size
        self._segments: dict[str | None, Segment] = {}
        self._lengths: dict[str | None, int] = {None: len(group.options.prompt_token_ids)}
        self._names = set[str]()

    def segments(self) -> list[Segment]:
        return list(self._segments.values())

    def add_segment(self, name: str, answer: SegmentAnswer) -> None:
        parent = self._parent_of(answer)
        if not _follows(name, parent):
            path_name, _, number = name.rpartition("+")
            self._begin_path(path_name, parent)
            if number != "0":
                raise _invalid("tree", "a name is not that of a segment after its parent")
        self._check_name(name)
        tokens = self._tokens(answer)
        self._lengths[answer.id] = self._lengths[answer.parent] + len(tokens.token_ids)
        self._segments[answer.id] = Segment(
            id=answer.id,
            name=name,
            parent=answer.parent,
            depth=answer.depth,
            tokens=tokens,
            finish=answer.finish_reason,
            stop_reason=answer.stop_reason,
        )

    def add_path(self, moved: MovedPath) -> None:
        answer = moved.segment
        parent = self._parent_of(answer)
        self._begin_path(answer.id, parent)
        self._check_name(f"{answer.id}+0")
        start = self._lengths[answer.parent]
        bounds = _bounds(self._group.plan, moved, start=start)
        if len(answer.token_ids) >= bounds.limit:
            raise _invalid("tree", "a path has all of its tokens")
        path = Path(
            id="",
            name=answer.id,
            parent=parent,
            depth=answer.depth,
            start=start,
            bounds=bounds,
            tokens=self._tokens(answer) if answer.token_ids else None,
        )
        self._check_version(path)
        self.paths.append(path)

    def check_limits(self) -> None:
        """Refuse more leaves or tokens than the request allows, and a cut without a child."""
        branching, options = self._group.plan.branching, self._group.options
        leaves = sum(segment.finish != "cut" for segment in self._segments.values())
        if leaves + sum(path.bounds.share for path in self.paths) > options.n:
            raise _invalid("tree", f"has more than {options.n} leaves")
        used = sum(len(each.tokens.token_ids) for each in self._segments.values())
        reserved = sum(path.bounds.limit for path in self.paths)
        if used + reserved > branching.max_new_tokens_total:
            raise _invalid("tree", f"has more than {branching.max_new_tokens_total} tokens")
        parents = {segment.parent for segment in self._segments.values()}
        parents |= {path.parent_id for path in self.paths}
        if any(each.finish == "cut" and each.id not in parents for each in self.segments()):
            raise _invalid("tree", "nothing follows a segment that ended at a cut")

    def _parent_of(self, answer: SegmentAnswer) -> Segment | None:
        """Parent of a segment or path, whose depth is checked."""
        plan, parent = self._group.plan, self._segments.get(answer.parent)
        if answer.parent is not None and (parent is None or parent.finish != "cut"):
            raise _invalid("tree", "a parent is not a segment that ended at a cut")
        depth = int(plan.splits_at_prompt) if parent is None else parent.depth + 1
        if answer.depth != depth or depth > plan.max_depth:
            raise _invalid("tree", f"a segment or path has the depth {answer.depth}")
        return parent

    def _begin_path(self, name: str, parent: Segment | None) -> None:
        above, _, number = name.rpartition("/")
        if above != ("" if parent is None else parent.name) or not is_number(number):
            raise _invalid("tree", "a name is not that of a path after its parent")
        self.num_children[above] = max(self.num_children[above], int(number))

    def _check_name(self, name: str) -> None:
        if name in self._names:
            raise _invalid("tree", "a name is repeated")
        self._names.add(name)

    def _tokens(self, answer: SegmentAnswer) -> GeneratedTokens:
        """Tokens of a segment, with the tables that the request has, and no others."""
        tokens, options = sampled_tokens(answer, WHERE, self._vocab_size), self._group.options
        tables = (tokens.entropy, tokens.raw_logprobs, tokens.support, tokens.top_logprobs)
        has_support = options.support_vocab_size is not None
        wanted = [self._group.plan.needs_entropy, options.raw_logprobs, has_support, False]
        if [table is not None for table in tables] != wanted:
            raise _invalid("tree", "a segment has not the tables of the request")
        return tokens

    def _check_version(self, path: Path) -> None:
        exact, tokens = self._group.options.exact_version, path.tokens or NO_TOKENS
        if exact is not None and any(span.version != exact for span in tokens.versions):
            raise _invalid("tree", f"a path has tokens of other versions than {exact!r}")


def _follows(name: str, parent: Segment | None) -> bool:
    """True for the name of the segment that follows `parent` in the same path."""
    if parent is None:
        return False
    path_name, _, number = parent.name.rpartition("+")
    return name == f"{path_name}+{int(number) + 1}"


def _bounds(plan: Plan, moved: MovedPath, *, start: int) -> PathBounds:
    """Limits of a path; refuses lengths and cuts that `path_bounds` cannot have for the request.

    The tokens of the tree's budget are only limited in sum, as are the leaves, which also have a
    limit by depth.
    """
    limit, share = moved.max_tokens, moved.num_leaves
    if share > plan.capacity(moved.segment.depth):
        raise _invalid("tree", "a path has more leaves than its depth allows")
    is_entropy = plan.branching.mode == "entropy"
    if start + limit > plan.max_length:
        raise _invalid("tree", "a path exceeds max_tokens or the context")
    is_shorter = not moved.is_cut and start + limit < plan.max_length
    if moved.is_budget_limited != is_shorter:
        raise _invalid("tree", "a path has not the length that max_tokens and the context allow")
    if moved.is_cut and (is_entropy or plan.cut(start, moved.segment.depth) != start + limit):
        raise _invalid("tree", "a path is not cut as the request describes")
    if not is_entropy and moved.is_cut != (share > 1):
        raise _invalid("tree", "a path has one leaf if it is not cut, or else several")
    future = share - 1 if is_entropy else share if moved.is_cut else 0
    return PathBounds(
        limit=limit,
        share=share,
        num_future_leaves=future,
        cut=moved.is_cut,
        is_budget_limited=moved.is_budget_limited,
    )


def _invalid(name: str, message: str) -> InvalidRequest:
    return invalid(WHERE, name, message)
