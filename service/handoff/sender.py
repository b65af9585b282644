"""Sender of a hand-over: a draining replica offers its rollouts and sessions to others."""

import asyncio
import logging
import math
import random
import ssl
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from coppice.wire.problem_catalogue import Problem
from service.cluster.build import Cluster
from service.cluster.registry import Replica
from service.config.allowed_peers import Peers
from service.observability.metrics import ClusterMetrics

PATH = "/v1/handoff"
CONCURRENT_OFFERS = 8
OFFER_SECONDS = 10.0
RETRY_SECONDS = 2.0
CANCEL_SECONDS = 0.5
MAX_DETAIL = 200

Connect = Callable[[], httpx.AsyncClient]
Item = TypeVar("Item")
Outcome = Literal["moved", "kept", "too_large", "nothing"]
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Offer:
    """A rollout, or some sessions, to be sent to one of the `replicas`.

    The receiver takes over the registry `keys`. `id` names the offer in its cancellation.
    `on_accepted` is called as soon as a replica has accepted it.
    """

    id: str
    state: Callable[[], Awaitable[BaseModel]]
    keys: Sequence[str]
    replicas: Sequence[Replica]
    on_accepted: Callable[[Replica], None]
    is_wanted: Callable[[], bool] = lambda: True


class Work(Protocol[Item]):
    """Work of one kind that a drain hands over.

    Items are offered again at their time in `retry_at`, which is infinite for those that are being
    offered, and for all that were offered if the work is not `is_repeated`.
    """

    kind: str
    poll_seconds: float
    is_repeated: bool
    retry_at: dict[Item, float]

    def waiting(self) -> Sequence[Item]:
        """Items that can be offered now."""

    def is_over(self) -> bool:
        """True if there is nothing to wait for, except for items that were offered."""

    def estimated_bytes(self, item: Item) -> int:
        """Estimated size of the largest state of an item, as JSON."""

    def offer(self, item: Item) -> AbstractAsyncContextManager[Offer | None]:
        """Context manager in which the item does not change; None if nothing is left of it."""


class HandoffSender:
    """Offers work to other replicas of the cluster, at allowed addresses.

    What no replica accepts stays here, as does a state of more than `max_bytes`, the limit of
    request bodies, which is assumed to be the same there.
    """

    def __init__(
        self,
        cluster: Cluster,
        allowed: Peers,
        metrics: ClusterMetrics,
        *,
        max_bytes: int,
        client: type[httpx.AsyncClient] = httpx.AsyncClient,
    ) -> None:
        self._cluster, self._keys = cluster.membership, cluster.idempotency_keys
        self._allowed = allowed
        self._outcomes = metrics.handoffs
        self._max_bytes = max_bytes
        self._client = client

    async def send_all(self, work: Work[Any], seconds: float | None = None) -> None:
        """Offer all items until the work is over, or for `seconds`.

        Without `seconds`, each replica has `OFFER_SECONDS` to respond.
        """
        if self._cluster.is_standalone:
            return
        connect = await asyncio.to_thread(self._connect)
        if connect is None:
            return
        run = _Run(connect, work, None if seconds is None else _now() + seconds)
        async with asyncio.TaskGroup() as tasks:
            while not run.is_late:
                is_over = work.is_over()
                for item in work.waiting():
                    if work.retry_at.get(item, 0.0) <= _now():
                        work.retry_at[item] = math.inf
                        tasks.create_task(self._send(run, item))
                if is_over:
                    return
                await asyncio.sleep(work.poll_seconds)

    async def _send(self, run: "_Run", item: Any) -> None:
        """Offer an item, as often as a replica accepts a part of it."""
        async with run.slots:
            outcome = await self._outcome(run, item)
            while outcome == "moved" and run.work.is_repeated:
                outcome = await self._outcome(run, item)
        if run.work.is_repeated:
            delay = RETRY_SECONDS if outcome == "kept" else 0.0
            run.work.retry_at[item] = math.inf if outcome == "too_large" else _now() + delay

    async def _outcome(self, run: "_Run", item: Any) -> Outcome:
        """Outcome of one offer; an unexpected error keeps the item and does not end the others."""
        outcome: Outcome = "kept"
        if run.work.estimated_bytes(item) > self._max_bytes:
            outcome = "too_large"
        elif not run.is_late:
            try:
                async with run.work.offer(item) as offer:
                    if offer is None:
                        return "nothing"
                    async with run.connect() as http, asyncio.timeout_at(run.until):
                        outcome = await self._offer(run, http, offer)
            except TimeoutError:
                log.info("the time for offers of %s is over", run.work.kind)
            except Exception:
                log.exception("an offer failed")
        self._outcomes.labels(run.work.kind, "moved" if outcome == "moved" else "kept").inc()
        return outcome

    async def _offer(self, run: "_Run", http: httpx.AsyncClient, offer: Offer) -> Outcome:
        """Offer a state to one replica after the other."""
        kind, seconds = run.work.kind, OFFER_SECONDS if run.until is None else None
        state = await offer.state() if offer.replicas else None
        body = b"" if state is None else await asyncio.to_thread(_encoded, state)
        if len(body) > self._max_bytes:
            log.info("the state of %s %s is too large to be handed over", kind, offer.id)
            return "too_large"
        for replica in offer.replicas:
            if not offer.is_wanted():
                break
            request = _Request(http, f"{replica.url.rstrip('/')}{PATH}/{kind}", replica, offer.id)
            if await self._is_accepted(request, offer, body, seconds):
                log.info("%s %s moved to %s", kind, offer.id, replica.url)
                return "moved"
        log.info("%s %s stay here", kind, offer.id)
        return "kept"

    async def _is_accepted(
        self, request: "_Request", offer: Offer, body: bytes, seconds: float | None
    ) -> bool:
        """True if the replica has accepted the offer, and it is still wanted.

        Otherwise the keys are taken back, of which the replica may have taken over some.
        """
        is_accepted = False
        try:
            has_accepted = await request.post(body, seconds)
            if has_accepted and not offer.is_wanted():
                await request.cancel()
            elif has_accepted:
                is_accepted = True
                offer.on_accepted(request.replica)
        finally:
            if not is_accepted:
                await self._keys.take_back(offer.keys, request.replica.id)
        return is_accepted

    def _connect(self) -> Connect | None:
        """Constructor of HTTP clients without a timeout; None if the key cannot be read."""
        try:
            headers = self._allowed.headers() | {"Content-Type": "application/json"}
        except OSError as error:
            log.error("nothing is handed over: weights.peer_key_file: %s", error.strerror)
            return None
        tls = self._tls
        return partial(self._client, headers=headers, verify=tls, timeout=None, trust_env=False)

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return httpx.create_ssl_context(trust_env=False)

    def candidates(self, version: str | None = None) -> list[Replica]:
        """Serving replicas in random order; with `version`, those whose active version it is."""
        found = [
            replica
            for replica in self._cluster.view.replicas.values()
            if replica.id != self._cluster.own_id
            and replica.state == "serving"
            and version in (None, replica.version)
            and self._allowed.allows(replica.url)
        ]
        return random.sample(found, len(found))


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Offers of one kind of work, up to a time if there is one."""

    connect: Connect
    work: Work[Any]
    until: float | None
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CONCURRENT_OFFERS))

    @property
    def is_late(self) -> bool:
        return self.until is not None and _now() >= self.until


class _Request(NamedTuple):
    """Offer to one replica, at the `url` of its kind."""

    http: httpx.AsyncClient
    url: str
    replica: Replica
    offer_id: str

    async def post(self, body: bytes, seconds: float | None) -> bool:
        """True if the replica has accepted the offer; one without a response is cancelled."""
        try:
            async with asyncio.timeout(seconds):
                response = await self.http.post(self.url, content=body)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            log.warning("an offer to %s failed: %s", self.replica.id, type(error).__name__)
            await self.cancel()
            return False
        except asyncio.CancelledError:
            await self.cancel()
            raise
        if response.status_code != 201:
            refusal = refusal_of(response)
            log.warning("replica %s refused %s: %s", self.replica.id, self.offer_id, refusal)
        return response.status_code == 201

    async def cancel(self) -> None:
        """Cancel an offer whose outcome is unknown, or that is not wanted any more."""
        with suppress(httpx.HTTPError, httpx.InvalidURL, TimeoutError):
            async with asyncio.timeout(CANCEL_SECONDS):
                await self.http.delete(f"{self.url}/{self.offer_id}")


def refusal_of(response: httpx.Response) -> str:
    """Status, code and detail of a problem document; only the status of another response."""
    try:
        problem = Problem.model_validate_json(response.content)
    except ValidationError:
        return str(response.status_code)
    detail = (problem.detail or problem.title)[:MAX_DETAIL]
    return f"{response.status_code} {problem.code} ({detail})"


def _encoded(state: BaseModel) -> bytes:
    return state.model_dump_json().encode()


def _now() -> float:
    return asyncio.get_running_loop().time()
