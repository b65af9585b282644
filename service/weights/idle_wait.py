"""Wait until running samples have finished, for activations in mode `wait`."""

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from coppice.wire.weights import ActivationMode
from service.errors import ServiceError, VersionConflict
from service.rollouts.manager import RolloutManager


@dataclass(frozen=True, slots=True)
class _Request:
    order: int
    label: str
    mode: ActivationMode

    def is_same_activation(self, label: str, mode: ActivationMode) -> bool:
        return (self.label, self.mode) == (label, mode)

    def conflict(self) -> VersionConflict:
        return VersionConflict(
            f"an activation of {self.label!r} in mode {self.mode} has replaced this one"
        )


class IdleWait:
    """Wait of one activation until no rollout is sampling, which other requests can end.

    Before its end the activation has changed nothing. Requests are ordered, because a replica
    repeats the activation of the cluster's target, which must not replace a later activation.
    """

    def __init__(self, rollouts: RolloutManager) -> None:
        self._rollouts = rollouts
        self._orders = itertools.count(1)
        self._latest: _Request | None = None
        self._ended: asyncio.Future[ServiceError | None] | None = None

    def request(self, label: str, mode: ActivationMode, order: int | None = None) -> int:
        """Record a requested activation, which ends the wait of a different one.

        Returns its order. A request that is repeated keeps its `order`, and raises VersionConflict
        if it has been replaced meanwhile.
        """
        if order is None:
            order = next(self._orders)
        latest, request = self._latest, _Request(order, label, mode)
        if latest is not None and latest.order > order:
            raise latest.conflict()
        self._latest = request
        if latest is None or not latest.is_same_activation(label, mode):
            self.end(request.conflict())
        return order

    def is_replaced(self, order: int) -> bool:
        """True if a later activation has been requested, and has not failed."""
        return self._latest is not None and self._latest.order > order

    @contextmanager
    def clearing_on_failure(self, order: int) -> Iterator[None]:
        """Context manager of a requested activation: if it fails, earlier ones can be repeated."""
        try:
            yield
        except BaseException:
            if self._latest is not None and self._latest.order == order:
                self._latest = None
            raise

    async def run(self, label: str, mode: ActivationMode) -> None:
        """Wait for the running samples or for `wake_after`.

        Raises the error with which the wait was ended.
        """
        if self._rollouts.is_idle:
            return
        if self._latest is not None and not self._latest.is_same_activation(label, mode):
            raise self._latest.conflict()
        ended = self._ended = asyncio.get_running_loop().create_future()
        idle = asyncio.ensure_future(self._rollouts.wait_until_idle())
        either: set[asyncio.Future[Any]] = {idle, ended}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if idle.done():
                idle.result()
            elif (error := ended.result()) is not None:
                raise error
        finally:
            self._ended = None
            idle.cancel()
            await asyncio.gather(idle, return_exceptions=True)

    def end(self, error: ServiceError) -> None:
        """Let the activation that waits, if there is one, fail with this error."""
        if self._ended is not None:
            _set_result(self._ended, error)

    def wake_after(self, seconds: float) -> None:
        """Let the current wait, if there is one, end without an error after this time."""
        if self._ended is not None:
            asyncio.get_running_loop().call_later(seconds, _set_result, self._ended, None)


def _set_result(future: asyncio.Future[ServiceError | None], result: ServiceError | None) -> None:
    if not future.done():
        future.set_result(result)
