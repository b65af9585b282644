"""Blocking wrappers of coroutines that never suspend, because their driver blocks."""

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from coppice.transport.blocking_driver import iterate_sync, run_sync

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", covariant=True)


class SyncWrapper(Generic[C]):
    """Holds an asynchronous object that runs over a blocking driver."""

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
