"""Group whose samples form a tree: paths are sampled, cut and forked.

Every path is one engine request whose prompt is the group's prompt plus the segments above it. A
fork prefills only the part of this that is not cached, which is one token. In the modes that cut by
position, paths stop at the cut. In mode entropy, paths run to their end and are cut afterwards at
their most uncertain tokens.
"""

import asyncio
import uuid
from collections import Counter
from collections.abc import Awaitable, Collection, Sequence
from dataclasses import dataclass, field

from coppice.wire.columns.token_columns import TokenLists
from coppice.wire.rollouts import GroupAnswer, SegmentFinish
from engine.protocol.generation import Generation
from engine.types.kv import ExportSlot
from engine.types.samples import Completion, SampleRequest
from service.rollouts.group import Group, OnPart
from service.rollouts.trees.path_request import (
    Budget,
    Path,
    PathBounds,
    entropy_forks,
    path_bounds,
    path_request,
    path_tokens,
)
from service.rollouts.trees.plan import Plan, split
from service.rollouts.trees.segment_tree import COMPLETE_FINISHES, Segment, Tree
from service.rollouts.trees.tree_answer import outcome_of, tree_answer

Fork = tuple[Segment | None, int, list[int]]
"""Parent segment of new paths, their depth in splits, and the number of leaves of each."""


@dataclass(slots=True, kw_only=True, eq=False)
class TreeGroup(Group):
    """Group whose samples are the leaves of a tree and share the segments above them.

    `n` is the maximum number of leaves. Cancelling `run` at any point aborts all running paths.
    """

    plan: Plan
    tree: Tree = field(init=False)
    budget: Budget = field(init=False)
    num_complete: int = 0
    _engine: Generation = field(init=False)
    _tasks: asyncio.TaskGroup = field(init=False)
    _done: OnPart = field(init=False)
    _paths: dict[str, Path] = field(default_factory=dict)
    _num_children: Counter[str] = field(default_factory=Counter)
    _was_truncated: bool = False

    def __post_init__(self) -> None:
        self.tree = Tree(str(self.options.index))
        self.budget = Budget(self.plan.branching.max_new_tokens_total)

    async def run(self, engine: Generation, done: OnPart) -> GroupAnswer:
        """Grow the tree and return the answer."""
        self._engine, self._done = engine, done
        self.began_at = asyncio.get_running_loop().time()
        try:
            async with self._deadline(engine), asyncio.TaskGroup() as self._tasks:
                await self._run_until_done()
        finally:
            await engine.abort(list(self._unfinished))
            self._unfinished.clear()
            self._paths.clear()
        return await self._tree_answer()

    @property
    def running_paths(self) -> list[Path]:
        return list(self._paths.values())

    async def _run_until_done(self) -> None:
        plan = self.plan
        share = min(self.options.n, plan.capacity(0), self.budget.remaining)
        if plan.splits_at_prompt:
            await self._start(self._fork_paths([(None, 1, split(share, plan.factor(0)))]))
        else:
            await self._start(self._fork_paths([(None, 0, [share])]))

    def _fork_paths(self, forks: Sequence[Fork]) -> list[Path]:
        num_starting_leaves = sum(sum(shares) for _, _, shares in forks)
        wanted: list[tuple[Segment | None, int, int, PathBounds]] = []
        for parent, depth, shares in forks:
            start = len(self.options.prompt_token_ids) + len(self.tree.token_ids(parent))
            found = [
                path_bounds(
                    self.plan,
                    self.budget,
                    share,
                    start=start,
                    depth=depth,
                    num_starting_leaves=num_starting_leaves,
                )
                for share in shares
            ]
            wanted += [(parent, depth, start, bounds) for bounds in found if bounds.limit > 0]
        return [self._create_path(*each) for each in wanted]

    def _create_path(
        self, parent: Segment | None, depth: int, start: int, bounds: PathBounds
    ) -> Path:
        """Create a path and reserve its maximum length in the tree's token budget."""
        at = "" if parent is None else parent.name
        self._num_children[at] += 1
        self.budget.reserve(bounds.limit)
        self.budget.num_future_leaves += bounds.num_future_leaves
        return Path(
            id=uuid.uuid4().hex,
            name=f"{at}/{self._num_children[at]}",
            parent=parent,
            depth=depth,
            start=start,
            bounds=bounds,
        )

    async def _start(self, paths: Sequence[Path]) -> None:
        """Submit new paths to the engine; if the group is ending, release their tokens instead."""
        if self.end_reason:
            self._was_truncated |= bool(paths)
            for path in paths:
                self._release_budget(path, used=0)
        elif paths:
            await self._submit(paths, self._register(paths))

    def _register(self, paths: Sequence[Path]) -> list[SampleRequest]:
        """Register new paths of the tree as running and return their engine requests."""
        self._paths |= {path.id: path for path in paths}
        self._unfinished |= {path.id for path in paths}
        return [self._path_request(path) for path in paths]

    async def _submit(
        self, paths: Sequence[Path], requests: Sequence[SampleRequest]
    ) -> list[asyncio.Task[Segment | None]]:
        completions = await self._engine.submit(requests)
        unwanted = [path.id for path in paths if self.end_reason or path.id not in self._paths]
        await self._engine.abort(unwanted)
        return [
            self._tasks.create_task(self._await_path(path, completion))
            for path, completion in zip(paths, completions, strict=True)
        ]

    def _path_request(self, path: Path) -> SampleRequest:
        above = [*self.options.prompt_token_ids, *self.tree.token_ids(path.parent)]
        export = self._export_place(path, above)
        return path_request(self.plan, self.options, path, above, group=self.name, export=export)

    def _export_place(self, path: Path, prompt: list[int]) -> ExportSlot | None:
        """KV export slot for a path that is the first at its fork; None for other paths.

        The engine request of that path has the tokens up to the fork as its prompt.
        """
        if self.exports is None or not path.is_first:
            return None
        if path.parent_id is None:
            return self.exports.prompt_slot
        return self.exports.begin(prompt, path.parent_id)

    async def _await_path(self, path: Path, completion: Awaitable[Completion]) -> Segment | None:
        """Wait for a path, add it to the tree, and start the paths that fork from it.

        Returns the last segment of the path, or None if the path was dropped.
        """
        result = await completion
        tokens = await path_tokens(self.plan, self.options, result)
        self._unfinished.discard(path.id)
        self._release_budget(path, used=len(result.token_ids))
        if self.exports is not None and path.is_first:
            self.exports.on_writer_ended(path.parent_id)
        self._note_cached_tokens(0, result)
        if self._paths.pop(path.id, None) is None:
            return None
        finish = self._finish_reason_of(path, result)
        stop_reason = result.stop_reason if finish == "stop" else None
        segment, forks = self._add_to_tree(path, tokens, finish, stop_reason)
        # Reserved before the next await: it was decided from the budget as it is now.
        forked = self._fork_paths(forks)
        for added in self.tree.path(segment)[len(self.tree.path(path.parent)) :]:
            self._done(await self.tree.answer(added))
        await self._count_leaf(segment, forks)
        await self._start(forked)
        return segment

    def _release_budget(self, path: Path, *, used: int) -> None:
        self.budget.release(path.bounds.limit, used=used)
        self.budget.num_future_leaves -= path.bounds.num_future_leaves

    async def _count_leaf(self, segment: Segment, forks: Sequence[Fork]) -> None:
        """Count a finished leaf; abort the running paths once enough leaves are complete."""
        if segment.finish == "cut":
            return
        self.num_done += 1
        self.sample_seconds.append(asyncio.get_running_loop().time() - self.began_at)
        self.num_complete += segment.finish in self.complete_finishes
        if self.num_complete == self.options.num_required and (self._unfinished or forks):
            await self.end(self._engine, "surplus")

    def _finish_reason_of(self, path: Path, result: Completion) -> SegmentFinish:
        finish = self._finish_reason(result)
        if finish != "length":
            return finish
        if path.bounds.cut:
            return self._aborted_reason() if self.end_reason else "cut"
        return "budget" if path.bounds.is_budget_limited else "length"

    # Cuts

    def _add_to_tree(
        self,
        path: Path,
        tokens: TokenLists,
        finish: SegmentFinish,
        stop_reason: int | str | None,
    ) -> tuple[Segment, list[Fork]]:
        """Add a path's tokens to the tree as segments; returns the last one and the new forks."""
        if finish == "cut":
            return self._cut_at_position(path, tokens)
        cuts, shares = entropy_forks(self.plan, path, tokens, finish)
        pieces = tokens.pieces([place - path.start for place in cuts])
        parent, forks = path.parent, list[Fork]()
        for i, piece in enumerate(pieces[:-1]):
            parent = self.tree.add(parent, path.depth + i, f"{path.name}+{i}", piece, "cut")
            forks.append((parent, path.depth + i + 1, shares[i]))
        depth, name = path.depth + len(cuts), f"{path.name}+{len(cuts)}"
        last = self.tree.add(parent, depth, name, pieces[-1], finish, stop_reason)
        unused = path.bounds.share - 1 - sum(map(sum, shares))
        if finish == "stop" and unused and self.plan.branching.on_early_stop == "redistribute":
            forks.append((path.parent, path.depth, [unused]))
        return last, forks

    def _cut_at_position(self, path: Path, tokens: TokenLists) -> tuple[Segment, list[Fork]]:
        shares = split(path.bounds.share, self.plan.factor(path.depth))
        affordable = self.budget.part(min(shares), path.bounds.share) > 0
        finish: SegmentFinish = "cut" if affordable else "budget"
        segment = self.tree.add(path.parent, path.depth, f"{path.name}+0", tokens, finish)
        return segment, [(segment, path.depth + 1, shares)] if affordable else []

    async def _tree_answer(self) -> GroupAnswer:
        self.budget.check()
        answer = await tree_answer(
            self.tree,
            self.options,
            self._done,
            flatten=self.plan.branching.flatten,
            outcome=outcome_of(
                self.tree.leaves(),
                complete_finishes=self.complete_finishes,
                num_required=self.options.num_required,
                was_truncated=self._was_truncated,
                cancelled=self.end_reason == "cancelled",
            ),
            num_cached_tokens=self.cached_tokens.get(0, 0),
            prompt_logprobs=self.prompt_logprobs,
        )
        return self.source.annotated(answer)

    @property
    def complete_finishes(self) -> Collection[SegmentFinish]:
        return COMPLETE_FINISHES
