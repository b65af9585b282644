"""Execution of a group (one prompt and its n samples), from submission to the answer.

Every submitted group ends exactly once, and none of its samples outlives it in the engine: `run`
aborts the remaining samples on every exit. `run` awaits the submission, the samples and that abort;
cancelling it at any of these points ends the samples.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from coppice.wire.columns.logprobs import PromptLogprobs
from coppice.wire.columns.token_columns import TokenLists
from coppice.wire.rollouts import FinishReason, GroupAnswer, Outcome, SampleAnswer, SegmentAnswer
from engine.protocol.generation import Generation
from engine.types.samples import Completion, SampleRequest, TopLogprobRows
from service.kv.handles.group_exports import GroupKvExports
from service.kv.prompt_source import PromptSource
from service.rollouts.fairness import Turns
from service.rollouts.groups.finish_policy import FinishPolicy
from service.rollouts.groups.options import GroupOptions, given_tokens
from service.rollouts.groups.sample_answer import num_valid_tokens
from service.rollouts.groups.sample_observer import SampleObserver

if TYPE_CHECKING:
    from service.rollouts.trees.tree_growth import TreePaths

EndReason = Literal["cancelled", "deadline", "surplus", "version_changed", "suspended"]
OnSampleTokens = Callable[[int, TokenLists], None]
"""Receives the index of a running sample and its new tokens."""
OnPart = Callable[[SampleAnswer | SegmentAnswer], None]


class Sampler(Protocol):
    """Strategy by which a group samples: independent samples, or a tree.

    One that `is_grown_by_caller` makes no progress without requests of the caller.
    """

    @property
    def paths(self) -> "TreePaths | None":
        """Paths of the tree; None for samples without a tree."""

    @property
    def is_grown_by_caller(self) -> bool: ...

    async def run(self, group: "Group", engine: Generation, done: OnPart) -> GroupAnswer | None:
        """Sample and return the group's answer; None if the group was suspended.

        `done` is called with each sample or segment that has ended.
        """

    def on_end(self, end_reason: EndReason) -> None:
        """Note that the group is ending; its requests are aborted."""


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """One prompt and its samples, which its `sampler` submits to the engine.

    Owned by its rollout. `source` provides the prompt's KV. `end_reason` is the reason for which
    the running samples are being aborted, if they are. `finish_policy` decides when enough samples
    have finished by themselves. If KV `exports` were requested, the first engine request carries
    the export slot of the prompt. `name` is the globally unique id by which the engine recognizes
    the samples as siblings. `sample_seconds` are the durations of the samples since `began_at`
    (event loop clock), in the order in which they finished. `seconds_before` is the time that had
    passed when the group was resumed. `turns`, shared by the rollout, spread
    the answers of samples that finish at the same time over iterations of the event loop.
    `top_logprobs` maps a sample's index to the top logprobs of its tokens, if they were requested
    and are not part of its answer.
    `cached_tokens` maps the index of a finished sample to the number of prompt tokens that it found
    cached.
    `ended` are the answers of the finished samples, in the order in which they finished.
    `suspended` are the tokens of the others so far, by index, if the group was suspended.
    `on_tokens` receives the tokens of the running samples, and `observer` those and their text.
    `texts` are those of the finished samples, if they were requested; None for one whose last
    tokens are not in its answer.
    """

    options: GroupOptions
    sampler: Sampler
    source: PromptSource = field(default_factory=PromptSource)
    finish_policy: FinishPolicy | None = None
    exports: GroupKvExports | None = None
    end_reason: EndReason | None = None
    num_done: int = 0
    sample_ids: list[str] = field(default_factory=list)
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    began_at: float = 0.0
    seconds_before: float = 0.0
    sample_seconds: list[float] = field(default_factory=list)
    top_logprobs: dict[int, TopLogprobRows] = field(default_factory=dict)
    cached_tokens: dict[int, int] = field(default_factory=dict)
    turns: Turns = field(default_factory=Turns)
    ended: list[SampleAnswer] = field(default_factory=list)
    suspended: dict[int, TokenLists] = field(default_factory=dict)
    on_tokens: OnSampleTokens | None = None
    observer: SampleObserver | None = None
    texts: dict[int, str | None] = field(default_factory=dict)
    prompt_logprobs: PromptLogprobs | None = None
    _unfinished: set[str] = field(default_factory=set)
    _ending: asyncio.Event = field(default_factory=asyncio.Event)
    seconds_used: float = 0.0

    @property
    def num_running(self) -> int:
        return len(self._unfinished)

    def running_indices(self) -> Iterator[int]:
        """Indices of the samples that are running, in ascending order."""
        return (i for i, sample_id in enumerate(self.sample_ids) if sample_id in self._unfinished)

    def prior_spans(self, index: int) -> list[tuple[str, int]]:
        """Weights versions and numbers of the tokens that a resumed sample already has."""
        continued = self.options.continued[index : index + 1]
        return [
            (span.version, span.end - span.start) for given in continued for span in given.versions
        ]

    @property
    def is_idle(self) -> bool:
        """True if the group makes no progress until its caller sends another request."""
        return self.sampler.is_grown_by_caller and not self._unfinished

    async def run(self, engine: Generation, done: OnPart) -> GroupAnswer | None:
        """Run the samples and return the answer; None if the group was suspended."""
        is_settled = False
        try:
            answer = await self.sampler.run(self, engine, done)
            if answer is None:
                return None
            is_settled = all(s.finish_reason in ("stop", "length") for s in answer.samples)
            return self.source.annotated(answer)
        finally:
            try:
                await self.abort_requests(engine)
            finally:
                self.source.release(settled=is_settled)

    async def end(self, engine: Generation, end_reason: EndReason) -> None:
        """Abort the running samples of the group; the tokens generated so far are in the answer."""
        if self.end_reason in (None, "suspended"):
            self.end_reason = end_reason
        self._ending.set()
        self.sampler.on_end(end_reason)
        await engine.abort(list(self._unfinished))

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the samples began, also on another replica."""
        if not self.began_at:
            return self.seconds_before
        return asyncio.get_running_loop().time() - self.began_at

    @property
    def ends(self) -> bool:
        return self.end_reason is not None

    async def wait_for_end(self) -> None:
        await self._ending.wait()

    def on_submitted(self, request_id: str) -> None:
        self._unfinished.add(request_id)

    def on_finished(self, request_id: str) -> None:
        self._unfinished.discard(request_id)

    async def abort_requests(self, engine: Generation) -> None:
        await engine.abort(list(self._unfinished))
        self._unfinished.clear()

    def request(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        seed: int | None,
        num_prior_tokens: int,
        max_tokens: int,
        **own: Any,
    ) -> SampleRequest:
        """Engine request of the group; `own` are fields that are not the same in all of them."""
        return replace(
            self.options.template,
            id=request_id,
            prompt_token_ids=prompt,
            sampling=self.options.sampling.after(num_prior_tokens, max_tokens),
            seed=seed,
            group=self.name,
            num_prior_tokens=num_prior_tokens,
            **own,
        )

    @asynccontextmanager
    async def deadline(self, engine: Generation) -> AsyncIterator[None]:
        """Context manager that ends the group if its deadline passes inside the context.

        The time spent in such contexts is added up. The submission of independent samples is
        outside of them.
        """
        if self.options.deadline_seconds is None:
            yield
            return
        clock = asyncio.get_running_loop().time
        began_at, left = clock(), max(0.0, self.options.deadline_seconds - self.seconds_used)
        timer = asyncio.create_task(self._end_at_deadline(engine, left))
        try:
            yield
        finally:
            timer.cancel()
            self.seconds_used += clock() - began_at

    async def _end_at_deadline(self, engine: Generation, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.end(engine, "deadline")

    def note_cached_tokens(self, index: int, result: Completion) -> None:
        # A resumed sample also has cached tokens after the prompt; these are not counted.
        num_prompt = len(self.options.prompt_token_ids)
        self.cached_tokens.setdefault(index, min(result.num_cached_tokens, num_prompt))

    def count_sample(self) -> None:
        """Count a sample that has finished now."""
        self.num_done += 1
        self.sample_seconds.append(asyncio.get_running_loop().time() - self.began_at)

    def has_other_versions(self, result: Completion) -> bool:
        """True if a version other than the required one generated some of the tokens."""
        return num_valid_tokens(self.options, result) < len(result.token_ids)

    def finish_reason(self, result: Completion) -> FinishReason:
        if self.has_other_versions(result):
            return "version_changed"
        return self.aborted_reason() if result.finish == "abort" else result.finish

    def aborted_reason(self) -> FinishReason:
        reason = self.end_reason
        if reason is None or reason == "cancelled" or reason == "suspended":
            return "aborted"
        return reason

    def answer(self, outcome: Outcome, samples: list[SampleAnswer], **tree: Any) -> GroupAnswer:
        """Answer of the group; `tree` are the fields of an answer with a tree."""
        options = self.options
        return GroupAnswer(
            id=options.id,
            index=options.index,
            outcome=outcome,
            num_prompt_tokens=len(options.prompt_token_ids),
            prompt_token_ids=options.prompt_token_ids if options.echo else None,
            num_images=options.num_images,
            num_cached_tokens=self.cached_tokens.get(0, 0),
            num_continued_tokens=sum(given_tokens(options)),
            selected=None if self.finish_policy is None else self.finish_policy.selected,
            samples=samples,
            prompt_logprobs=self.prompt_logprobs,
            **tree,
        )
