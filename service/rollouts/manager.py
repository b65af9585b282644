"""Rollout manager: admission, execution, cancellation and retention of all rollouts.

Its gate is closed while weights are activated. Requests that arrive then wait for it, so that a
weights constraint is checked against the version that will generate the samples. There is no await
between that check and the start of the rollout, so an activation sees either the whole rollout or
nothing of it.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from coppice.wire.columns.logprobs import PromptLogprobs
from engine.protocol.generation import Generation
from service.adapters.manager import AdapterManager
from service.cluster.idempotency_claim import IdempotencyClaim
from service.cluster.idempotency_keys import IdempotencyKeys
from service.config.limits import LimitsSettings
from service.errors import DRAINING_RETRY_SECONDS, Draining, RolloutNotFound
from service.kv.handles.manager import PromptKvManager
from service.observability.build import Observability
from service.rollouts.admission import Admission, Reservation
from service.rollouts.request import NewRollout
from service.rollouts.result_cache import ResultCache
from service.rollouts.rollout import Rollout
from service.rollouts.rollout_factory import RolloutFactory

PromptScorer = Callable[[NewRollout, list[list[int]]], Awaitable[list[PromptLogprobs]]]
POLL_SECONDS = 0.05


class RolloutManager:
    """Starts, finds and cancels rollouts, and retains the results of ended ones.

    On exit, the context manager `running` cancels all running rollouts.
    """

    def __init__(
        self,
        engine: Generation,
        prompt_kv: PromptKvManager,
        keys: IdempotencyKeys,
        adapters: AdapterManager,
        admission: Admission,
        factory: RolloutFactory,
        observability: Observability,
        limits: LimitsSettings,
    ) -> None:
        self._engine = engine
        self._prompt_kv = prompt_kv
        self.keys = keys
        self._adapters = adapters
        self._admission = admission
        self.factory = factory
        self._observability = observability
        self._running: dict[str, Rollout] = {}
        self._results = ResultCache(
            max_seconds=limits.keep_answers_seconds, max_bytes=limits.keep_answers_bytes
        )
        self._tasks: asyncio.TaskGroup | None = None
        self._gate = asyncio.Event()
        self._gate.set()
        self._stopped = False

    def in_flight(self) -> list[Rollout]:
        """Running rollouts, newest first."""
        return list(reversed(self._running.values()))

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_samples_running(self) -> int:
        return sum(rollout.num_running for rollout in self._running.values())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                yield
            finally:
                await self.cancel_all()
                self._tasks = None

    async def start(
        self,
        request: NewRollout,
        *,
        detached: bool = False,
        claim: IdempotencyClaim | None = None,
        prompt_scorer: PromptScorer | None = None,
    ) -> Rollout:
        """Validate a request and start its rollout; a rejected request submits nothing to vLLM.

        `prompt_scorer` computes the prompt logprobs of the requests that have this option. With an
        idempotency claim, returns the rollout that the same request has already started, if there
        is one, also during a drain. Raises RedirectToReplica if another replica holds the claim.
        """
        if claim is None:
            return await self._start(request, prompt_scorer, detached=detached)
        started = self.keys.find(claim)
        if started is not None:
            return self.get(started, owner=request.owner)
        self._admission.check_open()
        async with self.keys.claimed(claim):
            return await self._start(request, prompt_scorer, detached=True, claim=claim)

    async def _start(
        self,
        request: NewRollout,
        prompt_scorer: PromptScorer | None,
        *,
        detached: bool,
        claim: IdempotencyClaim | None = None,
    ) -> Rollout:
        prepared = await self.factory.prepare(
            request, detached=detached, is_blocking=not (detached or request.stream)
        )
        reservation = self._admission.reserve(
            request.owner,
            samples=prepared.num_samples,
            prompt_tokens=prepared.num_tokens,
            support_bytes=prepared.support_bytes,
        )
        try:
            scored = await _score_prompts(request, prepared.prompts, prompt_scorer)
            rollout = await self.factory.create(
                request, prepared, self.wait_gate_open, detached=detached, claim=claim
            )
            for group, prompt_logprobs in zip(rollout.groups, scored, strict=True):
                group.prompt_logprobs = prompt_logprobs
            if claim is not None:
                self.keys.bind(claim, rollout.id)
            return self.run(rollout, reservation)
        except BaseException:
            self._admission.release(reservation)
            raise

    def get(self, rollout_id: str, *, owner: str) -> Rollout:
        """Find a running or retained rollout of `owner`; RolloutNotFound if there is none.

        Raises RedirectToReplica if it was moved.
        """
        rollout = self.find(rollout_id)
        if rollout is None or rollout.owner != owner:
            raise RolloutNotFound()
        rollout.check_here()
        return rollout

    async def cancel(self, rollout: Rollout) -> None:
        await rollout.end(self._engine, "cancelled")

    async def cancel_owned_by(self, owner: str) -> None:
        """Cancel all running rollouts of an API key."""
        for rollout in list(self._running.values()):
            if rollout.owner == owner:
                await self.cancel(rollout)

    def on_disconnect(self, rollout: Rollout) -> None:
        """Cancel a rollout whose caller has disconnected, unless the rollout is detached.

        The cancellation runs in a separate task: the caller's task is itself being cancelled, so
        its first await might be its last.
        """
        if not (rollout.ended or rollout.detached):
            self.in_background(self.cancel(rollout))

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the manager's task group; a no-op once the task group has ended."""
        if self._tasks is None:
            work.close()
        else:
            self._tasks.create_task(work)

    async def cancel_all(self) -> None:
        """Cancel all rollouts for shutdown; requests that wait for an activation are rejected."""
        self._stopped = True
        self._gate.set()
        for rollout in list(self._running.values()):
            await self.cancel(rollout)

    async def end_groups_bound_to_other_versions(self, version: str) -> int:
        """Abort groups that require another exact version; returns the number of samples."""
        bound = [
            group
            for rollout in self._running.values()
            for group in rollout.groups
            if group.options.exact_version not in (None, version)
        ]
        num_samples = sum(group.num_running for group in bound)
        for group in bound:
            await group.end(self._engine, "version_changed")
        return num_samples

    @asynccontextmanager
    async def close_gate(self) -> AsyncIterator[None]:
        self._gate.clear()
        try:
            yield
        finally:
            self._gate.set()

    async def wait_gate_open(self) -> None:
        await self._gate.wait()
        if self._stopped:
            raise Draining(retry_after_seconds=DRAINING_RETRY_SECONDS)

    @property
    def is_idle(self) -> bool:
        """True if no rollout is sampling; a tree that waits for its caller to branch is idle.

        A tree can wait without a bound.
        """
        return all(rollout.is_idle for rollout in self._running.values())

    async def wait_until_idle(self) -> None:
        while not self.is_idle:
            busy = next(r for r in self._running.values() if not r.is_idle)
            await busy.wait_until_idle()

    async def wait_until_fetched(self) -> None:
        """Wait until every retained result that a caller is to fetch was fetched or has expired."""
        while self.results_to_fetch():
            await asyncio.sleep(POLL_SECONDS)

    def results_to_fetch(self) -> dict[str, float]:
        """Ids of the retained results that a caller is to fetch, each with its time to live."""
        return self._results.awaiting_fetch()

    async def wait_until_redirected(self) -> None:
        """Wait until every caller whose stream ended because of a move was redirected."""
        while any(rollout.awaits_redirect for rollout in self._results.list()):
            await asyncio.sleep(POLL_SECONDS)

    def check(self) -> None:
        """Assert the invariants of the result cache."""
        self._results.check()

    def run(self, rollout: Rollout, reservation: Reservation) -> Rollout:
        """Run a rollout; its reservation is released when it has ended."""
        assert self._tasks is not None, "start inside running()"
        self._results.remove(rollout.id)  # the address of one that was moved away and returns
        self._running[rollout.id] = rollout
        self._adapters.begin(rollout.adapter)
        task = self._tasks.create_task(
            rollout.run(self._engine, self._prompt_kv, self._observability),
            name=f"rollout-{rollout.id}",
        )
        task.add_done_callback(lambda _: self._on_rollout_done(rollout, reservation))
        return rollout

    def _on_rollout_done(self, rollout: Rollout, reservation: Reservation) -> None:
        self._admission.release(reservation)
        self._adapters.end(rollout.adapter)
        if not rollout.ended:
            rollout.on_never_started()
        if rollout.is_discarded:
            return
        del self._running[rollout.id]
        rollout.start_leases()
        if rollout.moved_to is not None:
            return self._on_moved(rollout)
        is_retained = rollout.detached or rollout.awaits_fetch
        if is_retained:
            self._results.add(rollout)
        for claim in rollout.claims:
            self.keys.ended(claim)
        # After the answer is stored: an error in the metrics must not lose it.
        self._observability.metrics.rollouts.groups.labels("failed").inc(rollout.num_unanswered)
        if is_retained:
            rollout.drop_groups()

    async def discard(self, rollout: Rollout, url: str | None) -> None:
        """Cancel a copy of a rollout that continues on another replica, at `url` if it is known.

        Nobody finds it here any more, and its keys are released.
        """
        for claim in rollout.claims:
            self.keys.release(claim)
        self._running.pop(rollout.id, None)
        self._results.remove(rollout.id)
        rollout.discard(url)
        await self.cancel(rollout)

    def _on_moved(self, rollout: Rollout) -> None:
        """Keep the address of a moved rollout for the same time as the results of others."""
        self.keys.handed_over(claim.registry_key for claim in rollout.claims)
        for claim in rollout.claims:
            self.keys.ended(claim)
        rollout.drop_groups()
        rollout.log.clear()
        rollout.awaits_fetch = False
        self._results.add(rollout)

    def on_result_moved(self, rollout: Rollout) -> None:
        """Keep the address of a retained result that was moved, instead of the result."""
        self._results.remove(rollout.id)
        self._on_moved(rollout)

    def results_to_move(self) -> list[Rollout]:
        """Retained results that a caller is to fetch, and that can be moved."""
        return [each for each in self._results.list() if _is_movable_result(each)]

    def is_result_to_move(self, rollout: Rollout) -> bool:
        """True if the rollout is one of `results_to_move`."""
        return self._results.get(rollout.id) is rollout and _is_movable_result(rollout)

    def find(self, rollout_id: str) -> Rollout | None:
        """Rollout that runs here, or whose result or new address is retained."""
        return self._running.get(rollout_id) or self._results.get(rollout_id)

    def has(self, rollout_id: str) -> bool:
        """True if a rollout runs here or its result is retained, not only its new address."""
        result = self._results.get(rollout_id)
        return rollout_id in self._running or (result is not None and result.moved_to is None)

    @property
    def accepts_moves(self) -> bool:
        """True unless weights are being activated, or the server stops."""
        return self._gate.is_set() and not self._stopped


def _is_movable_result(rollout: Rollout) -> bool:
    return rollout.awaits_fetch and rollout.can_move and rollout.error is None


async def _score_prompts(
    request: NewRollout, prompts: list[list[int]], prompt_scorer: PromptScorer | None
) -> Sequence[PromptLogprobs | None]:
    """Prompt logprobs of each group, before the rollout exists.

    An activation may wait for the end of all rollouts while scoring waits for the activation.
    """
    if request.prompt_logprobs is None:
        return [None] * len(prompts)
    assert prompt_scorer is not None, "routes that accept prompt_logprobs pass a scorer"
    return await prompt_scorer(request, prompts)
