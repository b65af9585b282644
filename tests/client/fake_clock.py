"""A fake clock, with fixed random numbers."""


class FakePace:
    """Sleeping takes no time and advances the clock; `slept` has the duration of each sleep."""

    def __init__(self, share: float = 1.0) -> None:
        self.time = 1000.0
        self.slept: list[float] = []
        self._share = share

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds

    def random(self) -> float:
        return self._share
