"""Admission control: limits on running samples, prompt tokens and memory, per key and in total.

Samples are counted from before the first one is submitted until their rollout has ended. Prompt
tokens are counted once per group, and the memory of supports for the widest sets possible. A
request that does not fit is rejected at once. A drain closes admission: existing reservations are
waited for, including those of rollouts that have not started yet, and new ones are rejected. Not
thread-safe; runs on one event loop.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from service.config.limits import LimitsSettings
from service.errors import (
    DRAINING_RETRY_SECONDS,
    Draining,
    InvalidRequest,
    Overloaded,
    QuotaExceeded,
)

RETRY_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reservation:
    """Samples, prompt tokens and bytes of supports that one request has reserved.

    Compared by identity.
    """

    key: str
    samples: int
    prompt_tokens: int
    support_bytes: int = 0


class Admission:
    """Capacity reservations of all running requests, checked against the limits.

    Every `reserve` must be followed by one `release`.
    """

    def __init__(self, limits: LimitsSettings) -> None:
        self._limits = limits
        self._reservations: set[Reservation] = set()
        self._samples: Counter[str] = Counter()
        self._prompt_tokens: Counter[str] = Counter()
        self._num_samples = 0
        self._support_bytes = 0
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_samples(self) -> int:
        return self._num_samples

    @property
    def num_requests(self) -> int:
        return len(self._reservations)

    def check_open(self) -> None:
        if self._closed:
            raise Draining(retry_after_seconds=DRAINING_RETRY_SECONDS)

    def reserve(
        self, key: str, *, samples: int, prompt_tokens: int, support_bytes: int = 0
    ) -> Reservation:
        """Reserve capacity for a request, whose supports alone do not exceed their limit."""
        self.check_open()
        self._check_limits(samples, prompt_tokens)
        self._check_capacity(key, samples, prompt_tokens)
        if self._support_bytes + support_bytes > self._limits.max_support_bytes:
            raise Overloaded(
                "the supports of the running requests may take limits.max_support_bytes in all",
                retry_after_seconds=RETRY_SECONDS,
            )
        reservation = Reservation(
            key=key, samples=samples, prompt_tokens=prompt_tokens, support_bytes=support_bytes
        )
        self._reservations.add(reservation)
        self._idle.clear()
        self._count(reservation, 1)
        return reservation

    def release(self, reservation: Reservation) -> None:
        """Return the capacity of a reservation; idempotent."""
        if reservation in self._reservations:
            self._reservations.remove(reservation)
            self._count(reservation, -1)
            if not self._reservations:
                self._idle.set()

    @contextmanager
    def reserved(self, key: str, *, samples: int, prompt_tokens: int) -> Iterator[None]:
        reservation = self.reserve(key, samples=samples, prompt_tokens=prompt_tokens)
        try:
            yield
        finally:
            self.release(reservation)

    def close(self) -> None:
        self._closed = True

    @property
    def is_idle(self) -> bool:
        return self._idle.is_set()

    async def wait_until_idle(self) -> None:
        """Wait until no request holds a capacity reservation."""
        await self._idle.wait()

    def check(self) -> None:
        """Assert that the admission counters match the reservations and exceed no limit."""
        keys = {reserved.key for reserved in self._reservations}
        assert keys == self._samples.keys() | self._prompt_tokens.keys(), "a key is left over"
        for key in keys:
            mine = [reserved for reserved in self._reservations if reserved.key == key]
            assert self._samples[key] == sum(reserved.samples for reserved in mine)
            assert self._prompt_tokens[key] == sum(reserved.prompt_tokens for reserved in mine)
            assert self._samples[key] <= (self._limits.max_samples_per_key or self._num_samples)
        assert self._num_samples == sum(self._samples.values()) <= self._limits.max_samples_running
        held = sum(reserved.support_bytes for reserved in self._reservations)
        assert self._support_bytes == held <= self._limits.max_support_bytes

    def _check_limits(self, samples: int, prompt_tokens: int) -> None:
        """Reject a request that exceeds a limit even on an idle server; a retry cannot help."""
        limits = self._limits
        max_samples = min(limits.max_samples_per_key or samples, limits.max_samples_running)
        if samples > max_samples:
            raise InvalidRequest(
                f"{samples} samples; the limit is {max_samples} running samples per API key"
            )
        if _exceeds(prompt_tokens, limits.max_prompt_tokens_per_key):
            raise InvalidRequest(
                f"{prompt_tokens} prompt tokens; the limit per API key is "
                f"{limits.max_prompt_tokens_per_key}"
            )

    def _check_capacity(self, key: str, samples: int, prompt_tokens: int) -> None:
        limits = self._limits
        if _exceeds(self._samples[key] + samples, limits.max_samples_per_key):
            raise _quota_exceeded("samples", limits.max_samples_per_key)
        if _exceeds(self._prompt_tokens[key] + prompt_tokens, limits.max_prompt_tokens_per_key):
            raise _quota_exceeded("prompt tokens", limits.max_prompt_tokens_per_key)
        if self._num_samples + samples > limits.max_samples_running:
            raise Overloaded(retry_after_seconds=RETRY_SECONDS)

    def _count(self, reservation: Reservation, sign: int) -> None:
        self._num_samples += sign * reservation.samples
        self._support_bytes += sign * reservation.support_bytes
        for counter, amount in (
            (self._samples, reservation.samples),
            (self._prompt_tokens, reservation.prompt_tokens),
        ):
            counter[reservation.key] += sign * amount
            if not counter[reservation.key]:
                del counter[reservation.key]


def _exceeds(amount: int, limit: int | None) -> bool:
    return limit is not None and amount > limit


def _quota_exceeded(what: str, limit: int | None) -> QuotaExceeded:
    return QuotaExceeded(
        f"the limit per API key is {limit} {what}", retry_after_seconds=RETRY_SECONDS
    )
