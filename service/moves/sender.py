"""Sending side of a move: a draining replica sends rollouts to other replicas."""

import asyncio
import logging
import math
from contextlib import suppress

import httpx

from coppice.wire.moves import MovedRollout
from engine.protocol.generation import Generation
from service.cluster.idempotency_claim import move_key
from service.cluster.idempotency_keys import IdempotencyKeys
from service.cluster.membership import ClusterMembership
from service.cluster.registry import Replica
from service.config.allowed_peers import Peers
from service.moves.peers import Connect, MovePeers, cancel, is_accepted_by
from service.moves.state import estimated_bytes, state_of
from service.observability.metrics import ClusterMetrics
from service.rollouts.admission import Admission
from service.rollouts.manager import RolloutManager
from service.rollouts.rollout import Rollout
from service.versions import Versions

CONCURRENT_MOVES = 8
POLL_SECONDS = 0.01
RESULT_POLL_SECONDS = 0.1
RESULT_SECONDS = 10.0
RETRY_SECONDS = 2.0
PATH = "/v1/moves"

log = logging.getLogger(__name__)


class MoveSender:
    """Moves the rollouts of this replica to replicas with the same active weights version.

    A rollout that no replica accepts within the time continues here, as does one of more than
    `max_bytes`, the limit of request bodies, which is assumed to be the same there. A result that
    no replica accepts is offered again after `RETRY_SECONDS`.
    """

    def __init__(
        self,
        engine: Generation,
        versions: Versions,
        admission: Admission,
        rollouts: RolloutManager,
        cluster: ClusterMembership,
        keys: IdempotencyKeys,
        peers: Peers,
        metrics: ClusterMetrics,
        *,
        max_bytes: int,
        client: type[httpx.AsyncClient] = httpx.AsyncClient,
    ) -> None:
        self._engine = engine
        self._versions = versions
        self._admission = admission
        self._rollouts = rollouts
        self._cluster = cluster
        self._keys = keys
        self._peers = MovePeers(cluster, peers, client)
        self._max_bytes = max_bytes
        self._outcomes = metrics.moves
        self._slots = asyncio.Semaphore(CONCURRENT_MOVES)
        self._busy: set[str] = set()
        self._retry_at: dict[str, float] = {}

    async def send_all(self, seconds: float) -> None:
        """Move all rollouts that can be moved, within `seconds`.

        These may include rollouts that were admitted before the drain and start during it.
        """
        connect = self._peers.connect() if seconds and self.candidates() else None
        if connect is None:
            return
        tried = set[tuple[str, bool]]()
        async with asyncio.TaskGroup() as tasks:
            until = _now() + seconds
            while _now() < until:
                is_idle = self._admission.is_idle
                for rollout in self._untried(tried):
                    work = self._send(connect, until, rollout, is_result=rollout.ended)
                    tasks.create_task(work)
                if is_idle:
                    return
                await asyncio.sleep(POLL_SECONDS)

    async def send_results(self) -> None:
        """Move the results that callers are to fetch, until it is cancelled.

        These are the results that `send_all` has not moved, and those of rollouts that it has not
        moved and that have ended since.
        """
        is_alone = self._cluster.is_standalone
        connect = None if is_alone else await asyncio.to_thread(self._peers.connect)
        if connect is None:
            return
        async with asyncio.TaskGroup() as tasks:
            while True:
                for rollout in self._due_results() if self.candidates() else ():
                    self._busy.add(rollout.id)
                    tasks.create_task(self._send_result(connect, rollout))
                await asyncio.sleep(RESULT_POLL_SECONDS)

    def _due_results(self) -> list[Rollout]:
        now, found = _now(), self._rollouts.results_to_move()
        self._retry_at = {each.id: self._retry_at.get(each.id, 0.0) for each in found}
        return [
            each for each in found if each.id not in self._busy and self._retry_at[each.id] <= now
        ]

    async def _send_result(self, connect: Connect, rollout: Rollout) -> None:
        try:
            await self._send(connect, _now() + RESULT_SECONDS, rollout, is_result=True)
        finally:
            is_large = self._is_too_large(rollout)
            self._retry_at[rollout.id] = math.inf if is_large else _now() + RETRY_SECONDS
            self._busy.discard(rollout.id)

    def _untried(self, tried: set[tuple[str, bool]]) -> list[Rollout]:
        """Running rollouts, and results to fetch, that are not in `tried`; adds them to it."""
        running = [each for each in self._rollouts.in_flight() if not each.ended]
        found = {(each.id, False): each for each in running if each.can_suspend}
        found |= {(each.id, True): each for each in self._rollouts.results_to_move()}
        untried = [found[key] for key in found.keys() - tried]
        tried.update(found)
        return untried

    async def _send(
        self, connect: Connect, until: float, rollout: Rollout, *, is_result: bool
    ) -> None:
        """Move a result, or a running rollout, which is suspended only when its turn has come."""
        async with self._slots:
            if _now() >= until:
                if not is_result:  # results are offered again
                    self._outcomes.labels("kept").inc()
            elif self._is_too_large(rollout):
                log.info("rollout %s is too large for a move", rollout.id)
                self._outcomes.labels("kept").inc()
            elif is_result:
                await self._move_result(connect, until, rollout)
            elif not rollout.ended:
                async with rollout.suspended(self._engine) as is_suspended:
                    if is_suspended:
                        await self._relocate(connect, until, rollout)

    async def _move_result(self, connect: Connect, until: float, rollout: Rollout) -> None:
        if self._rollouts.is_result_to_move(rollout):
            try:
                await self._relocate(connect, until, rollout)
            finally:
                if rollout.moved_to is not None:
                    self._rollouts.on_result_moved(rollout)

    def _is_too_large(self, rollout: Rollout) -> bool:
        return estimated_bytes(rollout, self._engine) > self._max_bytes

    async def _relocate(self, connect: Connect, until: float, rollout: Rollout) -> None:
        """Set `moved_to` of a rollout to the replica that continues it, if one accepts it in time.

        An unexpected error keeps the rollout here, and does not end the others.
        """
        rollout.is_moving = True
        try:
            async with connect() as http:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(until):
                        await self._offer(http, rollout)
        except Exception:
            log.exception("a move failed")
        finally:
            rollout.is_moving = False
        url = rollout.moved_to
        self._outcomes.labels("kept" if url is None else "moved").inc()
        outcome = "stays here" if url is None else f"moved to {url}"
        log.info("rollout %s %s", rollout.id, outcome)

    async def _offer(self, http: httpx.AsyncClient, rollout: Rollout) -> None:
        """Offer a rollout to one replica after the other.

        `moved_to` is set as soon as one has accepted it: a timeout, or an error while the
        connection is closed, must not continue it here, too.
        """
        if not self.candidates():
            return
        source, version = self._cluster.own_id, self._versions.active.label
        state = await state_of(rollout, source=source, version=version)
        body = await asyncio.to_thread(_encoded, state)
        for replica in self.candidates():
            if not rollout.is_suspended:
                return  # it was cancelled, or its deadline has passed
            if await self._is_accepted(http, replica, rollout, body):
                rollout.moved_to = replica.url
                return

    async def _is_accepted(
        self, http: httpx.AsyncClient, replica: Replica, rollout: Rollout, body: bytes
    ) -> bool:
        """True if the other replica has accepted the rollout, and nobody has cancelled it since."""
        is_accepted = False
        try:
            has_accepted = await is_accepted_by(http, replica, PATH, body, resource_id=rollout.id)
            if has_accepted and not rollout.is_suspended:
                await cancel(http, replica, PATH, rollout.id)
            else:
                is_accepted = has_accepted
        finally:
            if not is_accepted:
                keys = {claim.registry_key for claim in rollout.claims}
                await self._keys.take_back(keys | {move_key(rollout.id, rollout.owner)}, replica.id)
        return is_accepted

    def candidates(self) -> list[Replica]:
        """Replicas that may accept a rollout, in random order."""
        return self._peers.candidates(self._versions.active.label)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _encoded(state: MovedRollout) -> bytes:
    return state.model_dump_json().encode()
