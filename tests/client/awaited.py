"""An AsyncRollouts behind the face of a Rollouts, so that a test reads once and runs over both."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

from coppice import AsyncRollouts


class Awaited:
    """Runs every coroutine to its end on its own loop."""

    def __init__(self, client: AsyncRollouts, runner: asyncio.Runner) -> None:
        self._client = client
        self._runner = runner

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            answer: Any = getattr(self._client, name)(*args, **kwargs)
            if inspect.iscoroutine(answer):
                return self._runner.run(answer)
            return self._iterate(answer)

        return call

    def _iterate(self, items: AsyncGenerator[Any, None]) -> Generator[Any, None, None]:
        try:
            while (item := self._runner.run(_next(items))) is not None:
                yield item
        finally:
            self._runner.run(_close(items))

    def close(self) -> None:
        self._runner.run(self._client.aclose())


async def _next(items: AsyncGenerator[Any, None]) -> Any:
    return await anext(items, None)


async def _close(items: AsyncGenerator[Any, None]) -> None:
    await items.aclose()
