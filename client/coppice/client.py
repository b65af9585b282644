"""Asynchronous and blocking clients of a Coppice server, with the same operations."""

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, Unpack

import httpx

from coppice.operations.adapters import AdapterOperations
from coppice.operations.cuda_ipc_weights import WeightTransferOperations
from coppice.operations.drafter import DrafterOperations
from coppice.operations.pause_and_status import ServerStateOperations
from coppice.operations.rollouts import AsyncPending, RolloutOperations
from coppice.operations.scoring import ScoreOperations
from coppice.operations.sessions import AsyncSessions
from coppice.operations.weights import WeightsOperations
from coppice.prompts import PromptLike
from coppice.rollout_options import RolloutOptions
from coppice.transport.driver import Clock, Driver, RedirectingDriver
from coppice.transport.httpx_drivers import (
    AsyncClock,
    AsyncDriver,
    BlockingClock,
    BlockingDriver,
    client_options,
    iterate_sync,
    run_sync,
)
from coppice.transport.redirects import RedirectPolicy, parse_address
from coppice.transport.retry import RequestSender, Retry

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", covariant=True)
DEFAULT_TIMEOUT_SECONDS = 60.0
DEFAULT_RETRY = Retry()


class SyncWrapper(Generic[C]):
    """Blocking wrapper of an async object whose HTTP driver blocks: no coroutine ever suspends."""

    def __init__(self, core: C) -> None:
        self._async = core


def sync_method(
    method: Callable[Concatenate[C, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncWrapper[C], P], T]:
    @wraps(method)
    def call(self: SyncWrapper[C], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return run_sync(method(self._async, *args, **kwargs))

    return call


def sync_generator(
    method: Callable[Concatenate[C, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[SyncWrapper[C], P], Generator[T, None, None]]:
    @wraps(method)
    def call(
        self: SyncWrapper[C], /, *args: P.args, **kwargs: P.kwargs
    ) -> Generator[T, None, None]:
        return iterate_sync(method(self._async, *args, **kwargs))

    return call


class Operations(
    RolloutOperations,
    ScoreOperations,
    WeightsOperations,
    WeightTransferOperations,
    DrafterOperations,
    AdapterOperations,
    ServerStateOperations,
):
    """All operations of a Coppice server, over any HTTP driver (asyncio or blocking)."""

    def __init__(
        self,
        driver: Driver,
        redirect_policy: RedirectPolicy,
        clock: Clock,
        retry: Retry,
        base_url: str,
    ) -> None:
        self._sender = RequestSender(RedirectingDriver(driver, redirect_policy), clock, retry)
        self.sessions = AsyncSessions(self._sender, base_url)

    async def aclose(self) -> None:
        """Closes the connections and drops the weights file kept as the base of the next delta."""
        self._base_file = None
        await self._sender.driver.close()


class AsyncRollouts(Operations):
    """Asynchronous (asyncio) client of a Coppice server.

    Args:
        base_url: URL of the server. It may contain credentials, http://user:key@host, instead of
            `api_key`.
        api_key: API key that every request carries.
        timeout: longest silence on a connection, in seconds (60). A rollout may take hours, but its
            progress records arrive every 15 s.
        retry: retry policy for failed requests.
        replicas: hosts other than base_url's to which a cluster may redirect requests, and which
            then receive the API key: names, `*.domain`, addresses or networks.
        transport: replacement for httpx's transport.
        clock: replacement for the clock and the source of random numbers.

    Requests may run concurrently.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_SECONDS,
        retry: Retry = DEFAULT_RETRY,
        replicas: Iterable[str] = (),
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Clock | None = None,
    ) -> None:
        options = client_options(base_url, api_key, timeout)
        driver = AsyncDriver(httpx.AsyncClient(transport=transport, **options))
        super().__init__(
            driver,
            RedirectPolicy(base_url, replicas),
            clock or AsyncClock(),
            retry,
            parse_address(base_url, None).base_url,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Pending(SyncWrapper[AsyncPending]):
    """Blocking handle of a submitted rollout, identified by the rollout id.

    Only `abort` ends the rollout before it completes. Any number of processes may hold a handle.
    The server deletes the result some time after the rollout ends; calls then raise NotFound.
    """

    @property
    def id(self) -> str:
        """The rollout's id, with which `attach` returns another handle."""
        return self._async.id

    def __repr__(self) -> str:
        return f"Pending({self.id!r})"

    wait = sync_method(AsyncPending.wait)
    stream = sync_generator(AsyncPending.stream)
    abort = sync_method(AsyncPending.abort)


class Sessions(SyncWrapper[AsyncSessions]):
    """Blocking operations on agent sessions, as `client.sessions`."""

    create = sync_method(AsyncSessions.create)
    get = sync_method(AsyncSessions.get)
    tree = sync_method(AsyncSessions.tree)
    finish = sync_method(AsyncSessions.finish)
    cancel = sync_method(AsyncSessions.cancel)
    stream = sync_generator(AsyncSessions.stream)


class Rollouts(SyncWrapper[Operations]):
    """Blocking client of a Coppice server.

    Takes the same arguments as AsyncRollouts. One client may be shared by several threads.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_SECONDS,
        retry: Retry = DEFAULT_RETRY,
        replicas: Iterable[str] = (),
        transport: httpx.BaseTransport | None = None,
        clock: Clock | None = None,
    ) -> None:
        options = client_options(base_url, api_key, timeout)
        driver = BlockingDriver(httpx.Client(transport=transport, **options))
        redirect_policy = RedirectPolicy(base_url, replicas)
        address = parse_address(base_url, None).base_url
        super().__init__(
            Operations(driver, redirect_policy, clock or BlockingClock(), retry, address)
        )
        self.sessions = Sessions(self._async.sessions)

    rollout = sync_method(Operations.rollout)
    stream = sync_generator(Operations.stream)
    abort = sync_method(Operations.abort)
    branch = sync_method(Operations.branch)
    drop_segment = sync_method(Operations.drop_segment)
    score = sync_method(Operations.score)

    def submit(self, prompts: Iterable[PromptLike], **options: Unpack[RolloutOptions]) -> Pending:
        return Pending(run_sync(self._async.submit(prompts, **options)))

    def attach(self, rollout_id: str) -> Pending:
        return Pending(self._async.attach(rollout_id))

    submit.__doc__ = Operations.submit.__doc__
    attach.__doc__ = Operations.attach.__doc__

    upload_weights = sync_method(Operations.upload_weights)
    stage_weights = sync_method(Operations.stage_weights)
    activate_weights = sync_method(Operations.activate_weights)
    publish_weights = sync_method(Operations.publish_weights)
    transfer_weights = sync_method(Operations.transfer_weights)
    weights = sync_method(Operations.weights)
    delete_weights = sync_method(Operations.delete_weights)

    drafter = sync_method(Operations.drafter)
    upload_drafter = sync_method(Operations.upload_drafter)
    download_drafter = sync_method(Operations.download_drafter)
    load_adapter = sync_method(Operations.load_adapter)
    publish_adapter = sync_method(Operations.publish_adapter)
    adapters = sync_method(Operations.adapters)
    unload_adapter = sync_method(Operations.unload_adapter)

    pause = sync_method(Operations.pause)
    resume = sync_method(Operations.resume)
    sleep = sync_method(Operations.sleep)
    wake = sync_method(Operations.wake)
    status = sync_method(Operations.status)
    wait_until_ready = sync_method(Operations.wait_until_ready)

    close = sync_method(Operations.aclose)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
