"""What a replica makes of a directory that fails, on a clock of the test's own."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from service.cluster.claims import CLAIMS_A_BEAT
from service.cluster.in_memory import EmbeddedDirectory
from service.cluster.membership import Fleet
from service.cluster.redirect import Elsewhere
from service.cluster.registry import DirectoryLost, Replica, Sight
from service.cluster.settings import DirectorySettings
from service.http.errors import DirectoryUnavailable, ReplicaGone

A = Replica(id="a" * 12, url="http://a", state="serving", version="v0", sequence=0)
B = Replica(id="b" * 12, url="http://b", state="serving", version="v0", sequence=0)
SETTINGS = DirectorySettings(redis_url="redis://nowhere")
EXPIRE = SETTINGS.expire_seconds


class Faulty(EmbeddedDirectory):
    """`silent`: every call ends without an answer; `releasing` happens just before a release."""

    def __init__(self, clock: "Clock") -> None:
        super().__init__(clock=clock)
        self.silent = False
        self.releasing: Callable[[], Awaitable[None]] | None = None
        self.beats = 0

    @property
    def num_claims(self) -> int:
        return len(self._claims)

    def forget(self) -> None:
        self.__init__(self._clock)  # type: ignore[misc]

    async def beat(self, replica: Replica, *, seconds: float) -> Sight:
        self.beats += 1
        sight: Sight = await self._heard(super().beat(replica, seconds=seconds))
        return sight

    async def claim(self, place: str, replica_id: str, *, seconds: float, take_over: bool) -> str:
        holder: str = await self._heard(
            super().claim(place, replica_id, seconds=seconds, take_over=take_over)
        )
        return holder

    async def release(self, place: str, replica_id: str) -> None:
        if self.releasing is not None:
            await self.releasing()
        await self._heard(super().release(place, replica_id))

    async def _heard(self, work: Coroutine[Any, Any, Any]) -> Any:
        await asyncio.sleep(0)
        if self.silent:
            work.close()
            raise DirectoryLost("silent")
        return await work


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Seen:
    """One replica under test, its directory, and the world around them."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.directory = Faulty(self.clock)
        self.failed: list[str] = []
        self.unshared = 0
        self.fleet = Fleet(
            self.directory,
            SETTINGS,
            describe=lambda: A,
            failed=self.failed.append,
            unshared=self._unshared,
            clock=self.clock,
        )

    def _unshared(self) -> None:
        self.unshared += 1

    async def pass_by(self, seconds: float, *others: Replica) -> None:
        """Heartbeats of everybody for so long."""
        for _ in range(round(seconds / SETTINGS.heartbeat_seconds)):
            self.clock.now += SETTINGS.heartbeat_seconds
            for other in others:
                await EmbeddedDirectory.beat(self.directory, other, seconds=EXPIRE)
            await self.beat()

    async def beat(self) -> None:
        self.clock.now += 0.001
        try:
            await self.fleet.seen()
        except DirectoryLost:
            assert self.fleet.lost

    async def asked_for(self, replica: Replica) -> str:
        try:
            await self.fleet.check_here(replica.id)
        except (Elsewhere, ReplicaGone, DirectoryUnavailable) as answer:
            return getattr(answer, "url", type(answer).__name__)
        return "here"


@pytest.fixture
def seen() -> Seen:
    return Seen()


async def test_who_is_not_listed_is_gone_only_once_all_had_time_to_show_themselves(
    seen: Seen,
) -> None:
    early = await seen.asked_for(B)
    await seen.pass_by(EXPIRE + 3)
    assert (early, await seen.asked_for(B)) == ("DirectoryUnavailable", "ReplicaGone")


async def test_one_that_came_just_now_is_looked_up(seen: Seen) -> None:
    await seen.beat()
    await EmbeddedDirectory.beat(seen.directory, B, seconds=EXPIRE)
    assert await seen.asked_for(B) == B.url


async def test_a_lost_directory_is_not_needed_for_what_is_remembered(seen: Seen) -> None:
    await seen.pass_by(EXPIRE + 3, B)
    seen.directory.silent = True
    await seen.pass_by(10 * EXPIRE)
    other = Replica(id="c" * 12, url="http://c", state="serving", version="v0", sequence=0)
    assert (seen.fleet.lost, await seen.asked_for(B)) == (True, B.url)
    assert await seen.asked_for(other) == "DirectoryUnavailable"
    assert set(seen.failed) == {"beat"}


async def test_after_a_flush_nobody_is_gone_until_it_is_sure(seen: Seen) -> None:
    await seen.pass_by(EXPIRE + 3, B)
    seen.directory.forget()
    await seen.beat()
    assert (seen.fleet.settled, await seen.asked_for(B)) == (False, B.url)
    await seen.pass_by(EXPIRE + 3)
    assert (seen.fleet.settled, await seen.asked_for(B)) == (True, "ReplicaGone")


async def test_after_a_flush_keys_are_claimed_again(seen: Seen) -> None:
    await seen.beat()
    await seen.fleet.claim("p")
    await seen.fleet.claim("q")
    seen.fleet.release("q")
    seen.directory.forget()
    await seen.beat()
    holders = [
        await seen.directory.claim(place, B.id, seconds=9, take_over=False) for place in "pq"
    ]
    assert holders == [A.id, B.id]


async def test_a_key_that_is_claimed_again_before_its_release_was_told_stays_here(
    seen: Seen,
) -> None:
    await seen.beat()
    await seen.fleet.claim("p")
    seen.fleet.release("p")
    await seen.fleet.claim("p")
    await seen.beat()
    assert await seen.directory.claim("p", B.id, seconds=9, take_over=False) == A.id


async def test_a_key_that_is_claimed_again_while_its_release_is_told_stays_here(
    seen: Seen,
) -> None:
    await seen.beat()
    await seen.fleet.claim("p")
    seen.fleet.release("p")
    seen.directory.releasing = lambda: seen.fleet.claim("p")
    await seen.beat()
    assert await seen.directory.claim("p", B.id, seconds=9, take_over=False) == A.id


@pytest.mark.parametrize("silent", [False, True])
async def test_a_key_that_is_given_back_is_others_at_once_or_with_the_next_heartbeat(
    seen: Seen, silent: bool
) -> None:
    await seen.beat()
    await seen.fleet.claim("p")
    seen.directory.silent = silent
    await seen.fleet.give_back("p")
    seen.directory.silent = False
    if silent:
        assert seen.failed == ["release"]
        await seen.beat()
    assert await seen.directory.claim("p", B.id, seconds=9, take_over=False) == B.id


async def test_many_keys_that_are_released_do_not_make_the_next_heartbeat_late(
    seen: Seen,
) -> None:
    await seen.beat()
    places = [f"p{number}" for number in range(CLAIMS_A_BEAT + 1)]
    for place in places:
        await seen.fleet.claim(place)
        seen.fleet.release(place)
    left = []
    for _ in "ab":
        await seen.beat()
        left.append(seen.directory.num_claims)
    assert left == [1, 0]


async def test_a_key_that_could_not_be_asked_for_is_shared_when_the_directory_is_back(
    seen: Seen,
) -> None:
    await seen.beat()
    seen.directory.silent = True
    await seen.fleet.claim("p")
    await seen.beat()
    await seen.fleet.claim("q")
    assert (seen.unshared, seen.failed) == (2, ["claim", "beat"])
    seen.directory.silent = False
    await seen.beat()
    holders = [
        await seen.directory.claim(place, B.id, seconds=9, take_over=False) for place in "pq"
    ]
    assert holders == [A.id, A.id]


async def test_the_key_of_one_that_may_be_back_is_not_taken_over(seen: Seen) -> None:
    await seen.directory.claim("p", B.id, seconds=1e6, take_over=False)
    await seen.beat()
    with pytest.raises(DirectoryUnavailable):
        await seen.fleet.claim("p")
    await seen.pass_by(EXPIRE + 3)
    await seen.fleet.claim("p")
    assert await seen.directory.claim("p", B.id, seconds=9, take_over=False) == A.id


async def test_many_who_ask_for_one_that_is_unknown_ask_the_directory_once(seen: Seen) -> None:
    await seen.pass_by(EXPIRE + 3)
    before = seen.directory.beats
    seen.clock.now += 1

    async def later() -> str:
        return await seen.asked_for(B)

    answers = await asyncio.gather(*(later() for _ in range(50)))
    assert set(answers) == {"ReplicaGone"}
    assert seen.directory.beats <= before + 2


async def test_a_fault_in_a_heartbeat_ends_nothing(seen: Seen) -> None:
    class Broken(Faulty):
        async def beat(self, replica: Replica, *, seconds: float) -> Sight:
            self.beats += 1
            raise RuntimeError("a bug")

    broken = seen.fleet.directory = Broken(seen.clock)
    async with seen.fleet.running():
        while broken.beats < 2:
            await asyncio.sleep(0.01)
        assert seen.fleet.lost


async def test_whoever_leaves_is_listed_no_more(seen: Seen) -> None:
    async with seen.fleet.running():
        while seen.fleet.lost:
            await asyncio.sleep(0.001)
    assert A.id not in (await seen.directory.beat(B, seconds=9)).replicas
