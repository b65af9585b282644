"""One prompt and its n samples, from submission to the answer.

Every group that was submitted ends exactly once, and none of its samples outlives it in the engine:
`run` aborts what is left however it is left. Its awaits are the submission, the samples and that
abort; cancelling it at any of them ends the samples.
"""

import asyncio
import hashlib
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from coppice.wire.rollouts import FinishReason, GroupAnswer, Outcome, SampleAnswer, VersionSpan
from engine.protocol import Completion, Engine, SampleRequest, Sampling

Ending = Literal["cancelled", "deadline", "surplus", "version_changed"]
Decode = Callable[[Sequence[int]], Awaitable[str]]
SampleDone = Callable[[SampleAnswer], None]


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """Owned by its rollout. `ending` says why its running samples are being ended, if they are.

    `enough` samples that end by themselves make the group done; after `deadline_seconds` it takes
    what there is. `sample_seconds` are the samples' times since
    `began_at` (the event loop's clock), in the order in which they ended.
    """

    id: str
    index: int
    n: int
    prompt_token_ids: list[int]
    sampling: Sampling
    seed: int | None = None
    priority: int = 0
    exact_version: str | None = None
    enough: int | None = None
    deadline_seconds: float | None = None
    decode: Decode | None = None
    ending: Ending | None = None
    num_done: int = 0
    num_whole: int = 0
    ended: list[SampleAnswer] = field(default_factory=list)
    sample_ids: list[str] = field(default_factory=list)
    began_at: float = 0.0
    sample_seconds: list[float] = field(default_factory=list)
    _unfinished: set[str] = field(default_factory=set)

    @property
    def num_running(self) -> int:
        return len(self._unfinished)

    async def run(self, engine: Engine, sample_done: SampleDone) -> GroupAnswer:
        self.sample_ids = [uuid.uuid4().hex for _ in range(self.n)]
        self._unfinished = set(self.sample_ids)
        try:
            completions = await engine.submit(self._requests())
            if self.ending:
                await engine.abort(self.sample_ids)
            async with self._deadline(engine):
                finished = await self._gather(engine, completions, sample_done)
        finally:
            await engine.abort(list(self._unfinished))
            self._unfinished.clear()
        return self._answer(finished)

    async def end(self, engine: Engine, ending: Ending) -> None:
        """Ends the samples that still run; their tokens so far are kept."""
        self.ending = self.ending or ending
        await engine.abort(list(self._unfinished))

    def _requests(self) -> list[SampleRequest]:
        return [
            SampleRequest(
                id=sample_id,
                prompt_token_ids=self.prompt_token_ids,
                sampling=self.sampling,
                seed=None if self.seed is None else _stream(self.seed, index),
                priority=self.priority,
            )
            for index, sample_id in enumerate(self.sample_ids)
        ]

    @asynccontextmanager
    async def _deadline(self, engine: Engine) -> AsyncIterator[None]:
        if self.deadline_seconds is None:
            yield
            return
        clock = asyncio.create_task(self._end_at_deadline(engine, self.deadline_seconds))
        try:
            yield
        finally:
            clock.cancel()

    async def _end_at_deadline(self, engine: Engine, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.end(engine, "deadline")

    async def _gather(
        self, engine: Engine, completions: list[Awaitable[Completion]], sample_done: SampleDone
    ) -> list[tuple[SampleAnswer, int]]:
        clock = asyncio.get_running_loop().time
        self.began_at = clock()

        async def one(index: int, completion: Awaitable[Completion]) -> tuple[SampleAnswer, int]:
            result = await completion
            self.sample_seconds.append(clock() - self.began_at)
            self._unfinished.discard(self.sample_ids[index])
            await self._count(engine, result)
            answer = await self._sample(index, result)
            self.ended.append(answer)
            sample_done(answer)
            return answer, result.num_cached_tokens

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(i, c)) for i, c in enumerate(completions)]
        return [task.result() for task in running]

    async def _count(self, engine: Engine, result: Completion) -> None:
        """Whoever completes what is enough ends the others, before anything else happens."""
        self.num_done += 1
        self.num_whole += result.finish in ("stop", "length")
        if self.num_whole == self.enough and self._unfinished:
            await self.end(engine, "surplus")

    async def _sample(self, index: int, result: Completion) -> SampleAnswer:
        kept = self._kept(result)
        token_ids = result.token_ids[:kept]
        return SampleAnswer(
            index=index,
            token_ids=token_ids,
            logprobs=result.logprobs[:kept],
            text=await self.decode(token_ids) if self.decode else None,
            finish_reason=self._finish_reason(result),
            versions=[
                VersionSpan(version=span.version, start=span.start, end=min(span.end, kept))
                for span in result.versions
                if span.start < kept
            ],
        )

    def _kept(self, result: Completion) -> int:
        """A group bound to a version never holds a token of another."""
        if self.exact_version is None:
            return len(result.token_ids)
        foreign = [span.start for span in result.versions if span.version != self.exact_version]
        return min([*foreign, len(result.token_ids)])

    def _finish_reason(self, result: Completion) -> FinishReason:
        if self._kept(result) < len(result.token_ids):
            return "version_changed"
        if result.finish != "abort":
            return result.finish
        if self.ending is None or self.ending == "cancelled":
            return "aborted"
        return self.ending

    def _answer(self, finished: list[tuple[SampleAnswer, int]]) -> GroupAnswer:
        samples = [sample for sample, _ in finished]
        return GroupAnswer(
            id=self.id,
            index=self.index,
            outcome=self._outcome(samples),
            num_prompt_tokens=len(self.prompt_token_ids),
            num_cached_tokens=finished[0][1],
            samples=samples,
        )

    def _outcome(self, samples: list[SampleAnswer]) -> Outcome:
        reasons = Counter(sample.finish_reason for sample in samples)
        if reasons["stop"] + reasons["length"] >= (self.enough or self.n):
            return "done"
        if reasons["error"] == self.n:
            return "failed"
        return "cancelled" if self.ending == "cancelled" else "partial"


def _stream(seed: int, index: int) -> int:
    """Mixed, not added: groups with neighbouring seeds must not share random streams."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
