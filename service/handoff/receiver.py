"""Receiver of a hand-over: continues the rollouts and sessions of a draining replica."""

import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

from coppice.wire.handoff import RolloutOffer, SessionsOffer
from service.cluster.membership import ClusterMembership
from service.errors import InvalidRequest, NotReady

CANCELLED_SECONDS = 60.0
MAX_CANCELLED = 1024
RETRY_SECONDS = 1.0

Offer = TypeVar("Offer", bound=RolloutOffer | SessionsOffer, contravariant=True)


class Arrivals(Protocol[Offer]):
    """Work of one kind that is received."""

    def ids(self, offer: Offer) -> list[str]:
        """Ids of what is offered; the first one names the offer in its cancellation."""

    def check(self, offer: Offer) -> None:
        """Refuse an offer that cannot continue here now."""

    def prepared(self, offer: Offer) -> AbstractAsyncContextManager[Any]:
        """Context manager of what was restored; on an error, its keys and its place are freed."""

    async def take_over_keys(self, arrival: Any) -> None:
        """Take over the keys, here and in the cluster registry."""

    def add(self, arrival: Any) -> None:
        """Continue it here; raises a ServiceError if that has become impossible."""

    def is_offered(self, offer_id: str) -> bool:
        """True while this replica itself offers it to others."""

    async def give_back(self, offer_id: str) -> None:
        """Remove what its sender continues; raises a ServiceError if nothing was received."""


class HandoffReceiver:
    """Continues what other replicas offer, with the same ids, keys and results.

    A refused offer leaves nothing here: the sender tries the next replica.
    """

    def __init__(
        self, cluster: ClusterMembership, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._arriving: set[str] = set()
        self._cancelled: OrderedDict[str, float] = OrderedDict()

    def is_arriving(self, resource_id: str) -> bool:
        """Return True from the time an offer is received until it is here, or refused."""
        return resource_id in self._arriving

    async def receive(self, arrivals: Arrivals[Any], offer: RolloutOffer | SessionsOffer) -> str:
        """Accept an offer; raises a ServiceError if it cannot continue here as on its source."""
        await self._cluster.check_source(offer.source)
        ids = arrivals.ids(offer)
        self._check(arrivals, offer, ids)
        if not self._arriving.isdisjoint(ids):
            raise NotReady("it is received already", retry_after_seconds=RETRY_SECONDS)
        self._arriving.update(ids)
        try:
            async with arrivals.prepared(offer) as arrival:
                await arrivals.take_over_keys(arrival)
                self._check(arrivals, offer, ids)
                arrivals.add(arrival)
        finally:
            self._arriving.difference_update(ids)
        return ids[0]

    async def cancel(self, arrivals: Arrivals[Any], offer_id: str) -> None:
        """Cancel an offer whose sender did not receive the response, and continues it itself.

        The same offer is refused if it arrives later. A load balancer may deliver the request to
        the sender, which keeps what it offers.
        """
        if not arrivals.is_offered(offer_id):
            self._cancelled[offer_id] = self._clock() + CANCELLED_SECONDS
            if len(self._cancelled) > MAX_CANCELLED:
                self._cancelled.popitem(last=False)
        await arrivals.give_back(offer_id)

    def _check(self, arrivals: Arrivals[Any], offer: Any, ids: list[str]) -> None:
        if any(self._cancelled.get(each, 0.0) > self._clock() for each in ids):
            raise InvalidRequest.of_parameter("id", "the source has cancelled the offer")
        arrivals.check(offer)
