"""Drain before shutdown: hands work over to other replicas, or waits until it has ended."""

import asyncio
import logging
from contextlib import suppress
from dataclasses import asdict, dataclass

from service.cluster.build import Cluster
from service.handoff.build import Handoff
from service.kv.build import Kv
from service.readiness import Readiness
from service.rollouts.build import Rollouts
from service.sessions.manager import SessionManager
from service.weights.build import Weights

LOG_SECONDS = 10.0
RECONNECT_SECONDS = 1.0
FINISH_SECONDS = 2.0
"""Time to finish agent sessions of a server without other replicas once no call runs.

A draining server refuses further calls, so that their agents cannot go on.
"""
LAST_OFFERS_SECONDS = 2.0
"""Time to send the sessions that the end of a drain has cancelled to the replica of their group."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemainingWork:
    """Work that a drain waits for, in the order in which it waits.

    `lease_seconds` is the remaining time of the last lease, and `result_seconds` that of the last
    result, each without renewals.
    """

    num_requests: int
    num_samples: int
    num_handles: int
    lease_seconds: float
    num_downloads: int
    num_results: int
    result_seconds: float
    num_sessions: int

    def __str__(self) -> str:
        parts = (
            (self.num_requests, "admitted requests", f"{self.num_samples} samples"),
            (self.num_handles, "prompt-KV handles", f"leases end in {self.lease_seconds:.0f} s"),
            (self.num_downloads, "downloads of prompt KV", ""),
            (self.num_results, "results to fetch", f"kept for {self.result_seconds:.0f} s"),
            (self.num_sessions, "agent sessions", ""),
        )
        found = (_part(*part) for part in parts if part[0])
        return ", ".join(found) or "nothing"


def _part(number: int, name: str, detail: str) -> str:
    return f"{name}: {number} ({detail})" if detail else f"{name}: {number}"


@dataclass(frozen=True, slots=True, eq=False)
class Drain:
    """Drain of a server: hands its work to other replicas, and waits for what ends here.

    `handoff_seconds` is the time in which running rollouts are handed over; 0: nothing is.
    """

    readiness: Readiness
    cluster: Cluster
    kv: Kv
    rollouts: Rollouts
    sessions: SessionManager
    weights: Weights
    handoff: Handoff
    handoff_seconds: float

    async def run(self, seconds: float) -> None:
        """Stop admission, wait up to `seconds` for admitted work, then cancel what still runs."""
        self.readiness.draining = True
        self.rollouts.admission.close()
        self.rollouts.external_trees.close()
        self.cluster.membership.request_heartbeat()
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(seconds):
                await self._hand_over_and_wait(seconds)
            log.info("drained in %.1f s", asyncio.get_running_loop().time() - began)
        except TimeoutError:
            left = self.remaining_work()
            log.warning("the drain ends after %.0f s; left: %s", seconds, left, extra=asdict(left))
        await self._close()

    async def _hand_over_and_wait(self, seconds: float) -> None:
        """Hand rollouts, results and sessions to other replicas, if possible; wait for all.

        Each session is handed over as soon as no call of it runs. Meanwhile clients can read prompt
        KV and renew leases. The wait also covers the last KV lease and the results of asynchronous
        rollouts that have not been fetched yet.
        """
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(self._log_regularly(seconds))]
            tasks.create_task(self._hand_over_sessions())
            if self.handoff_seconds:
                sender, handoff = self.handoff.sender, self.handoff
                background.append(tasks.create_task(sender.send_all(handoff.results)))
                await sender.send_all(handoff.running, self.handoff_seconds)
            await self.rollouts.admission.wait_until_idle()
            await self.kv.prompt_kv.wait_until_idle()
            await self.rollouts.manager.wait_until_fetched()
            await self._wait_for_sessions()
            await self._wait_for_redirected_callers()
            for task in background:
                task.cancel()

    async def _hand_over_sessions(self) -> None:
        if self.handoff_seconds:
            await self.handoff.sender.send_all(self.handoff.open_sessions)

    async def _wait_for_sessions(self) -> None:
        seconds = FINISH_SECONDS if self.cluster.membership.is_standalone else None
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.sessions.wait_until_ended()

    async def _wait_for_redirected_callers(self) -> None:
        """Serve callers that reconnect after their stream ended; some never do."""
        with suppress(TimeoutError):
            async with asyncio.timeout(RECONNECT_SECONDS):
                await self.rollouts.manager.wait_until_redirected()

    async def _close(self) -> None:
        """Cancel what still runs. Sessions that this ends go to the replica of their group."""
        self.kv.prompt_kv.stop_new_readers()
        self.weights.activation.end_wait()
        await self.sessions.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_OFFERS_SECONDS):
                await self._hand_over_sessions()
        await self.rollouts.manager.cancel_all()

    async def _log_regularly(self, seconds: float) -> None:
        """Log what the drain waits for, until it is cancelled."""
        began = asyncio.get_running_loop().time()
        while True:
            await asyncio.sleep(LOG_SECONDS)
            passed, left = asyncio.get_running_loop().time() - began, self.remaining_work()
            message = "draining for %.0f s, for at most %.0f s more; left: %s"
            log.info(message, passed, seconds - passed, left, extra=asdict(left))

    def remaining_work(self) -> RemainingWork:
        handles = self.kv.prompt_kv.handles
        results = self.rollouts.manager.results_to_fetch()
        return RemainingWork(
            num_requests=self.rollouts.admission.num_requests,
            num_samples=self.rollouts.admission.num_samples,
            num_handles=len(handles),
            lease_seconds=max((each.remaining_seconds for each in handles), default=0.0),
            num_downloads=handles.num_downloads,
            num_results=len(results),
            result_seconds=max(results.values(), default=0.0),
            num_sessions=self.sessions.num_open,
        )
