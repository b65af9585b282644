"""Thread for CPU-bound work of requests; API keys and agent sessions take turns."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from anyio import to_thread

from engine.errors import QueueFull
from engine.fair_limiter import FairLimiter
from service.errors import Overloaded, QuotaExceeded
from service.log_context import key_name

Result = TypeVar("Result")

RETRY_SECONDS = 2.0


class FairThreads:
    """Threads for the work of requests, one piece at a time.

    More threads would only wait for the GIL, or for a tokenizer, which one thread at a time may
    use. `kind` separates work of one caller that must not wait for other work of this caller.
    """

    def __init__(self, work: str, *, key_bytes: int, total_bytes: int) -> None:
        self.limiter = FairLimiter(work, 1, key_bytes=key_bytes, total_bytes=total_bytes)

    async def run(self, kind: str, num_bytes: int, function: Callable[[], Result]) -> Result:
        """Run `function` in a thread, when it is the turn of the current request's caller.

        Raises QuotaExceeded or Overloaded if too many bytes run or wait; work of 0 bytes is never
        refused.
        """
        with queue_errors():
            return await self.limiter.run(
                client_name(kind), num_bytes, lambda: to_thread.run_sync(function)
            )

    @contextmanager
    def counted(self, kind: str, num_bytes: int) -> Iterator[None]:
        """Context manager that counts bytes of the caller which do not wait for a thread yet."""
        with queue_errors(), self.limiter.counted(client_name(kind), num_bytes):
            yield


def client_name(kind: str) -> str:
    """Name of the current request's caller at a `FairLimiter`, for one kind of work."""
    return f"{kind} of {key_name.get() or ''}"


@contextmanager
def queue_errors() -> Iterator[None]:
    """Context manager that raises QueueFull as an error of the service."""
    try:
        yield
    except QueueFull as error:
        full = QuotaExceeded if error.of_client else Overloaded
        raise full(str(error), retry_after_seconds=RETRY_SECONDS) from error
