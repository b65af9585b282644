"""A blocking wrapper of AsyncRollouts and its handles, so that one test runs over both clients."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

from coppice import AsyncPending, AsyncRollouts, AsyncSessions


class Awaited:
    """Runs every coroutine to completion on its own loop."""

    def __init__(
        self, client: AsyncRollouts | AsyncPending | AsyncSessions, runner: asyncio.Runner
    ) -> None:
        self._client = client
        self._runner = runner

    def __repr__(self) -> str:
        return repr(self._client)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._client, name)
        if isinstance(attribute, AsyncSessions):
            return Awaited(attribute, self._runner)
        return self._calling(attribute) if callable(attribute) else attribute

    def _calling(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            answer: Any = method(*args, **kwargs)
            if isinstance(answer, AsyncGenerator):
                return self._iterate(answer)
            if inspect.iscoroutine(answer):
                answer = self._runner.run(answer)
            return Awaited(answer, self._runner) if isinstance(answer, AsyncPending) else answer

        return call

    def _iterate(self, items: AsyncGenerator[Any, None]) -> Generator[Any, None, None]:
        try:
            while (item := self._runner.run(_next(items))) is not None:
                yield item
        finally:
            self._runner.run(_close(items))

    def close(self) -> None:
        assert isinstance(self._client, AsyncRollouts)
        self._runner.run(self._client.aclose())


async def _next(items: AsyncGenerator[Any, None]) -> Any:
    return await anext(items, None)


async def _close(items: AsyncGenerator[Any, None]) -> None:
    await items.aclose()
