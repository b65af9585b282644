"""Keeps this replica at what the directory says: serves what is ordered, once that is here.

Everything here is taken up again with the next heartbeat, so nothing that fails is lost, and a
directory that has lost what it held is told again.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from coppice.wire.weights import ActivationMode
from service.cluster.membership import Fleet
from service.cluster.registry import (
    DirectoryLost,
    Order,
    Sight,
)
from service.http.errors import ServiceError, VersionConflict, WeightsRefused
from service.weights.replication.announcer import Telling
from service.weights.replication.downloader import Pull, PullFailed
from service.weights.replication.fetcher import Bringing
from service.weights.replication.load_history import Attempts
from service.weights.replication.manifests import is_another, is_gone, is_published, same_files
from service.weights.replication.replica_status import Standing
from service.weights.stager import Publisher
from service.weights.versions import Version, Versions

EXPECTING_SECONDS = 60.0
EXPECTING_PERIOD_SECONDS = 0.5
POLL_SECONDS = 0.2
FAULT_SECONDS = 1.0

Activate = Callable[[str, ActivationMode], Awaitable[object]]

log = logging.getLogger(__name__)


class Follower:
    """Writes this replica's standing. One step at a time.

    Whoever has just staged a version expects the order to serve it, and looks more often: so that
    the replicas change soon after one another.
    """

    def __init__(
        self,
        fleet: Fleet,
        versions: Versions,
        publisher: Publisher,
        pull: Pull,
        standing: Standing,
        *,
        activate: Activate,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._versions = versions
        self._publisher = publisher
        self.standing = standing
        self._activate = activate
        self._clock = clock
        self._telling = Telling(fleet, versions)
        self._attempts = Attempts(standing, changed=fleet.soon, clock=clock)
        self._bringing = Bringing(
            fleet,
            versions,
            pull,
            self._attempts,
            withdrawn=self._telling.is_withdrawn,
            staged=self._expect,
        )
        self._order: Order | None = None
        self._expecting_until = -float("inf")
        self._turn = asyncio.Lock()
        self._begun = asyncio.Event()
        self._seen = asyncio.Event()
        fleet.watchers.append(lambda sight: self._seen.set())

    async def run(self) -> None:
        """Nothing is brought or served before there is an engine to check it."""
        await self._begun.wait()
        async with self._bringing.running():
            await self._follow()

    async def _follow(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._longest_wait()):
                    await self._seen.wait()
            except TimeoutError:
                self._fleet.soon()
                continue
            self._seen.clear()
            await self._supervised_step(self._fleet.sight)

    async def catch_up(self, seconds: float) -> None:
        """Serves what is ordered before anybody is served; but not for ever without a directory.
        The engine has started."""
        self._begun.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self._catch_up()
        log.error("serving %s: nothing newer could be had", self._versions.active.label)

    async def _catch_up(self) -> None:
        while True:
            with suppress(DirectoryLost):
                sight = await self._fleet.seen()
                await self._supervised_step(sight)
                if self._has_caught_up(sight):
                    return
            await asyncio.sleep(POLL_SECONDS)

    async def _supervised_step(self, sight: Sight) -> None:
        """Whatever is wrong with one step, another one follows."""
        try:
            await self._step(sight)
        except Exception:
            log.exception("a look at the fleet's weights failed")
            await asyncio.sleep(FAULT_SECONDS)

    async def _step(self, sight: Sight) -> None:
        async with self._turn:
            with suppress(DirectoryLost):
                await self._tell(sight)
            sight = self._fleet.sight  # there may be a newer one now
            await self._drop_vanished(sight)
            self._bringing.look(sight)  # what was dropped may have been published anew
            if sight.order is not None and self._is_new(sight.order):
                await self._carry_out(sight.order, sight)

    async def announce(self, version: Version) -> bool:
        """Whether the others know now. VersionConflict if they know another by its name."""
        told = await self._telling.announce(version)
        if told:
            self._expect()
        return told

    async def dropped(self, label: str) -> None:
        await self._telling.dropped(label)

    async def hold(self, label: str) -> None:
        """Brings a version that others have and this one lacks. VersionConflict if that fails."""
        try:
            await self._bringing.hold(label)
        except PullFailed as failure:
            raise VersionConflict(f"it could not be brought here: {failure}") from failure

    async def check_unchanged(self, label: str) -> None:
        """What lies in a shared directory is compared once more, or replicas that load it one after
        the other could serve different weights by one name. WeightsRefused."""
        manifest, version = self._fleet.sight.manifests.get(label), self._versions.find(label)
        if manifest is None or version is None or version.owned:
            return
        if not await asyncio.to_thread(same_files, manifest, version.path):
            raise WeightsRefused("the files are not those that were published")

    def carried_out(self, order: Order) -> None:
        self._order = order
        self.standing.epoch = order.epoch
        self.standing.failed = self.standing.error = None
        self._expecting_until = -float("inf")
        self._fleet.soon()

    async def _tell(self, sight: Sight) -> None:
        """What the directory lacks."""
        await self._telling.tell(sight, self._tell_of)
        ours = self._order
        if ours is not None and (sight.order is None or sight.order.epoch < ours.epoch):
            await self._fleet.directory.order(ours)

    async def _tell_of(self, version: Version) -> bool:
        """Whether there is no more to tell of it."""
        if not self._attempts.is_due(version.label):
            return False
        try:
            announced = await self.announce(version)
        except VersionConflict as conflict:
            self._attempts.failed(version.label, str(conflict))
            return True
        if self._versions.find(version.label) is not None:
            self._versions.announced(version.label, announced)
        return announced

    async def _drop_vanished(self, sight: Sight) -> None:
        """Somebody has deleted it, and perhaps sent another by its name."""
        if not sight.known or not self._fleet.settled or self._telling.forgotten:
            return
        gone = {v.label for v in self._versions.all() if is_gone(v, sight)}
        for label in gone - set(self._bringing.coming):
            if self._telling.is_older(sight, label):
                continue
            with suppress(ServiceError):
                await self._publisher.delete(label, tell=False)
                self._attempts.well(label)  # what had failed was what is gone

    async def _carry_out(self, order: Order, sight: Sight) -> None:
        version = self._versions.find(order.version)
        if order.version in self._bringing.coming or not self._attempts.is_due(order.version):
            return
        if version is None or version.state == "incomplete":
            self._attempts.failed(order.version, "nobody has told of its files")
            return
        if is_published(version) and (not version.announced or is_another(version, sight)):
            self._attempts.failed(order.version, "others have other weights by this name")
            return
        try:
            await self._activate(order.version, order.mode)
        except ServiceError as error:
            self._attempts.failed(order.version, str(error))
        else:
            self._attempts.well(order.version)
            self.carried_out(order)

    def _is_new(self, order: Order) -> bool:
        """Of two that were given apart from one another and have one epoch, the directory's stands:
        who gave the other one follows it."""
        if order.epoch == self.standing.epoch and self._order is not None:
            return order.version != self._order.version
        return order.epoch > self.standing.epoch

    def _has_caught_up(self, sight: Sight) -> bool:
        if sight.order is None:
            # Where there are others, they may only not have told of it yet.
            return self._fleet.settled
        return not self._is_new(sight.order)

    def _expect(self) -> None:
        self._expecting_until = self._clock() + EXPECTING_SECONDS
        self._fleet.soon()

    def _longest_wait(self) -> float | None:
        expecting = self._clock() < self._expecting_until
        return EXPECTING_PERIOD_SECONDS if expecting else None
