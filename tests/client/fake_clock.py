"""A clock that jumps, and dice that always show the same."""


class FakePace:
    """Sleeping takes no time and moves the clock; `slept` is how long each sleep was."""

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
