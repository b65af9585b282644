"""Steps of a coroutine in a thread: vLLM builds large responses in one piece, on the event loop."""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class LargeStepsInThreads(Generic[Result]):
    """Awaitable of a coroutine whose next step runs in a thread if `is_large`.

    Such a step must not need the event loop. If the awaiting task is cancelled meanwhile, the step
    ends in its thread, and the coroutine is dropped.
    """

    def __init__(self, work: Coroutine[Any, Any, Result], is_large: Callable[[], bool]) -> None:
        self._work = work
        self._is_large = is_large

    def __await__(self) -> Generator[Any, Any, Result]:
        step: Callable[[], Any] = partial(self._work.send, None)
        while True:
            if self._is_large():
                ended, value = yield from asyncio.to_thread(_outcome, step).__await__()
            else:
                ended, value = _outcome(step)
            if ended:
                return value  # type: ignore[no-any-return]  # the coroutine's result
            try:
                step = partial(self._work.send, (yield value))
            except BaseException as error:
                step = partial(self._work.throw, error)


def _outcome(step: Callable[[], Any]) -> tuple[bool, Any]:
    """True and the result of a coroutine that has ended; else false and what it awaits."""
    try:
        return False, step()
    except StopIteration as end:
        return True, end.value
