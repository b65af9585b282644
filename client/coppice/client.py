"""The two clients: the same operations, awaited or blocking."""

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx

from coppice.core.control import ControlOperations
from coppice.core.driver import Driver
from coppice.core.rollouts import RolloutOperations
from coppice.core.weights import WeightsOperations
from coppice.http.asynchronous import AsyncDriver
from coppice.http.blocking import BlockingDriver, iterate, run
from coppice.http.exchange import client_options

P = ParamSpec("P")
T = TypeVar("T")

USUAL_TIMEOUT_SECONDS = 60.0


class Operations(RolloutOperations, WeightsOperations, ControlOperations):
    """Everything that a server does, over one driver."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    async def aclose(self) -> None:
        """Closes its connections."""
        await self._driver.close()


class AsyncRollouts(Operations):
    """A Coppice server, for programs on asyncio.

    `timeout` is how long, in seconds, the connection may be silent: a rollout may take hours, its
    progress records come every 15 s. `transport` replaces httpx's own. Calls may overlap freely.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout: float | None = USUAL_TIMEOUT_SECONDS,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        options = client_options(base_url, api_key, timeout)
        super().__init__(AsyncDriver(httpx.AsyncClient(transport=transport, **options)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()


def _blocking(
    method: Callable[Concatenate[Operations, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["Rollouts", P], T]:
    @wraps(method)
    def call(self: "Rollouts", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return run(method(self._operations, *args, **kwargs))

    return call


def _iterating(
    method: Callable[Concatenate[Operations, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate["Rollouts", P], Generator[T, None, None]]:
    @wraps(method)
    def call(self: "Rollouts", /, *args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        return iterate(method(self._operations, *args, **kwargs))

    return call


class Rollouts:
    """A Coppice server, for programs without an event loop.

    Takes what AsyncRollouts takes, and may be shared by threads.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout: float | None = USUAL_TIMEOUT_SECONDS,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        options = client_options(base_url, api_key, timeout)
        driver = BlockingDriver(httpx.Client(transport=transport, **options))
        self._operations = Operations(driver)

    rollout = _blocking(Operations.rollout)
    stream = _iterating(Operations.stream)
    abort = _blocking(Operations.abort)

    upload_weights = _blocking(Operations.upload_weights)
    stage_weights = _blocking(Operations.stage_weights)
    activate_weights = _blocking(Operations.activate_weights)
    publish_weights = _blocking(Operations.publish_weights)
    weights = _blocking(Operations.weights)
    delete_weights = _blocking(Operations.delete_weights)

    pause = _blocking(Operations.pause)
    resume = _blocking(Operations.resume)
    status = _blocking(Operations.status)
    wait_until_ready = _blocking(Operations.wait_until_ready)

    close = _blocking(Operations.aclose)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
