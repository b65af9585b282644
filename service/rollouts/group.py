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
from dataclasses import dataclass, field, replace
from typing import Literal, TypedDict

from coppice.wire.rollouts import (
    FinishReason,
    GroupAnswer,
    Outcome,
    SampleAnswer,
    SegmentAnswer,
    VersionSpan,
)
from coppice.wire.spans import cut_spans, joined_spans
from engine.kv_types import Load
from engine.protocol import Completion, Engine, Place, SampleRequest, Sampling
from service.kv_reuse.group_reuse import GroupReuse
from service.prompt_kv.group_export import GroupExports
from service.rollouts.finish_policy import Enough
from service.rollouts.resume import Started, spans_of
from service.rollouts.time_slice import Turns

Ending = Literal["cancelled", "deadline", "surplus", "version_changed"]
Decode = Callable[[Sequence[int]], Awaitable[str]]
PartDone = Callable[[SampleAnswer | SegmentAnswer], None]


class GroupFields(TypedDict):
    """What every kind of group is made from."""

    id: str
    index: int
    n: int
    prompt_token_ids: list[int]
    sampling: Sampling
    seed: int | None
    priority: int
    speculation: bool
    exact_version: str | None
    enough: int | None
    deadline_seconds: float | None
    decode: Decode | None
    owner: str
    cache_salt: str | None
    adapter: str | None
    num_likeliest: int
    kv_lease_seconds: float | None
    reuse: GroupReuse | None


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """Owned by its rollout. `ending` says why its running samples are being ended, if they are.

    `rule` says when enough samples have ended by themselves to make the group done; after
    `deadline_seconds` it takes what there is. Its first samples go on from what has `started`. Its
    first request carries the place of the prompt's keys and values, if `exports` were asked for;
    `load` is what they do not compute of it.
    The engine knows its samples as siblings by its `name`, which no other has.
    `sample_seconds` are the samples' times since `began_at` (the event loop's clock), in the order
    in which they ended. `turns`, its rollout's, spread the answers of samples that end at the same
    time. `likeliest` are, by sample, those that `num_likeliest` asks for.
    """

    id: str
    index: int
    n: int
    prompt_token_ids: list[int]
    sampling: Sampling
    seed: int | None = None
    priority: int = 0
    speculation: bool = True
    cache_salt: str | None = None
    adapter: str | None = None
    num_likeliest: int = 0
    exact_version: str | None = None
    enough: int | None = None
    rule: Enough | None = None
    started: Started = field(default_factory=list)
    deadline_seconds: float | None = None
    decode: Decode | None = None
    owner: str = ""
    kv_lease_seconds: float | None = None
    exports: GroupExports | None = None
    reuse: GroupReuse | None = None
    load: Load | None = None
    ending: Ending | None = None
    num_done: int = 0
    sample_ids: list[str] = field(default_factory=list)
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    began_at: float = 0.0
    sample_seconds: list[float] = field(default_factory=list)
    likeliest: dict[int, list[Place]] = field(default_factory=dict)
    turns: Turns = field(default_factory=Turns)
    _unfinished: set[str] = field(default_factory=set)

    @property
    def num_running(self) -> int:
        return len(self._unfinished)

    @property
    def resting(self) -> bool:
        """Whether nothing happens until somebody comes back."""
        return False

    async def run(self, engine: Engine, done: PartDone) -> GroupAnswer:
        self.sample_ids = [uuid.uuid4().hex for _ in range(self.n)]
        requests = self._requests()
        self._unfinished = {request.id for request in requests}
        try:
            completions = await engine.submit(requests)
            if self.ending:
                await engine.abort(list(self._unfinished))
            async with self._deadline(engine):
                finished = await self._gather(engine, completions, done)
        finally:
            await engine.abort(list(self._unfinished))
            self._unfinished.clear()
        return self._answer(finished)

    async def end(self, engine: Engine, ending: Ending) -> None:
        """Ends the samples that still run; their tokens so far are kept."""
        self.ending = self.ending or ending
        await engine.abort(list(self._unfinished))

    def _requests(self) -> list[SampleRequest]:
        return [self._request(index, sample_id) for index, sample_id in enumerate(self.sample_ids)]

    def _request(self, index: int, sample_id: str) -> SampleRequest:
        if index >= len(self.started):
            prompt, max_tokens, place = self.prompt_token_ids, self.sampling.max_tokens, f"{index}"
        else:
            there = self.started[index].token_ids
            prompt = [*self.prompt_token_ids, *there]
            max_tokens = self.sampling.max_tokens - len(there)
            place = f"{index}+{len(there)}"  # not the numbers that it began with once more
        return SampleRequest(
            id=sample_id,
            prompt_token_ids=prompt,
            sampling=replace(self.sampling, max_tokens=max_tokens),
            seed=None if self.seed is None else stream(self.seed, place),
            priority=self.priority,
            cache_salt=self.cache_salt,
            export=self.exports.prompt_place if self.exports and index == 0 else None,
            group=self.name,
            speculation=self.speculation,
            load=self.load,
            adapter=self.adapter,
            num_likeliest=self.num_likeliest,
        )

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
        self, engine: Engine, completions: list[Awaitable[Completion]], done: PartDone
    ) -> list[tuple[SampleAnswer, int]]:
        clock = asyncio.get_running_loop().time
        self.began_at = clock()

        async def one(index: int, completion: Awaitable[Completion]) -> tuple[SampleAnswer, int]:
            result = await completion
            self.sample_seconds.append(clock() - self.began_at)
            self._unfinished.discard(self.sample_ids[index])
            if result.likeliest is not None:
                self.likeliest[index] = result.likeliest[: self._kept(result)]
            await self._count(engine, index, result)
            await self.turns.wait()
            answer = await self._sample(index, result)
            done(answer)
            return answer, result.num_cached_tokens

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(i, c)) for i, c in enumerate(completions)]
        return [task.result() for task in running]

    async def _count(self, engine: Engine, index: int, result: Completion) -> None:
        """Whoever completes what is enough ends the others, before anything else happens."""
        self.num_done += 1
        if self.rule is None or result.finish not in ("stop", "length"):
            return
        length = len(result.token_ids) + len(self._there(index)[0])
        if self.rule.ended(index, length) and self._unfinished:
            await self.end(engine, "surplus")

    def _there(self, index: int) -> tuple[list[int], list[float], list[VersionSpan]]:
        """What a sample brought along."""
        if index >= len(self.started):
            return [], [], []
        given = self.started[index]
        return given.token_ids, given.logprobs, spans_of(given)

    async def _sample(self, index: int, result: Completion) -> SampleAnswer:
        kept = self._kept(result)
        there, logprobs, spans = self._there(index)
        token_ids = there + result.token_ids[:kept]
        return SampleAnswer(
            index=index,
            token_ids=token_ids,
            logprobs=logprobs + result.logprobs[:kept],
            text=await self.decode(token_ids) if self.decode else None,
            finish_reason=self._finish_reason(result),
            versions=joined_spans(
                [(spans, len(there)), (spans_until(result, kept, self.adapter), kept)]
            ),
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
        return self._ended_as() if result.finish == "abort" else result.finish

    def _ended_as(self) -> FinishReason:
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
            # Of a sample that is gone on with, tokens behind the prompt are cached as well.
            num_cached_tokens=min(finished[0][1], len(self.prompt_token_ids)),
            num_continued_tokens=sum(len(given.token_ids) for given in self.started),
            chosen=None if self.rule is None else self.rule.chosen,
            samples=samples,
        )

    def _outcome(self, samples: list[SampleAnswer]) -> Outcome:
        reasons = Counter(sample.finish_reason for sample in samples)
        if reasons["stop"] + reasons["length"] == self.n or (self.rule and self.rule.reached):
            return "done"
        if reasons["error"] == self.n:
            return "failed"
        return "cancelled" if self.ending == "cancelled" else "partial"


def spans_until(result: Completion, kept: int, adapter: str | None) -> list[VersionSpan]:
    whole = [
        VersionSpan(version=s.version, start=s.start, end=s.end, adapter=adapter)
        for s in result.versions
    ]
    return cut_spans(whole, 0, kept)


def stream(seed: int, place: int | str) -> int:
    """Mixed, not added: groups with neighbouring seeds must not share random streams."""
    digest = hashlib.blake2b(f"{seed}:{place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
