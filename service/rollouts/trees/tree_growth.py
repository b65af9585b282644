"""Growth of a rollout tree: runs each path as an engine request and adds it as a segment.

Every path is one engine request whose prompt is the group's prompt plus the segments above it. A
fork prefills only the part of this that is not cached, which is one token.
"""

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from coppice.wire.columns.token_columns import TokenLists
from coppice.wire.rollouts import GroupAnswer, SegmentFinish
from engine.protocol.generation import Generation
from engine.types.kv import ExportSlot
from engine.types.samples import Completion, SampleRequest
from service.rollouts.groups.group import Group, OnPart
from service.rollouts.groups.options import GroupOptions, derive_seed
from service.rollouts.trees.branching_plan import Plan
from service.rollouts.trees.running_path import Budget, Path, PathBounds, path_tokens
from service.rollouts.trees.segment import Segment
from service.rollouts.trees.token_tree import TokenTree
from service.rollouts.trees.tree_answer import (
    COMPLETE_FINISHES,
    kept_answer,
    leaves_of,
    outcome_of,
    row_answer,
    with_num_leaves,
)

Grow = Callable[[Path, TokenLists, SegmentFinish, int | str | None], tuple[Segment, Sequence[Path]]]
"""Adds the tokens of a path that has ended to the tree; returns its last segment, and new paths."""


class TreePaths:
    """Paths and segments of one tree, whose leaves are the samples of a group.

    The tree grows below `root`, which has the tokens of the prompt. `was_truncated`: the tree was
    ended before it was complete. Leaves with one of `complete_finishes` are complete.
    """

    def __init__(
        self,
        plan: Plan,
        options: GroupOptions,
        grow: Grow,
        complete_finishes: Collection[SegmentFinish] = COMPLETE_FINISHES,
    ) -> None:
        self.plan = plan
        self.tree = TokenTree(str(options.index))
        self.root = Segment(
            id="",
            token_ids=np.asarray(options.prompt_token_ids, np.int32),
            depth=0 if plan.splits_at_prompt else -1,
        )
        self.budget = Budget(plan.branching.max_new_tokens_total)
        self.running: dict[str, Path] = {}
        self.was_truncated = False
        self._grow = grow
        self._complete_finishes = complete_finishes
        self._num_complete = 0
        self._num_children = Counter[str]()

    @asynccontextmanager
    async def sampling(self, group: Group, engine: Generation, done: OnPart) -> AsyncIterator[None]:
        """Context manager in which paths are sampled; all have ended on exit."""
        self.group, self.engine, self._done = group, engine, done
        group.began_at = asyncio.get_running_loop().time()
        try:
            async with group.deadline(engine), asyncio.TaskGroup() as self.tasks:
                yield
        finally:
            self.running.clear()

    def create(self, parent: Segment, bounds: PathBounds) -> Path:
        """Create a path and reserve its maximum length in the tree's token budget."""
        self._num_children[parent.name] += 1
        self.budget.reserve(bounds)
        return Path(
            id=uuid.uuid4().hex,
            name=f"{parent.name}/{self._num_children[parent.name]}",
            parent=parent,
            bounds=bounds,
        )

    async def start(self, paths: Sequence[Path]) -> None:
        """Submit new paths to the engine; if the group is ending, release their tokens instead."""
        if self.group.ends:
            self.was_truncated |= bool(paths)
            for path in paths:
                self.budget.release(path.bounds, used=0)
        elif paths:
            await self.submit(paths)

    def submit(
        self, paths: Sequence[Path]
    ) -> Coroutine[Any, Any, list["asyncio.Task[Segment | None]"]]:
        """Register new paths as running; the coroutine submits them to the engine."""
        self.running |= {path.id: path for path in paths}
        for path in paths:
            self.group.on_submitted(path.id)
        return self._submit(paths, [self._request(path) for path in paths])

    async def _submit(
        self, paths: Sequence[Path], requests: Sequence[SampleRequest]
    ) -> list["asyncio.Task[Segment | None]"]:
        completions = await self.engine.submit(requests)
        unwanted = [path.id for path in paths if self.group.ends or path.id not in self.running]
        await self.engine.abort(unwanted)
        return [
            self.tasks.create_task(self._await_path(path, completion))
            for path, completion in zip(paths, completions, strict=True)
        ]

    def _request(self, path: Path) -> SampleRequest:
        plan, options = self.plan, self.group.options
        prompt, seed = [*options.prompt_token_ids], options.seed
        for each in path.parent.path():
            prompt += each.sample.token_ids if each.sample else ()
        is_top_k = plan.needs_entropy and plan.entropy.source == "topk"
        return self.group.request(
            path.id,
            prompt,
            seed=None if seed is None else derive_seed(seed, path.name),
            num_prior_tokens=len(prompt) - len(options.prompt_token_ids),
            max_tokens=path.bounds.limit,
            entropy_top_k=plan.entropy.k if is_top_k else 0,
            export=self._export_place(path, prompt),
        )

    def _export_place(self, path: Path, prompt: list[int]) -> ExportSlot | None:
        """KV export slot for a path that is the first at its fork; None for other paths.

        The engine request of that path has the tokens up to the fork as its prompt.
        """
        exports = self.group.exports
        if exports is None or not path.is_first:
            return None
        if path.parent_id is None:
            return exports.prompt_slot
        return exports.begin(prompt, path.parent_id)

    async def _await_path(self, path: Path, completion: Awaitable[Completion]) -> Segment | None:
        """Wait for a path, add it to the tree, and start the paths that fork from it.

        Returns the last segment of the path, or None if the path was dropped.
        """
        group, result = self.group, await completion
        tokens = await path_tokens(self.plan, group.options, result)
        group.on_finished(path.id)
        self.budget.release(path.bounds, used=len(result.token_ids))
        if group.exports is not None and path.is_first:
            group.exports.on_writer_ended(path.parent_id)
        group.note_cached_tokens(0, result)
        if self.running.pop(path.id, None) is None:
            return None
        finish = self._finish_reason(path, result)
        stop_reason = result.stop_reason if finish == "stop" else None
        # New paths reserve their tokens before the next await: the budget is as it is now.
        segment, forked = self._grow(path, tokens, finish, stop_reason)
        for added in segment.path()[len(path.parent.path()) :]:
            self._done(await kept_answer(added))
        await self._count_leaf(segment, forked)
        await self.start(forked)
        return segment

    def _finish_reason(self, path: Path, result: Completion) -> SegmentFinish:
        finish = self.group.finish_reason(result)
        if finish != "length":
            return finish
        if path.bounds.cut:
            return self.group.aborted_reason() if self.group.ends else "cut"
        return "budget" if path.bounds.is_budget_limited else "length"

    async def _count_leaf(self, segment: Segment, forked: Sequence[Path]) -> None:
        """Count a finished leaf; abort the running paths once enough leaves are complete."""
        if segment.finish == "cut":
            return
        self.group.count_sample()
        self._num_complete += segment.finish in self._complete_finishes
        is_met = self._num_complete == self.group.options.num_required
        if is_met and (self.group.num_running or forked):
            await self.group.end(self.engine, "surplus")

    async def answer(self) -> GroupAnswer:
        """Answer of the group, whose tree is complete."""
        group, segments = self.group, list(self.tree.by_id.values())
        answers = with_num_leaves([await kept_answer(each) for each in segments])
        leaves = leaves_of(answers)
        samples = []
        if self.plan.branching.flatten:
            ends = [self.tree.by_id[leaf.id] for leaf in leaves]
            samples = [await row_answer(i, end, group.options) for i, end in enumerate(ends)]
        for sample in samples:
            self._done(sample)
        outcome = outcome_of(
            leaves,
            complete_finishes=self._complete_finishes,
            num_required=group.options.num_required,
            was_truncated=self.was_truncated,
            cancelled=group.end_reason == "cancelled",
        )
        return group.answer(
            outcome,
            samples,
            segments=answers,
            leaves=[leaf.id for leaf in leaves],
            num_dropped=self.tree.num_dropped,
        )
