"""Group: one prompt and its n samples, from submission to the answer.

Every submitted group ends exactly once, and none of its samples outlives it in the engine: `run`
aborts the remaining samples on every exit. `run` awaits the submission, the samples and that abort;
cancelling it at any of these points ends the samples.
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
from coppice.wire.version_spans import cut_spans, joined_spans
from engine.kv_types import KvLoad
from engine.protocol import Engine
from engine.types import Completion, SampleRequest, Sampling, TopLogprobs
from service.kv_reuse.group_reuse import ReuseReport
from service.prompt_kv.group_exports import GroupKvExports
from service.rollouts.finish_policy import FinishPolicy
from service.rollouts.resume import ContinuedSamples, version_spans_of
from service.rollouts.scheduling import Turns

EndReason = Literal["cancelled", "deadline", "surplus", "version_changed"]
Decode = Callable[[Sequence[int]], Awaitable[str]]
OnPart = Callable[[SampleAnswer | SegmentAnswer], None]


class GroupOptions(TypedDict):
    """Constructor arguments that `Group` and its subclasses have in common."""

    id: str
    index: int
    n: int
    prompt_token_ids: list[int]
    sampling: Sampling
    seed: int | None
    priority: int
    speculation: bool
    exact_version: str | None
    num_required: int | None
    deadline_seconds: float | None
    decode: Decode | None
    owner: str
    cache_salt: str | None
    adapter: str | None
    num_top_logprobs: int
    kv_lease_seconds: float | None
    reuse: ReuseReport | None


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """Samples of one prompt; owned by its rollout.

    `end_reason` is the reason for which the running samples are being aborted, if they are.
    `finish_policy` decides when enough samples have finished by themselves; after
    `deadline_seconds` the group ends with the samples as they are. Its first samples resume those
    in `continued`. If KV `exports` were requested, the first engine request carries the export slot
    of the prompt. `load` is the prompt KV that the requests load instead of prefilling it. `name`
    is the globally unique id by which the engine recognizes the samples as siblings.
    `sample_seconds` are the durations of the samples since `began_at` (event loop clock), in the
    order in which they finished. `turns`, shared by the rollout, spread the answers of samples that
    finish at the same time over iterations of the event loop. `top_logprobs` maps a sample's index
    to the top logprobs of its tokens, if `num_top_logprobs` requests them.
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
    num_top_logprobs: int = 0
    exact_version: str | None = None
    num_required: int | None = None
    finish_policy: FinishPolicy | None = None
    continued: ContinuedSamples = field(default_factory=list)
    deadline_seconds: float | None = None
    decode: Decode | None = None
    owner: str = ""
    kv_lease_seconds: float | None = None
    exports: GroupKvExports | None = None
    reuse: ReuseReport | None = None
    load: KvLoad | None = None
    end_reason: EndReason | None = None
    num_done: int = 0
    sample_ids: list[str] = field(default_factory=list)
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    began_at: float = 0.0
    sample_seconds: list[float] = field(default_factory=list)
    top_logprobs: dict[int, list[TopLogprobs]] = field(default_factory=dict)
    turns: Turns = field(default_factory=Turns)
    _unfinished: set[str] = field(default_factory=set)

    @property
    def num_running(self) -> int:
        return len(self._unfinished)

    @property
    def is_idle(self) -> bool:
        """True if the group makes no progress until its caller sends another request."""
        return False

    async def run(self, engine: Engine, done: OnPart) -> GroupAnswer:
        self.sample_ids = [uuid.uuid4().hex for _ in range(self.n)]
        requests = self._requests()
        self._unfinished = {request.id for request in requests}
        try:
            completions = await engine.submit(requests)
            if self.end_reason:
                await engine.abort(list(self._unfinished))
            async with self._deadline(engine):
                finished = await self._gather(engine, completions, done)
        finally:
            await engine.abort(list(self._unfinished))
            self._unfinished.clear()
        return self._answer(finished)

    async def end(self, engine: Engine, end_reason: EndReason) -> None:
        """Abort the running samples; their tokens so far are kept."""
        self.end_reason = self.end_reason or end_reason
        await engine.abort(list(self._unfinished))

    def _requests(self) -> list[SampleRequest]:
        return [self._request(index, sample_id) for index, sample_id in enumerate(self.sample_ids)]

    def _request(self, index: int, sample_id: str) -> SampleRequest:
        if index >= len(self.continued):
            prompt, max_tokens, stream_key = (
                self.prompt_token_ids,
                self.sampling.max_tokens,
                f"{index}",
            )
        else:
            prior_tokens = self.continued[index].token_ids
            prompt = [*self.prompt_token_ids, *prior_tokens]
            max_tokens = self.sampling.max_tokens - len(prior_tokens)
            stream_key = (
                # Differs from the first run's key, so that its random numbers are not repeated
                f"{index}+{len(prior_tokens)}"
            )
        return SampleRequest(
            id=sample_id,
            prompt_token_ids=prompt,
            sampling=replace(self.sampling, max_tokens=max_tokens),
            seed=None if self.seed is None else derive_seed(self.seed, stream_key),
            priority=self.priority,
            cache_salt=self.cache_salt,
            export=self.exports.prompt_slot if self.exports and index == 0 else None,
            group=self.name,
            speculation=self.speculation,
            load=self.load,
            adapter=self.adapter,
            num_top_logprobs=self.num_top_logprobs,
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
        self, engine: Engine, completions: list[Awaitable[Completion]], done: OnPart
    ) -> list[tuple[SampleAnswer, int]]:
        clock = asyncio.get_running_loop().time
        self.began_at = clock()

        async def await_sample(
            index: int, completion: Awaitable[Completion]
        ) -> tuple[SampleAnswer, int]:
            result = await completion
            self.sample_seconds.append(clock() - self.began_at)
            self._unfinished.discard(self.sample_ids[index])
            if result.top_logprobs is not None:
                self.top_logprobs[index] = result.top_logprobs[: self._num_valid_tokens(result)]
            await self._on_sample_end(engine, index, result)
            await self.turns.wait()
            answer = await self._to_sample_answer(index, result)
            done(answer)
            return answer, result.num_cached_tokens

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(await_sample(i, c)) for i, c in enumerate(completions)]
        return [task.result() for task in running]

    async def _on_sample_end(self, engine: Engine, index: int, result: Completion) -> None:
        """Abort the other samples at once when this one makes the finish policy met."""
        self.num_done += 1
        if self.finish_policy is None or result.finish not in ("stop", "length"):
            return
        length = len(result.token_ids) + len(self._prior(index)[0])
        if self.finish_policy.on_sample_end(index, length) and self._unfinished:
            await self.end(engine, "surplus")

    def _prior(self, index: int) -> tuple[list[int], list[float], list[VersionSpan]]:
        """Tokens, logprobs and version spans that a resumed sample already has."""
        if index >= len(self.continued):
            return [], [], []
        given = self.continued[index]
        return given.token_ids, given.logprobs, version_spans_of(given)

    async def _to_sample_answer(self, index: int, result: Completion) -> SampleAnswer:
        num_tokens = self._num_valid_tokens(result)
        prior_tokens, logprobs, spans = self._prior(index)
        token_ids = prior_tokens + result.token_ids[:num_tokens]
        return SampleAnswer(
            index=index,
            token_ids=token_ids,
            logprobs=logprobs + result.logprobs[:num_tokens],
            text=await self.decode(token_ids) if self.decode else None,
            finish_reason=self._finish_reason(result),
            versions=joined_spans(
                [
                    (spans, len(prior_tokens)),
                    (version_spans(result, num_tokens, self.adapter), num_tokens),
                ]
            ),
        )

    def _num_valid_tokens(self, result: Completion) -> int:
        """Number of leading tokens of the group's `exact_version`; all tokens if it has none."""
        if self.exact_version is None:
            return len(result.token_ids)
        other_version_starts = [
            span.start for span in result.versions if span.version != self.exact_version
        ]
        return min([*other_version_starts, len(result.token_ids)])

    def _finish_reason(self, result: Completion) -> FinishReason:
        if self._num_valid_tokens(result) < len(result.token_ids):
            return "version_changed"
        return self._aborted_reason() if result.finish == "abort" else result.finish

    def _aborted_reason(self) -> FinishReason:
        if self.end_reason is None or self.end_reason == "cancelled":
            return "aborted"
        return self.end_reason

    def _answer(self, finished: list[tuple[SampleAnswer, int]]) -> GroupAnswer:
        samples = [sample for sample, _ in finished]
        return GroupAnswer(
            id=self.id,
            index=self.index,
            outcome=self._outcome(samples),
            num_prompt_tokens=len(self.prompt_token_ids),
            # A resumed sample also has cached tokens after the prompt; these are not counted.
            num_cached_tokens=min(finished[0][1], len(self.prompt_token_ids)),
            num_continued_tokens=sum(len(given.token_ids) for given in self.continued),
            chosen=None if self.finish_policy is None else self.finish_policy.chosen,
            samples=samples,
        )

    def _outcome(self, samples: list[SampleAnswer]) -> Outcome:
        reasons = Counter(sample.finish_reason for sample in samples)
        if reasons["stop"] + reasons["length"] == self.n or (
            self.finish_policy and self.finish_policy.is_met
        ):
            return "done"
        if reasons["error"] == self.n:
            return "failed"
        return "cancelled" if self.end_reason == "cancelled" else "partial"


def version_spans(result: Completion, num_tokens: int, adapter: str | None) -> list[VersionSpan]:
    whole = [
        VersionSpan(version=s.version, start=s.start, end=s.end, adapter=adapter)
        for s in result.versions
    ]
    return cut_spans(whole, 0, num_tokens)


def derive_seed(seed: int, stream_key: int | str) -> int:
    """Derive the seed of a random stream by hashing.

    Adding would make groups with neighbouring seeds share random streams.
    """
    digest = hashlib.blake2b(f"{seed}:{stream_key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
