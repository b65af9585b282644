"""The two clients: the same operations, awaited or blocking."""

from collections.abc import Iterable
from types import TracebackType
from typing import Self, Unpack

import httpx

from coppice.operations.adapters import AdapterOperations
from coppice.operations.control import ControlOperations
from coppice.operations.drafter import DrafterOperations
from coppice.operations.pending import AsyncPending
from coppice.operations.rollouts import RolloutOperations
from coppice.operations.scoring import ScoreOperations
from coppice.operations.trees import TreeOperations
from coppice.operations.weights import WeightsOperations
from coppice.options import RolloutOptions
from coppice.prompts import PromptLike
from coppice.retry import Retry
from coppice.sync_wrapper import Face, blocking, iterating
from coppice.transport.async_driver import AsyncDriver, AsyncPace
from coppice.transport.blocking_driver import BlockingDriver, BlockingPace, run
from coppice.transport.clock import Pace
from coppice.transport.driver import Driver
from coppice.transport.httpx_types import client_options
from coppice.transport.redirect_policy import Trust
from coppice.transport.redirecting_driver import Following
from coppice.transport.request_sender import Courier

USUAL_TIMEOUT_SECONDS = 60.0
USUAL_RETRY = Retry()


class Operations(
    RolloutOperations,
    TreeOperations,
    ScoreOperations,
    WeightsOperations,
    DrafterOperations,
    AdapterOperations,
    ControlOperations,
):
    """Everything that a server does, over one driver."""

    def __init__(self, driver: Driver, trust: Trust, pace: Pace, retry: Retry) -> None:
        self._courier = Courier(Following(driver, trust), pace, retry)

    async def aclose(self) -> None:
        """Closes its connections, and forgets the weights that it has sent."""
        self._kept = None
        await self._courier.driver.close()


class AsyncRollouts(Operations):
    """A Coppice server, for programs on asyncio.

    `base_url` may hold credentials, http://user:key@host, in the place of `api_key`. `timeout` is
    how long, in seconds, the connection may be silent: a rollout may take hours, its progress
    records come every 15 s. `retry` says how failed calls are repeated. `replicas` are other hosts
    than base_url's that a fleet may send calls on to, with the key: names, `*.domain`, addresses or
    networks. `transport` replaces httpx's own, `pace` the clock and the dice. Calls may overlap
    freely.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout: float | None = USUAL_TIMEOUT_SECONDS,
        retry: Retry = USUAL_RETRY,
        replicas: Iterable[str] = (),
        transport: httpx.AsyncBaseTransport | None = None,
        pace: Pace | None = None,
    ) -> None:
        options = client_options(base_url, api_key, timeout)
        driver = AsyncDriver(httpx.AsyncClient(transport=transport, **options))
        super().__init__(driver, Trust(base_url, replicas), pace or AsyncPace(), retry)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()


class Pending(Face[AsyncPending]):
    """A rollout by its id. Nothing ends it but its own end and `abort`.

    Any number of processes may hold one. The server forgets an answer some time after the end:
    NotFound from then on.
    """

    @property
    def id(self) -> str:
        return self._core.id

    def __repr__(self) -> str:
        return f"Pending({self.id!r})"

    wait = blocking(AsyncPending.wait)
    stream = iterating(AsyncPending.stream)
    abort = blocking(AsyncPending.abort)


class Rollouts(Face[Operations]):
    """A Coppice server, for programs without an event loop.

    Takes what AsyncRollouts takes, and may be shared by threads.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout: float | None = USUAL_TIMEOUT_SECONDS,
        retry: Retry = USUAL_RETRY,
        replicas: Iterable[str] = (),
        transport: httpx.BaseTransport | None = None,
        pace: Pace | None = None,
    ) -> None:
        options = client_options(base_url, api_key, timeout)
        driver = BlockingDriver(httpx.Client(transport=transport, **options))
        trust = Trust(base_url, replicas)
        super().__init__(Operations(driver, trust, pace or BlockingPace(), retry))

    rollout = blocking(Operations.rollout)
    stream = iterating(Operations.stream)
    abort = blocking(Operations.abort)
    branch = blocking(Operations.branch)
    drop_segment = blocking(Operations.drop_segment)
    score = blocking(Operations.score)

    def submit(self, prompts: Iterable[PromptLike], **options: Unpack[RolloutOptions]) -> Pending:
        return Pending(run(self._core.submit(prompts, **options)))

    def attach(self, rollout_id: str) -> Pending:
        return Pending(self._core.attach(rollout_id))

    submit.__doc__ = Operations.submit.__doc__
    attach.__doc__ = Operations.attach.__doc__

    upload_weights = blocking(Operations.upload_weights)
    stage_weights = blocking(Operations.stage_weights)
    activate_weights = blocking(Operations.activate_weights)
    publish_weights = blocking(Operations.publish_weights)
    weights = blocking(Operations.weights)
    delete_weights = blocking(Operations.delete_weights)

    drafter = blocking(Operations.drafter)
    upload_drafter = blocking(Operations.upload_drafter)
    download_drafter = blocking(Operations.download_drafter)
    load_adapter = blocking(Operations.load_adapter)
    publish_adapter = blocking(Operations.publish_adapter)
    adapters = blocking(Operations.adapters)
    unload_adapter = blocking(Operations.unload_adapter)

    pause = blocking(Operations.pause)
    resume = blocking(Operations.resume)
    status = blocking(Operations.status)
    wait_until_ready = blocking(Operations.wait_until_ready)

    close = blocking(Operations.aclose)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
