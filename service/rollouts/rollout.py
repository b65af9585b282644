"""Execution of a rollout: runs the groups of one request concurrently and logs their results.

The log is append-only and any number of readers can read it from the start, so a streamed and a
plain answer are two views of the same run. A rollout ends exactly once, with an answer or with an
error.
"""

import asyncio
import logging
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from coppice.wire.chat import ParsedMessage
from coppice.wire.columns.token_columns import TokenLists, column_bytes
from coppice.wire.packed.results import (
    EndRecord,
    GroupRecord,
    KvRecord,
    ProgressRecord,
    Record,
    SampleRecord,
    SegmentRecord,
    StartRecord,
)
from coppice.wire.rollouts import (
    GroupAnswer,
    GroupHead,
    Outcome,
    RolloutAnswer,
    RolloutRequest,
    RunningAnswer,
    SampleAnswer,
    SegmentAnswer,
    Usage,
)
from engine.protocol.generation import Generation
from service.cluster.membership import RETRY_AFTER_SECONDS
from service.errors import ClusterUnavailable, Draining, RedirectToReplica, ServiceError
from service.http.exception_handlers import to_service_error
from service.kv.handles.group_exports import NOT_CONTINUED, KvState, exporting_group
from service.kv.handles.manager import PromptKvManager
from service.log_context import group_id, rollout_id
from service.observability.build import Observability
from service.rollouts.fairness import PER_TURN, TimeSlice, Turns
from service.rollouts.group import EndReason, Group
from service.rollouts.group_options import GroupOptions, given_tokens, num_given
from service.rollouts.idempotency import IdempotencyClaim
from service.rollouts.record_reader import PartialSample, RecordReader, SampleKey
from service.rollouts.suspended_group import resumed
from service.rollouts.trees.tree_answer import with_num_leaves

log = logging.getLogger(__name__)

ROLLOUT_BYTES = 12 * 2**10
GROUP_BYTES = 4096
PART_BYTES = 1536
TOOL_CALL_BYTES = 1024
ECHOED_TOKEN_BYTES = 52
"""An integer, and its places in the lists of the answer and of the log."""


class Rollout:
    """Execution of one rollout request: its groups, the log of their results, and the answer.

    Owned by the rollout manager, which runs it on one event loop. `owner` is the API key that
    started it, given if all groups have ended; no other key can see it. A detached rollout outlives
    its caller's connection.
    `awaits_fetch` is true if a caller is to fetch the result later and has not fetched it yet.

    A rollout that `can_move` can be moved to another replica: while it is `suspended`, with its
    `request`, or its result. Its `moved_to` is then the URL of that replica; otherwise it goes on
    here.
    `is_moving` is true while it is offered to other replicas.
    `awaits_redirect` is true if the stream of a caller ended, who has not been redirected yet.
    `source` is the id of the replica that has sent the rollout here, None for others. With
    `is_discarded` it continues there, and the result of the copy here is dropped.
    """

    def __init__(
        self,
        rollout_id: str,
        groups: Sequence[Group],
        *,
        detached: bool,
        claims: Sequence[IdempotencyClaim] = (),
        can_move: bool = False,
        request: RolloutRequest | None = None,
        owner: str = "",
    ) -> None:
        self.id = rollout_id
        self.groups = groups
        self.can_move = can_move
        self.request = request
        self.moved_to: str | None = None
        self.is_moving = False
        self.source: str | None = None
        self.is_discarded = False
        self.num_samples = sum(group.options.n for group in groups)
        options = groups[0].options if groups else GroupOptions(owner=owner)
        self.adapter = options.adapter  # one adapter and one owner per rollout
        self.owner = options.owner
        self.detached = detached
        self.claims = claims
        self.error: ServiceError | None = None
        self.awaits_fetch = False
        self.awaits_redirect = False
        self._num_done = 0
        self._num_started = 0
        self._num_bytes = ROLLOUT_BYTES + GROUP_BYTES * len(groups)
        turns = Turns()
        for group in groups:
            group.turns = turns
        self._answers: dict[int, GroupAnswer] = {}
        self._log: list[Record] = [StartRecord(id=rollout_id)]
        self._log_changed = asyncio.Event()
        self._ended = asyncio.Event()
        self._readers: set[RecordReader] = set()
        self._partial: dict[SampleKey, PartialSample] | None = {} if options.stream_tokens else None
        self.num_resumed = {
            (group.options.index, index): number
            for group in groups
            for index, number in enumerate(given_tokens(group.options))
        }
        self._has_stopped = asyncio.Event()
        self._move_ended = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    @property
    def log(self) -> Sequence[Record]:
        """Log records of the rollout so far."""
        return self._log

    @property
    def num_running(self) -> int:
        return sum(group.num_running for group in self.groups)

    @property
    def num_unanswered(self) -> int:
        """Number of groups without an answer, which have failed if the rollout has ended."""
        return sum(group.options.index not in self._answers for group in self.groups)

    @property
    def num_bytes(self) -> int:
        """Estimated memory, in bytes, of a rollout's answer and log, without its groups."""
        return self._num_bytes

    @property
    def is_idle(self) -> bool:
        """True if the rollout has ended or makes no progress until its caller sends a request."""
        return self.ended or all(group.is_idle for group in self.groups)

    async def wait_until_idle(self) -> None:
        while not self.is_idle:
            await self._log_changed.wait()

    async def run(
        self, engine: Generation, prompt_kv: PromptKvManager, observability: Observability
    ) -> None:
        rollout_id.set(self.id)
        try:
            await self._run_groups(engine, prompt_kv, observability)
            while any(group.suspended for group in self.groups):
                self._has_stopped.set()
                await self._move_ended.wait()
                if self.moved_to is not None:
                    return
                self._resume_groups()
                await self._run_groups(engine, prompt_kv, observability)
        except ExceptionGroup as failures:
            self.error = to_service_error(failures)
        except asyncio.CancelledError:
            self.error = Draining(retry_after_seconds=30)
            raise
        finally:
            self._end()

    async def _run_groups(
        self, engine: Generation, prompt_kv: PromptKvManager, observability: Observability
    ) -> None:
        async with asyncio.TaskGroup() as tasks:
            for group in self.groups:
                running = tasks.create_task(self._run_group(engine, prompt_kv, group))
                # In a callback outside the task: an error in the metrics must not lose an answer.
                running.add_done_callback(partial(self._count, group, observability))
                await self._spread(group)

    def _resume_groups(self) -> None:
        """Continue the suspended groups on this replica."""
        self._num_done += sum(group.num_done for group in self.groups if not group.suspended)
        self.groups = [resumed(group) for group in self.groups if group.suspended]
        if self._partial is not None:
            for group in self.groups:
                self._restore_tokens(group)

    @asynccontextmanager
    async def suspended(self, engine: Generation) -> AsyncIterator[bool]:
        """Context manager in which no sample runs; its value is False if the rollout has ended.

        Afterwards the rollout ends if it was moved, or else its samples continue here.
        """
        self._has_stopped, self._move_ended = asyncio.Event(), asyncio.Event()
        try:
            await self.end(engine, "suspended")
            await self._has_stopped.wait()
            yield not self.ended
        finally:
            self._move_ended.set()

    @property
    def can_suspend(self) -> bool:
        """True if the rollout can be moved while it runs; trees cannot."""
        return self.request is not None and self.request.branching is None

    @property
    def is_suspended(self) -> bool:
        """True if no group that is left was cancelled, or has reached its deadline, meanwhile."""
        suspended = [group for group in self.groups if group.suspended]
        return self.error is None and all(each.end_reason == "suspended" for each in suspended)

    @property
    def streams_tokens(self) -> bool:
        """True if the readers of the log receive the tokens of running samples."""
        return self._partial is not None

    async def restore(
        self,
        records: Sequence[Record],
        groups: Sequence[Group],
        *,
        num_resumed: dict[SampleKey, int],
        streams_tokens: bool,
    ) -> None:
        """Continue from the log of another replica; `groups` are those that have not ended."""
        self.num_resumed = num_resumed
        self._partial = {} if streams_tokens else None
        self._log = [StartRecord(id=self.id)]
        samples = defaultdict[int, list[SampleAnswer]](list)
        segments = defaultdict[int, list[SegmentAnswer]](list)
        turn = TimeSlice()
        for record in records:
            await turn.pause()
            if isinstance(record, SampleRecord):
                samples[record.group].append(record.sample)
                self._num_bytes += _num_bytes(record.sample)
                self._append(record)
            elif isinstance(record, SegmentRecord):
                segments[record.group].append(record.segment)
                self._num_bytes += _num_bytes(record.segment)
                self._append(record)
            elif isinstance(record, GroupRecord):
                index = record.group.index
                await self._restore_group(record.group, samples[index], segments[index])
        self._num_done = sum(answer.num_samples for answer in self._answers.values())
        self.num_samples = max(self.num_samples, self._num_done)
        self.groups = groups
        for group in groups if self._partial is not None else ():
            self._restore_tokens(group)
            await turn.pause()

    async def _restore_group(
        self,
        head: GroupHead,
        samples: Sequence[SampleAnswer],
        segments: Sequence[SegmentAnswer],
    ) -> None:
        by_index = sorted(samples, key=lambda sample: sample.index)
        tree = None
        if head.leaves is not None:
            tree = await asyncio.to_thread(with_num_leaves, segments)
        answer = GroupAnswer(**dict(head), samples=by_index, segments=tree)
        self._num_bytes += _num_group_bytes(answer)
        self._answers[head.index] = answer
        self._append(GroupRecord(group=head))

    def _restore_tokens(self, group: Group) -> None:
        """Restore the tokens that readers have received or would receive of running samples."""
        assert self._partial is not None, "the tokens are streamed"
        for index, sample in enumerate(group.options.continued):
            start, end = num_given(group.options, index), len(sample.token_ids)
            if end > start:
                part = PartialSample()
                part.add(sample.part(start, end))
                self._partial[group.options.index, index] = part
                for reader in self._readers:
                    reader.on_tokens((group.options.index, index))

    async def _spread(self, group: Group) -> None:
        """Yield to the event loop once per PER_TURN started samples, so that they are submitted."""
        self._num_started += group.options.n
        while self._num_started >= PER_TURN:
            self._num_started -= PER_TURN
            await asyncio.sleep(0)

    def _count(self, group: Group, observability: Observability, _: asyncio.Task[None]) -> None:
        answer = self._answers.get(group.options.index)
        if answer is not None:
            observability.record_group(self.id, answer, group.began_at, group.sample_seconds)

    def on_never_started(self) -> None:
        """Record the end of a rollout whose task was cancelled before its first step.

        Such a task runs nothing, not even `finally`.
        """
        self.error = Draining(retry_after_seconds=30)
        self._end()

    async def end(self, engine: Generation, end_reason: EndReason) -> None:
        for group in self.groups:
            await group.end(engine, end_reason)

    def start_leases(self) -> None:
        for group in self.groups:
            if group.exports is not None:
                group.exports.start_leases()

    def drop_groups(self) -> None:
        """Free the groups (prompts, sampling parameters, trees) of an ended rollout.

        The answer does not need them.
        """
        self.request = None
        self._num_done += sum(group.num_done for group in self.groups)
        self.groups = ()

    def discard(self, url: str | None) -> None:
        """Make the rollout, which continues on its source at `url`, a copy without a result.

        Callers that wait for it are redirected, or get an error if the source is not known.
        """
        self.is_discarded, self.claims, self.moved_to = True, (), url
        if url is None:
            self.error = ClusterUnavailable(retry_after_seconds=RETRY_AFTER_SECONDS)

    def drop_log(self) -> None:
        """Free the results of a rollout that was moved."""
        assert self.moved_to is not None, "the results are on another replica"
        self._log, self._answers = [], {}
        self._num_bytes = ROLLOUT_BYTES

    async def wait(self) -> None:
        await self._ended.wait()

    def answers(self) -> list[GroupAnswer]:
        """Answers of the groups that have ended, in the order of the request."""
        return [self._answers[index] for index in sorted(self._answers)]

    def progress(self) -> RunningAnswer:
        done = self._num_done + sum(group.num_done for group in self.groups)
        return RunningAnswer(id=self.id, num_samples=self.num_samples, num_samples_done=done)

    async def answer(self) -> RolloutAnswer:
        """Wait until the rollout ends and return its answer; raises its error if it failed.

        Raises RedirectToReplica if the rollout was moved.
        """
        await self.wait()
        self.check_here()
        if self.error is not None:
            raise self.error
        return RolloutAnswer(
            id=self.id, outcome=self._outcome(), groups=self.answers(), usage=self._usage()
        )

    def check_here(self) -> None:
        """Raise RedirectToReplica if the rollout was moved to another replica."""
        if self.moved_to is not None:
            self.awaits_redirect = False
            raise RedirectToReplica(self.moved_to)

    async def records(self, *, completes_samples: bool = True) -> AsyncIterator[Record]:
        """Yield the rollout's records, as in `RecordReader.records`.

        They include the tokens of running samples if the request has `stream_tokens`.
        """
        reader = RecordReader(
            self._log, self._partial, self.num_resumed, completes_samples=completes_samples
        )
        self._readers.add(reader)
        if self.ended:
            reader.on_end()
        try:
            async for record in reader.records(self._progress_record):
                yield record
        finally:
            self._readers.discard(reader)

    def _progress_record(self) -> ProgressRecord:
        progress = self.progress()
        return ProgressRecord(
            num_samples=progress.num_samples, num_samples_done=progress.num_samples_done
        )

    async def _run_group(
        self, engine: Generation, prompt_kv: PromptKvManager, group: Group
    ) -> None:
        # Not `options.id`, which the caller chose and which could contain anything
        group_id.set(str(group.options.index))

        if self._partial is not None:
            group.on_tokens = partial(self._on_tokens, self._partial, group.options.index)

        def done(part: SampleAnswer | SegmentAnswer) -> None:
            self._num_bytes += _num_bytes(part)
            if isinstance(part, SegmentAnswer):
                self._append(SegmentRecord(group=group.options.index, segment=part))
            else:
                self._on_sample(SampleRecord(group=group.options.index, sample=part))

        def on_kv_state(segment: str | None, state: KvState) -> None:
            # The reason why a prompt has no KV is in the group's answer
            if segment is not None or state.kv is not None:
                record = KvRecord(group=group.options.index, segment=segment, **state._asdict())
                self._append(record)

        async with exporting_group(
            prompt_kv,
            group.options.owner,
            group.options.kv_lease_seconds,
            group.options.prompt_token_ids,
            on_kv_state,
        ) as group.exports:
            answer = await group.run(engine, done)
        if answer is None:
            return  # suspended
        if group.exports is not None:
            answer = group.exports.with_kv(answer)
        for segment in answer.segments or ():
            if segment.kv_reason == NOT_CONTINUED.kv_reason:
                on_kv_state(segment.id, NOT_CONTINUED)
        self._num_bytes += _num_group_bytes(answer)
        self._answers[group.options.index] = answer
        head = GroupHead.model_validate(answer.model_dump(exclude={"samples", "segments"}))
        self._append(GroupRecord(group=head))

    def _on_tokens(
        self, running: dict[SampleKey, PartialSample], group: int, index: int, new: TokenLists
    ) -> None:
        running.setdefault((group, index), PartialSample()).add(new)
        for reader in self._readers:
            reader.on_tokens((group, index))

    def _on_sample(self, record: SampleRecord) -> None:
        """Log a finished sample, which has all tokens of the partial one."""
        if self._partial is not None:
            self._partial.pop((record.group, record.sample.index), None)
        self._append(record)

    def _end(self) -> None:
        if self.moved_to is None:
            end = self._end_record()
            self._append(end)
            log.info("rollout %s", end.outcome, extra=end.usage.model_dump())
        else:
            self._notify()
        self.awaits_redirect = self.moved_to is not None and bool(self._readers)
        self._ended.set()
        self._has_stopped.set()
        for reader in self._readers:
            reader.on_end()

    def _append(self, record: Record) -> None:
        if self.moved_to is None:  # otherwise the other replica has the results
            self._log.append(record)
        self._notify()

    def _notify(self) -> None:
        changed, self._log_changed = self._log_changed, asyncio.Event()
        changed.set()
        for reader in self._readers:
            reader.on_record()

    def _end_record(self) -> EndRecord:
        problem = None if self.error is None else self.error.problem()
        return EndRecord(outcome=self._outcome(), usage=self._usage(), problem=problem)

    def _outcome(self) -> Outcome:
        if self.error is not None:
            return "failed"
        outcomes = {answer.outcome for answer in self._answers.values()}
        return outcomes.pop() if len(outcomes) == 1 else "partial"

    def _usage(self) -> Usage:
        answers = self._answers.values()
        return Usage(
            num_prompt_tokens=sum(answer.num_prompt_tokens for answer in answers),
            num_generated_tokens=sum(answer.num_generated_tokens for answer in answers),
            num_samples=sum(answer.num_samples for answer in answers),
        )


def _num_group_bytes(answer: GroupAnswer) -> int:
    """Estimated memory of what a group's answer holds for the whole group, in bytes."""
    num_bytes = ECHOED_TOKEN_BYTES * len(answer.prompt_token_ids or ())
    if answer.prompt_logprobs is not None:
        num_bytes += answer.prompt_logprobs.logprobs.nbytes
        num_bytes += answer.prompt_logprobs.top_logprobs.num_bytes
    return num_bytes


def _num_message_bytes(message: ParsedMessage) -> int:
    calls = (text for call in message.tool_calls for text in (call.id, call.name, call.arguments))
    texts = (message.content, message.reasoning, *calls)
    return PART_BYTES + TOOL_CALL_BYTES * len(message.tool_calls) + sum(map(sys.getsizeof, texts))


def _num_bytes(part: SampleAnswer | SegmentAnswer) -> int:
    """Estimated memory of a log record in bytes."""
    size = PART_BYTES + column_bytes(part)
    if isinstance(part, SegmentAnswer):
        # Counted twice: the log has the segment as it was when it ended, the answer as it is now.
        return 2 * size
    size += 0 if part.message is None else _num_message_bytes(part.message)
    return size + sys.getsizeof(part.text)
