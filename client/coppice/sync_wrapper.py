"""The blocking face of coroutines that never suspend."""

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from coppice.transport.blocking_driver import iterate, run

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", covariant=True)


class Face(Generic[C]):
    """Of a C over a blocking driver."""

    def __init__(self, core: C) -> None:
        self._core = core


def blocking(
    method: Callable[Concatenate[C, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Face[C], P], T]:
    @wraps(method)
    def call(self: Face[C], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return run(method(self._core, *args, **kwargs))

    return call


def iterating(
    method: Callable[Concatenate[C, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[Face[C], P], Generator[T, None, None]]:
    @wraps(method)
    def call(self: Face[C], /, *args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        return iterate(method(self._core, *args, **kwargs))

    return call
