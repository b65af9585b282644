"""An activation of all replicas, led by the one that was asked.

First the others bring and stage it, then it is activated here, then it is ordered: what cannot be
loaded is found out by one, and the others change while they already hold it. No wait is longer
than the bound in all, and whoever has failed, drains or is gone is not waited for.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from coppice.wire.weights import ActivationAnswer, ActivationMode
from service.cluster.membership import Fleet
from service.cluster.registry import DirectoryLost, Order, Replica, Sight
from service.http.errors import VersionConflict
from service.weights.replication.follower import Follower
from service.weights.versions import Versions

POLL_SECONDS = 0.1

Activate = Callable[[str, ActivationMode, bool], Awaitable[ActivationAnswer]]

log = logging.getLogger(__name__)


class Publication:
    def __init__(
        self,
        fleet: Fleet,
        versions: Versions,
        follower: Follower,
        *,
        activate: Activate,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._versions = versions
        self._follower = follower
        self._activate = activate
        self._seconds = seconds
        self._clock = clock
        self._over = False
        self._bounds: set[asyncio.Timeout] = set()

    def stop(self) -> None:
        """Nobody is waited for any more, and nothing is brought."""
        self._over = True
        for bound in self._bounds:
            if not bound.expired():
                bound.reschedule(0)

    async def activate(
        self, label: str, mode: ActivationMode, *, allow_rollback: bool
    ) -> ActivationAnswer:
        """`behind` of the answer are the replicas that do not serve it yet."""
        deadline = self._clock() + self._seconds
        await self._until(lambda replica: True, deadline)
        await self._hold(label, deadline)
        self._versions.check_activation(label, allow_rollback=allow_rollback)
        await self._until(lambda replica: label in replica.staged, deadline, failing=label)
        answer = await self._activate(label, mode, allow_rollback)
        order = await self._order(label, mode, allow_rollback)
        self._follower.carried_out(order)
        behind = await self._until(
            lambda replica: replica.epoch >= order.epoch, deadline, failing=label
        )
        return answer.model_copy(update={"behind": sorted(replica.id for replica in behind)})

    async def _hold(self, label: str, deadline: float) -> None:
        seconds = 0.0 if self._over else max(0.0, deadline - self._clock())
        bound = asyncio.timeout(seconds)
        self._bounds.add(bound)
        try:
            async with bound:
                await self._follower.hold(label)
        except TimeoutError:
            raise VersionConflict("it could not be brought here in time") from None
        finally:
            self._bounds.discard(bound)

    async def _order(self, label: str, mode: ActivationMode, allow_rollback: bool) -> Order:
        """A second activation of what is ordered is the same order. Without a directory it is
        ordered when that is back."""
        before = self._fleet.sight.order
        if before is not None and before.version == label:
            return before
        epoch = max(self._follower.standing.epoch, 0 if before is None else before.epoch) + 1
        order = Order(epoch=epoch, version=label, mode=mode, allow_rollback=allow_rollback)
        try:
            stands = await self._fleet.directory.order(order)
        except DirectoryLost:
            log.warning("%s is not ordered yet: the directory does not answer", label)
            return order
        if stands != order:
            raise VersionConflict(f"{stands.version!r} was activated by others meanwhile")
        return order

    async def _until(
        self, done: Callable[[Replica], bool], deadline: float, *, failing: str | None = None
    ) -> list[Replica]:
        """Who is not done, when all that can be are, or when time is up."""
        while True:
            try:
                # A server that stops has left the directory, and must not list itself again.
                sight = self._fleet.sight if self._over else await self._fleet.seen()
            except DirectoryLost:
                return []
            late = [replica for replica in self._others(sight) if not done(replica)]
            time_is_up = self._over or self._clock() >= deadline
            if time_is_up or all(replica.failed == failing for replica in late):
                return late
            await asyncio.sleep(POLL_SECONDS)

    def _others(self, sight: Sight) -> list[Replica]:
        return [
            replica
            for replica in sight.replicas.values()
            if replica.id != self._fleet.me and replica.state == "serving"
        ]
