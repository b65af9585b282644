"""This replica among the others: it shows itself, remembers who is there, says where things belong.

Nothing that runs waits for the directory. Where a name belongs is answered from memory; only for a
replica that was never seen is the directory asked. Who has an idempotency key is asked before a
rollout begins, for a bounded time; without an answer it begins here, and its key is shared when the
directory is back.

Who is not listed is gone only if that can be said: a directory that was lost, or has lost what it
held, is believed again after one whole expiry, when everybody who lives has shown himself.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace

from service.cluster.claims import Claims
from service.cluster.redirect import Elsewhere
from service.cluster.registry import Directory, DirectoryLost, Replica, Sight
from service.cluster.settings import DirectorySettings
from service.http.errors import DirectoryUnavailable, ReplicaGone

FIRST_RETRY_SECONDS = 0.25
RETRY_AFTER_SECONDS = 2.0
STOP_SECONDS = 5.0

log = logging.getLogger(__name__)


class Fleet:
    """Owner of this replica's entry. Lives on one event loop.

    `describe` is asked at every heartbeat; `failed` is told which call got no answer, `unshared` of
    every rollout whose key could not be asked for.
    """

    def __init__(
        self,
        directory: Directory,
        settings: DirectorySettings,
        *,
        describe: Callable[[], Replica],
        failed: Callable[[str], None],
        unshared: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory = directory
        self.me = describe().id
        self._settings = settings
        self._describe = describe
        self._failed = failed
        self._unshared = unshared
        self._clock = clock
        self.watchers: list[Callable[[Sight], None]] = []
        self._sight = Sight(known=False, replicas={}, manifests={}, order=None)
        self._remembered: dict[str, Replica] = {}
        self._claims = Claims(claim=self._holder, release=self._free)
        self._over = False
        self._turn = asyncio.Lock()
        self._wanted = asyncio.Event()
        self._num_begun = 0
        self._failures = 0
        self._contact_since: float | None = None
        self._contact_at = clock()

    @property
    def sight(self) -> Sight:
        """The last one there was."""
        return self._sight

    @property
    def last_number(self) -> int:
        """Of the last look that has begun."""
        return self._num_begun

    @property
    def lost(self) -> bool:
        return self._contact_since is None

    @property
    def contact_age_seconds(self) -> float:
        """Since the directory was last heard, or since the start."""
        return self._clock() - self._contact_at

    @property
    def settled(self) -> bool:
        """Whether everybody who lives has had the time to show himself."""
        if self._contact_since is None:
            return False
        alone = self._settings.redis_url is None
        return alone or self._clock() - self._contact_since >= self._settings.expire_seconds

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Does not wait for the directory. Leaving it, the replica is listed no more."""
        beating = asyncio.create_task(self._beat_for_ever())
        try:
            yield
        finally:
            self._over = True
            self._wanted.set()
            beating.cancel()
            # A client of Redis that swallows the cancellation must not keep the server from ending.
            await asyncio.wait([beating], timeout=STOP_SECONDS)
            with suppress(DirectoryLost), self.counted("leave"):
                await self.directory.leave(self.me)
            await self.directory.close()

    def soon(self) -> None:
        """What this replica says of itself has changed: others are to hear it now."""
        self._wanted.set()

    async def seen(self) -> Sight:
        """What there is, not older than this call, and what this replica says of itself is there.
        DirectoryLost."""
        if self._over:
            raise DirectoryLost("this replica has left")
        begun = self._num_begun
        async with self._turn:
            if self._num_begun == begun:
                await self._beat()
        if self.lost:
            raise DirectoryLost()
        return self._sight

    async def check_here(self, replica_id: str) -> None:
        """Raises Elsewhere, or why nobody can be named, unless this is the replica."""
        if replica_id == self.me:
            return
        if replica_id not in self._remembered:
            await self._look_for(replica_id)
        raise Elsewhere(self._remembered[replica_id].url)

    async def claim(self, place: str) -> None:
        """The place is this replica's from now on; raises Elsewhere if it is another's."""
        self._claims.add(place)
        try:
            await self._claim(place)
        except BaseException:
            self._claims.discard(place)
            raise

    def release(self, place: str) -> None:
        """The directory hears of it with the next heartbeat. Again changes nothing."""
        self._claims.release(place)

    async def give_back(self, place: str) -> None:
        """As `release`, but told at once if that can be: a request that is refused here may be sent
        elsewhere next. Nobody claims the place here meanwhile. Cancelled, the next heartbeat tells.
        """
        if self._claims.release(place) and not self.lost:
            with suppress(DirectoryLost):
                await self._claims.tell_released(place)

    @contextmanager
    def counted(self, operation: str) -> Iterator[None]:
        """Around every call of the directory."""
        try:
            yield
        except DirectoryLost:
            self._failed(operation)
            raise

    async def _claim(self, place: str) -> None:
        if self.lost:
            return self._unshared()
        try:
            holder = await self._holder(place)
        except DirectoryLost:
            self.soon()
            return self._unshared()
        try:
            await self.check_here(holder)
        except ReplicaGone:
            # It went between the two questions; the next one takes its place over.
            raise DirectoryUnavailable(retry_after_seconds=RETRY_AFTER_SECONDS) from None

    async def _holder(self, place: str) -> str:
        with self.counted("claim"):
            return await self.directory.claim(
                place, self.me, seconds=self._settings.claim_seconds, take_over=self.settled
            )

    async def _free(self, place: str) -> None:
        with self.counted("release"):
            await self.directory.release(place, self.me)

    async def _look_for(self, replica_id: str) -> None:
        """Remembered afterwards; raises if it is gone, or might not be."""
        with suppress(DirectoryLost):
            await self.seen()
        if replica_id in self._remembered:
            return
        if not self.settled:
            raise DirectoryUnavailable(retry_after_seconds=RETRY_AFTER_SECONDS)
        raise ReplicaGone()

    async def _beat_for_ever(self) -> None:
        while not self._over:
            self._wanted.clear()
            await self._supervised_beat()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause_seconds()):
                    await self._wanted.wait()

    async def _supervised_beat(self) -> None:
        """Whatever is wrong with the directory, the server serves on."""
        try:
            async with self._turn:
                await self._beat()
        except Exception:
            log.exception("a heartbeat failed")
            self._lose("a fault of ours")

    def _pause_seconds(self) -> float:
        """Back soon after a failure, but not all at once."""
        if not self._failures:
            return self._settings.heartbeat_seconds
        longest = FIRST_RETRY_SECONDS * 2.0 ** min(self._failures, 16)
        return min(longest, self._settings.heartbeat_seconds) * random.uniform(0.5, 1.0)

    async def _beat(self) -> None:
        self._num_begun += 1
        try:
            with self.counted("beat"):
                sight = await self.directory.beat(
                    self._describe(), seconds=self._settings.expire_seconds
                )
            numbered = replace(sight, number=self._num_begun)
            self._saw(numbered, anew=self.lost or not sight.known)
            if not await self._claims.tell():
                self.soon()
        except DirectoryLost as lost:
            self._lose(str(lost))

    def _saw(self, sight: Sight, *, anew: bool) -> None:
        now = self._clock()
        if anew:
            self._contact_since = now
            self._claims.forgotten()
            log.info("the directory knows us", extra={"replicas": len(sight.replicas)})
        self._contact_at = now
        self._failures = 0
        self._sight = sight
        # Until it is settled, who is not listed may only not have come back yet.
        kept = {} if self.settled else self._remembered
        self._remembered = {**kept, **sight.replicas}
        for watcher in self.watchers:
            watcher(sight)

    def _lose(self, why: str) -> None:
        if not self._failures:
            log.warning("the directory does not answer: %s", why)
        self._failures += 1
        self._contact_since = None
