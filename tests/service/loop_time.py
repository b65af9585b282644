"""An event loop whose time a test can move forward, instead of sleeping until a timer fires."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec

P = ParamSpec("P")


class ForwardableLoop(asyncio.SelectorEventLoop):
    _forwarded_seconds = 0.0

    def time(self) -> float:
        return super().time() + self._forwarded_seconds

    def forward(self, seconds: float) -> None:
        self._forwarded_seconds += seconds


def in_forwardable_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A test that runs in such a loop. Its fixtures must not be asynchronous."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=ForwardableLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


async def forward(seconds: float) -> None:
    """Move the time of the running loop. Timers that are due have fired when this returns.

    Work that is ready runs before: a timer that it sets later would not be due.
    """
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ForwardableLoop)
    await asyncio.sleep(0.01)
    loop.forward(seconds)
    await asyncio.sleep(0.01)
