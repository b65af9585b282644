"""Execution of a rollout: runs the groups of one request concurrently and logs their results.

A rollout ends exactly once, with an answer or with an error.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from coppice.wire.packed.results import EndRecord, ProgressRecord, Record
from coppice.wire.rollouts import (
    GroupAnswer,
    Outcome,
    RolloutAnswer,
    RolloutRequest,
    RunningAnswer,
)
from engine.protocol.generation import Generation
from service.cluster.idempotency_claim import IdempotencyClaim
from service.cluster.membership import RETRY_AFTER_SECONDS
from service.errors import ClusterUnavailable, Draining, RedirectToReplica, ServiceError
from service.http.exception_handlers import to_service_error
from service.kv.handles.group_exports import NOT_CONTINUED, exporting_group
from service.kv.handles.manager import PromptKvManager
from service.log_context import group_id, rollout_id
from service.observability.build import Observability
from service.rollouts.fairness import PER_TURN, TimeSlice, Turns
from service.rollouts.groups.group import EndReason, Group
from service.rollouts.groups.options import GroupOptions, given_tokens, num_given
from service.rollouts.groups.sample_observer import SampleObserver
from service.rollouts.groups.suspended_group import resumed
from service.rollouts.record_reader import SampleKey
from service.rollouts.result_log import ResultLog

log = logging.getLogger(__name__)


class Rollout:
    """Execution of one rollout request: its groups, the log of their results, and the answer.

    Owned by the rollout manager, which runs it on one event loop. `owner` is the API key that
    started it, given if all groups have ended; no other key can see it. A detached rollout outlives
    its caller's connection. `awaits_fetch` is true if a caller is to fetch the result later.

    A rollout that `can_move` can be moved to another replica: while it is `suspended`, with its
    `request`, or its result. Its `moved_to` is then the URL of that replica; otherwise it goes on
    here. `is_moving` is true while it is offered to other replicas.
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
        observer: SampleObserver | None = None,
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
        turns = Turns()
        for group in groups:
            group.turns = turns
        num_resumed = {
            (group.options.index, index): number
            for group in groups
            for index, number in enumerate(given_tokens(group.options))
        }
        streams = options.stream_tokens and observer is None
        self.log = ResultLog(
            rollout_id, len(groups), streams_tokens=streams, num_resumed=num_resumed
        )
        self.log.observer = observer
        self._ended = asyncio.Event()
        self._has_stopped = asyncio.Event()
        self._move_ended = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    @property
    def num_running(self) -> int:
        return sum(group.num_running for group in self.groups)

    @property
    def num_unanswered(self) -> int:
        """Number of groups without an answer, which have failed if the rollout has ended."""
        return sum(group.options.index not in self.log.answers for group in self.groups)

    @property
    def is_idle(self) -> bool:
        """True if the rollout has ended or makes no progress until its caller sends a request."""
        return self.ended or all(group.is_idle for group in self.groups)

    async def wait_until_idle(self) -> None:
        while not self.is_idle:
            await self.log.wait_for_change()

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
        if self.log.streams_tokens:
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

    async def restore(
        self,
        records: Sequence[Record],
        groups: Sequence[Group],
        *,
        num_resumed: dict[SampleKey, int],
        streams_tokens: bool,
    ) -> None:
        """Continue from the log of another replica; `groups` are those that have not ended."""
        self.log = ResultLog(
            self.id, len(self.groups), streams_tokens=streams_tokens, num_resumed=num_resumed
        )
        await self.log.restore(records)
        self._num_done = sum(answer.num_samples for answer in self.log.answers.values())
        self.num_samples = max(self.num_samples, self._num_done)
        self.groups = groups
        turn = TimeSlice()
        for group in groups if streams_tokens else ():
            self._restore_tokens(group)
            await turn.pause()

    def _restore_tokens(self, group: Group) -> None:
        """Restore the tokens that readers have received or would receive of running samples."""
        for index, sample in enumerate(group.options.continued):
            start, end = num_given(group.options, index), len(sample.token_ids)
            if end > start:
                self.log.restore_tokens(group.options.index, index, sample.part(start, end))

    async def _spread(self, group: Group) -> None:
        """Yield to the event loop once per PER_TURN started samples, so that they are submitted."""
        self._num_started += group.options.n
        while self._num_started >= PER_TURN:
            self._num_started -= PER_TURN
            await asyncio.sleep(0)

    def _count(self, group: Group, observability: Observability, _: asyncio.Task[None]) -> None:
        answer = self.log.answers.get(group.options.index)
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
        else:
            self.log.close()

    async def wait(self) -> None:
        await self._ended.wait()

    def answers(self) -> list[GroupAnswer]:
        """Answers of the groups that have ended, in the order of the request."""
        return [answer for _, answer in sorted(self.log.answers.items())]

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
            id=self.id, outcome=self._outcome(), groups=self.answers(), usage=self.log.usage()
        )

    def check_here(self) -> None:
        """Raise RedirectToReplica if the rollout was moved to another replica."""
        if self.moved_to is not None:
            self.awaits_redirect = False
            raise RedirectToReplica(self.moved_to)

    def records(self, *, completes_samples: bool = True) -> AsyncIterator[Record]:
        """Read the rollout's records, as with `ResultLog.read`."""
        return self.log.read(self._progress_record, completes_samples=completes_samples)

    def _progress_record(self) -> ProgressRecord:
        progress = self.progress()
        return ProgressRecord(
            num_samples=progress.num_samples, num_samples_done=progress.num_samples_done
        )

    async def _run_group(
        self, engine: Generation, prompt_kv: PromptKvManager, group: Group
    ) -> None:
        # Not `options.id`, which the caller chose and which could contain anything
        index, results = group.options.index, self.log
        group_id.set(str(index))
        group.observer = results.observer
        if results.streams_tokens:
            group.on_tokens = partial(results.add_tokens, index)
        async with exporting_group(
            prompt_kv,
            group.options.owner,
            group.options.kv_lease_seconds,
            group.options.prompt_token_ids,
            partial(results.add_kv, index),
        ) as group.exports:
            answer = await group.run(engine, partial(results.add_part, index))
        if answer is None:
            return  # suspended
        if group.exports is not None:
            answer = group.exports.with_kv(answer)
        for segment in answer.segments or ():
            if segment.kv_reason == NOT_CONTINUED.kv_reason:
                results.add_kv(index, segment.id, NOT_CONTINUED)
        results.add_answer(answer)

    def _end(self) -> None:
        end = self._end_record() if self.moved_to is None else None
        self.awaits_redirect = end is None and self.log.has_readers
        self._ended.set()
        self._has_stopped.set()
        self.log.end(end)

    def _end_record(self) -> EndRecord:
        problem = None if self.error is None else self.error.problem()
        end = EndRecord(outcome=self._outcome(), usage=self.log.usage(), problem=problem)
        log.info("rollout %s", end.outcome, extra=end.usage.model_dump())
        return end

    def _outcome(self) -> Outcome:
        if self.error is not None:
            return "failed"
        outcomes = {answer.outcome for answer in self.log.answers.values()}
        return outcomes.pop() if len(outcomes) == 1 else "partial"
