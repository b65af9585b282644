"""Other replicas, to which a draining replica sends its work."""

import logging
import random
from collections.abc import Callable
from functools import partial

import httpx

from service.cluster.membership import ClusterMembership
from service.cluster.registry import Replica
from service.weights.replication.allowed_peers import Peers

Connect = Callable[[], httpx.AsyncClient]

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
