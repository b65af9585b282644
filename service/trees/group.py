"""A group whose samples are a tree: paths grow, are cut, and fork.

Every path is one engine request whose prompt is the path that leads to it, so a fork costs what of
its prompt is not cached: one token. Paths that are cut by place stop there; paths that are cut by
entropy grow to their end and are cut afterwards, where they were least certain.
"""

import asyncio
import uuid
from collections import Counter
from collections.abc import Awaitable, Collection, Sequence
from dataclasses import dataclass, field, replace

from coppice.wire.rollouts import (
    GroupAnswer,
    SegmentFinish,
)
from engine.kv_types import ExportSlot
from engine.protocol import Completion, Engine, SampleRequest
from service.rollouts.group import Group, PartDone, stream
from service.trees.answer import WHOLE, outcome_of, row_answer
from service.trees.budget import Budget
from service.trees.entropy_split import deal, entropy_cuts
from service.trees.path import Path, Reach, reach_of
from service.trees.plan import Plan, split
from service.trees.tokens import Grown, grown_of
from service.trees.tree import Segment, Tree

Fork = tuple[Segment | None, int, list[int]]
"""Where paths begin, how often what leads there was split, and each path's share of leaves."""


@dataclass(slots=True, kw_only=True, eq=False)
class TreeGroup(Group):
    """`n` is the most leaves that it may come to. Cancelling `run` anywhere ends all its paths."""

    plan: Plan
    tree: Tree = field(init=False)
    budget: Budget = field(init=False)
    num_cached_tokens: int | None = None
    num_whole: int = 0
    _engine: Engine = field(init=False)
    _tasks: asyncio.TaskGroup = field(init=False)
    _done: PartDone = field(init=False)
    _paths: dict[str, Path] = field(default_factory=dict)
    _num_forked: Counter[str] = field(default_factory=Counter)
    _stunted: bool = False

    def __post_init__(self) -> None:
        self.tree = Tree(str(self.index))
        self.budget = Budget(self.plan.branching.max_new_tokens_total)

    async def run(self, engine: Engine, done: PartDone) -> GroupAnswer:
        self._engine, self._done = engine, done
        self.began_at = asyncio.get_running_loop().time()
        try:
            async with self._deadline(engine), asyncio.TaskGroup() as self._tasks:
                await self._live()
        finally:
            await engine.abort(list(self._unfinished))
            self._unfinished.clear()
            self._paths.clear()
        return await self._tree_answer()

    @property
    def growing(self) -> list[str | None]:
        """Of each path that grows, the segment that it goes on from."""
        return [path.parent_id for path in self._paths.values()]

    async def _live(self) -> None:
        plan = self.plan
        share = min(self.n, plan.capacity(0), self.budget.left)
        if plan.splits_at_prompt:
            await self._start(self._forked([(None, 1, split(share, plan.factor(0)))]))
        else:
            await self._start(self._forked([(None, 0, [share])]))

    def _forked(self, forks: Sequence[Fork]) -> list[Path]:
        among = sum(sum(shares) for _, _, shares in forks)
        wanted: list[tuple[Segment | None, int, int, Reach]] = []
        for parent, depth, shares in forks:
            start = len(self.prompt_token_ids) + len(self.tree.token_ids(parent))
            found = [
                reach_of(self.plan, self.budget, share, start=start, depth=depth, among=among)
                for share in shares
            ]
            wanted += [(parent, depth, start, reach) for reach in found if reach.limit > 0]
        return [self._path(*each) for each in wanted]

    def _path(self, parent: Segment | None, depth: int, start: int, reach: Reach) -> Path:
        """It holds its tokens from here on."""
        at = "" if parent is None else parent.name
        self._num_forked[at] += 1
        self.budget.take(reach.limit)
        self.budget.leaves_to_come += reach.to_come
        return Path(
            id=uuid.uuid4().hex,
            name=f"{at}/{self._num_forked[at]}",
            parent=parent,
            depth=depth,
            start=start,
            reach=reach,
        )

    async def _start(self, paths: Sequence[Path]) -> None:
        """Whatever begins together enters the engine together."""
        if self.ending or not paths:
            self._stunted |= bool(paths)
            for path in paths:
                self._return_held(path, used=0)
            return
        await self._submit(paths, self._entered(paths))

    def _entered(self, paths: Sequence[Path]) -> list[SampleRequest]:
        """From here on they count as growing."""
        self._paths |= {path.id: path for path in paths}
        self._unfinished |= {path.id for path in paths}
        return [self._path_request(path) for path in paths]

    async def _submit(
        self, paths: Sequence[Path], requests: Sequence[SampleRequest]
    ) -> list[asyncio.Task[Segment | None]]:
        completions = await self._engine.submit(requests)
        unwanted = [path.id for path in paths if self.ending or path.id not in self._paths]
        await self._engine.abort(unwanted)
        return [
            self._tasks.create_task(self._follow(path, completion))
            for path, completion in zip(paths, completions, strict=True)
        ]

    def _path_request(self, path: Path) -> SampleRequest:
        seed = None if self.seed is None else stream(self.seed, path.name)
        prompt = [*self.prompt_token_ids, *self.tree.token_ids(path.parent)]
        topk = self.plan.wants_entropy and self.plan.entropy.source == "topk"
        return SampleRequest(
            id=path.id,
            prompt_token_ids=prompt,
            sampling=replace(self.sampling, max_tokens=path.reach.limit),
            seed=seed,
            priority=self.priority,
            cache_salt=self.cache_salt,
            entropy_over=self.plan.entropy.k if topk else 0,
            export=self._export_place(path, prompt),
            group=self.name,
            speculation=self.speculation,
            adapter=self.adapter,
        )

    def _export_place(self, path: Path, prompt: list[int]) -> ExportSlot | None:
        """The first that goes on from somewhere has all that leads there for its prompt."""
        if self.exports is None or not path.is_first:
            return None
        if path.parent_id is None:
            return self.exports.prompt_place
        return self.exports.begin(prompt, path.parent_id)

    async def _follow(self, path: Path, completion: Awaitable[Completion]) -> Segment | None:
        """The segment that the path ends with, unless it was dropped meanwhile."""
        result = await completion
        self._unfinished.discard(path.id)
        self._return_held(path, used=len(result.token_ids))
        if self.exports is not None and path.is_first:
            self.exports.writer_ended(path.parent_id)
        if self.num_cached_tokens is None:
            self.num_cached_tokens = result.num_cached_tokens
        if self._paths.pop(path.id, None) is None:
            return None
        grown = grown_of(self.plan, result, self.adapter).part(0, self._kept(result))
        segment, forks = self._placed(path, grown, self._finish_of(path, result))
        await self._count_leaf(segment, forks)
        await self._start(self._forked(forks))
        return segment

    def _return_held(self, path: Path, *, used: int) -> None:
        self.budget.give_back(path.reach.limit, used=used)
        self.budget.leaves_to_come -= path.reach.to_come

    async def _count_leaf(self, segment: Segment, forks: Sequence[Fork]) -> None:
        """As with plain samples, whoever completes what is enough ends the others at once."""
        if segment.finish == "cut":
            return
        self.num_done += 1
        self.sample_seconds.append(asyncio.get_running_loop().time() - self.began_at)
        self.num_whole += segment.finish in self.whole
        if self.num_whole == self.enough and (self._unfinished or forks):
            await self.end(self._engine, "surplus")

    def _finish_of(self, path: Path, result: Completion) -> SegmentFinish:
        finish = self._finish_reason(result)
        if finish != "length":
            return finish
        if path.reach.cut:
            return "cut" if not self.ending else self._ended_as()
        return "budget" if path.reach.short else "length"

    # Cuts

    def _placed(
        self, path: Path, grown: Grown, finish: SegmentFinish
    ) -> tuple[Segment, list[Fork]]:
        """Adds what grew to the tree; its last segment, and where paths fork now."""
        if finish == "cut":
            return self._cut_by_place(path, grown)
        places, shares = self._entropy_forks(path, grown, finish)
        pieces = grown.pieces([place - path.start for place in places])
        parent, forks = path.parent, list[Fork]()
        for i, piece in enumerate(pieces[:-1]):
            parent = self._added(parent, path.depth + i, f"{path.name}+{i}", piece, "cut")
            forks.append((parent, path.depth + i + 1, shares[i]))
        last = self._added(
            parent, path.depth + len(places), f"{path.name}+{len(places)}", pieces[-1], finish
        )
        unused = path.reach.share - 1 - sum(map(sum, shares))
        if finish == "stop" and unused and self.plan.branching.on_early_stop == "redistribute":
            forks.append((path.parent, path.depth, [unused]))
        return last, forks

    def _cut_by_place(self, path: Path, grown: Grown) -> tuple[Segment, list[Fork]]:
        shares = split(path.reach.share, self.plan.factor(path.depth))
        affordable = self.budget.part(min(shares), path.reach.share) > 0
        finish: SegmentFinish = "cut" if affordable else "budget"
        segment = self._added(path.parent, path.depth, f"{path.name}+0", grown, finish)
        return segment, [(segment, path.depth + 1, shares)] if affordable else []

    def _entropy_forks(
        self, path: Path, grown: Grown, finish: SegmentFinish
    ) -> tuple[list[int], list[list[int]]]:
        plan = self.plan
        most = min(plan.entropy.top_n, plan.max_depth - path.depth, path.reach.share - 1)
        if plan.branching.mode != "entropy" or finish not in WHOLE or most < 1:
            return [], []
        entropy = grown.entropy or []
        places = entropy_cuts(plan, entropy, start=path.start, most=most)
        capacities = [plan.capacity(path.depth + i + 1) for i in range(len(places))]
        per_cut = plan.factor(path.depth) - 1
        return places, deal(path.reach.share - 1, capacities, per_cut=per_cut)

    def _added(
        self,
        parent: Segment | None,
        depth: int,
        name: str,
        grown: Grown,
        finish: SegmentFinish,
    ) -> Segment:
        segment = self.tree.add(parent, depth, name, grown, finish)
        self._done(segment.answer())
        return segment

    # The answer

    async def _tree_answer(self) -> GroupAnswer:
        self.budget.check()
        flatten = self.plan.branching.flatten
        rows = self.tree.rows() if flatten else []
        samples = [await row_answer(i, row, self.decode) for i, row in enumerate(rows)]
        for sample in samples:
            self._done(sample)
        leaves = self.tree.leaves()
        return GroupAnswer(
            id=self.id,
            index=self.index,
            outcome=outcome_of(
                leaves,
                whole=self.whole,
                enough=self.enough,
                stunted=self._stunted,
                cancelled=self.ending == "cancelled",
            ),
            num_prompt_tokens=len(self.prompt_token_ids),
            num_cached_tokens=self.num_cached_tokens or 0,
            samples=samples,
            segments=self.tree.answers(),
            leaves=[leaf.id for leaf in leaves],
            num_dropped=self.tree.num_dropped,
        )

    @property
    def whole(self) -> Collection[SegmentFinish]:
        return WHOLE
