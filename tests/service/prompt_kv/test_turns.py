import asyncio

from service.prompt_kv.bandwidth import Turns


class Takers:
    """Waiters that hold a turn until released; `got` has the names in the order of their turns."""

    def __init__(self, num_turns: int) -> None:
        self.got: list[str] = []
        self._turns = Turns(num_turns)
        self._gates: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, *names: str) -> None:
        """The first character of a name is its key."""
        for name in names:
            self._gates[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._hold(name))
            await settled()

    async def end(self, *names: str) -> None:
        for name in names:
            self._gates[name].set()
            await settled()

    async def leave(self, name: str) -> None:
        self._tasks[name].cancel()
        await asyncio.wait([self._tasks[name]])
        await settled()

    async def _hold(self, name: str) -> None:
        async with self._turns.turn(name[0]):
            self.got.append(name)
            await self._gates[name].wait()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_free_turn_goes_to_the_key_with_the_fewest() -> None:
    takers = Takers(2)
    await takers.begin("a1", "a2", "a3", "a4", "b1")
    assert takers.got == ["a1", "a2"]
    await takers.end("a1")
    assert takers.got[2:] == ["b1"]
    await takers.end("a2")
    assert takers.got[3:] == ["a3"]


async def test_keys_with_equal_counts_alternate() -> None:
    takers = Takers(1)
    await takers.begin("c1", "a1", "a2", "b1", "b2")
    for name in ("c1", "a1", "b1", "a2"):
        await takers.end(name)
    assert takers.got == ["c1", "a1", "b1", "a2", "b2"]


async def test_cancelled_waiter_takes_no_turn_and_leaks_none() -> None:
    takers = Takers(1)
    await takers.begin("a1", "b1", "c1")
    await takers.leave("b1")
    await takers.leave("a1")
    await takers.end("c1")
    await takers.begin("d1")
    assert takers.got == ["a1", "c1", "d1"]


async def test_waiter_cancelled_at_its_grant_passes_it_on() -> None:
    turns = Turns(1)
    async with turns.turn("a"):
        waiting = asyncio.create_task(turns._take("b"))
        await settled()
    waiting.cancel()  # between the grant and its delivery
    await asyncio.wait([waiting])
    async with asyncio.timeout(5), turns.turn("c"):
        pass
