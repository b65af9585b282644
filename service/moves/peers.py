"""Other replicas, to which a draining replica offers its rollouts and sessions."""

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import httpx
from pydantic import ValidationError

from coppice.wire.problem_catalogue import Problem
from service.cluster.membership import ClusterMembership
from service.cluster.registry import Replica
from service.config.allowed_peers import Peers

Connect = Callable[[], httpx.AsyncClient]
CANCEL_SECONDS = 0.5
MAX_DETAIL = 200

log = logging.getLogger(__name__)


class MovePeers:
    """Replicas of the cluster at allowed addresses, and connections with the key of a replica."""

    def __init__(
        self, cluster: ClusterMembership, allowed: Peers, client: type[httpx.AsyncClient]
    ) -> None:
        self._cluster = cluster
        self._allowed = allowed
        self._client = client

    def connect(self) -> Connect | None:
        """Constructor of HTTP clients without a timeout; None if the key cannot be read."""
        try:
            headers = self._allowed.headers() | {"Content-Type": "application/json"}
        except OSError as error:
            log.error("nothing is moved: weights.peer_key_file: %s", error.strerror)
            return None
        tls = httpx.create_ssl_context(trust_env=False)
        return partial(self._client, headers=headers, verify=tls, timeout=None, trust_env=False)

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


async def is_accepted_by(
    http: httpx.AsyncClient,
    replica: Replica,
    path: str,
    body: bytes,
    *,
    resource_id: str,
    seconds: float | None = None,
) -> bool:
    """True if the replica has accepted the resources; an offer without a response is cancelled.

    `resource_id` is the id by which the offer is cancelled.
    """
    try:
        async with asyncio.timeout(seconds):
            response = await http.post(replica.url.rstrip("/") + path, content=body)
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
        log.warning("a move to %s failed: %s", replica.id, type(error).__name__)
        await cancel(http, replica, path, resource_id)
        return False
    except asyncio.CancelledError:
        await cancel(http, replica, path, resource_id)
        raise
    if response.status_code != 201:
        log.warning("replica %s refused %s: %s", replica.id, resource_id, refusal_of(response))
    return response.status_code == 201


def refusal_of(response: httpx.Response) -> str:
    """Status, code and detail of a problem document; only the status of another response."""
    try:
        problem = Problem.model_validate_json(response.content)
    except ValidationError:
        return str(response.status_code)
    detail = (problem.detail or problem.title)[:MAX_DETAIL]
    return f"{response.status_code} {problem.code} ({detail})"


async def cancel(http: httpx.AsyncClient, replica: Replica, path: str, resource_id: str) -> None:
    """Cancel an offer whose outcome is unknown, or that is not wanted any more."""
    with suppress(httpx.HTTPError, httpx.InvalidURL, TimeoutError):
        async with asyncio.timeout(CANCEL_SECONDS):
            await http.delete(f"{replica.url.rstrip('/')}{path}/{resource_id}")
