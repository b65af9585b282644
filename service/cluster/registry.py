"""Interface and records of the cluster registry: replicas, weights versions, idempotency keys.

It stores the replicas and what each serves, the published weights versions, the activation target,
and the holders of idempotency keys. Rollouts, handles and checkpoints belong to their replicas.
Losing the registry therefore loses the routes to resources, but no resources.

Ids of rollouts and prompt-KV handles start with the id of the replica that created them. Any
replica can therefore find the owner of an id without a lookup, and ids can be returned to clients
without being registered anywhere.
"""

import re
import secrets
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Protocol

from pydantic import Field

from coppice.wire.columns.kv_version_spans import ActivationKv
from coppice.wire.weights import ActivationMode
from service.readiness import ReplicaState

Count = Annotated[int, Field(ge=0, lt=2**53)]
"""Integer that Redis's Lua, JSON clients and metrics represent exactly."""
CLAIM_SECONDS: Final = 86_400
"""Time that an idempotency key is kept; longer than any retry."""
Url = Annotated[str, Field(pattern=r"^https?://[!-~]+$", max_length=2048)]
"""URL that can be sent in a Location header."""
_NAME = re.compile(r"^(?P<replica>[0-9a-f]{12})\.[0-9A-Za-z_-]{1,64}$")


class RegistryUnavailable(Exception):
    """The cluster registry did not respond in time; the outcome of the call is unknown."""


class ManifestConflict(Exception):
    """A weights version is published with other content, or its sequence number is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """Registry entry of one replica: its URL, state and weights versions.

    Entries written by other releases may lack the fields with defaults. `epoch` is the epoch of the
    last applied activation target. `holds` are the versions whose files other replicas can download
    from this one, `staged` the versions that it can activate. `failed` is the version that it could
    not fetch or activate, `error` the reason.
    """

    id: str
    url: Url
    state: ReplicaState
    version: str
    sequence: Count
    epoch: Count = 0
    holds: tuple[str, ...] = ()
    staged: tuple[str, ...] = ()
    failed: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFile:
    name: str
    sha256: str
    num_bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Files of a published weights version, from which other replicas fetch it.

    `delta` is the same content as changes relative to the version `base`. `path` is the location of
    the files if they are in a directory that all replicas share.
    """

    version: str
    sequence: Count
    files: tuple[ManifestFile, ...]
    base: str | None = None
    delta: ManifestFile | None = None
    path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationTarget:
    """Weights version that all replicas have to activate; the highest epoch wins.

    `id` differs between targets of the same epoch and version, which replicas can set while
    partitioned. `previous` is the id of the target that it replaced. Entries of other releases may
    lack both.
    """

    epoch: Count
    version: str
    id: str = ""
    previous: str | None = None
    mode: ActivationMode = "keep"
    allow_rollback: bool = False
    kv: ActivationKv = "reset"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """Snapshot of the cluster registry, as a heartbeat returns it to a replica.

    `known` means that this replica was still registered. If it is false, the registry was reset or
    had expired the replica. `view_number` counts this replica's heartbeats in the order in which
    they were started.
    """

    known: bool
    replicas: Mapping[str, Replica]
    manifests: Mapping[str, Manifest]
    target: ActivationTarget | None
    view_number: int = 0


class ClusterRegistry(Protocol):
    """Interface of the cluster registry. A call that gets no response raises RegistryUnavailable.

    beat: Register or renew the replica for `ttl_seconds` and return the current view.
    leave: Remove the replica. Idempotent.
    claim: Claim an idempotency key for `ttl_seconds` and return the holder's replica id. The caller
        becomes the holder if there is none, if it is `source`, which hands the key over, or if it
        is no longer registered and `allow_takeover` is set. Idempotent.
    release: Remove the claim if the replica holds it.
    holder: Return the replica id of the holder, registered or not; None if there is none.
    publish: Add a manifest. Idempotent for equal content, otherwise raises ManifestConflict.
    withdraw: Remove a manifest. Idempotent.
    set_target: Set the activation target if its epoch is the highest; return the current target.
    """

    async def beat(self, replica: Replica, *, ttl_seconds: float) -> ClusterView: ...

    async def leave(self, replica_id: str) -> None: ...

    async def claim(
        self,
        registry_key: str,
        replica_id: str,
        *,
        source: str | None = None,
        ttl_seconds: float,
        allow_takeover: bool,
    ) -> str: ...

    async def release(self, registry_key: str, replica_id: str) -> None: ...

    async def holder(self, registry_key: str) -> str | None: ...

    async def publish(self, manifest: Manifest) -> None: ...

    async def withdraw(self, version: str) -> None: ...

    async def set_target(self, target: ActivationTarget) -> ActivationTarget: ...

    async def close(self) -> None: ...


def new_replica_id() -> str:
    """New id of a replica, i.e. of one server process. A restarted server is a new replica."""
    return secrets.token_hex(6)


def new_rollout_id(replica_id: str) -> str:
    return f"{replica_id}.{uuid.uuid4().hex}"


def new_target_id() -> str:
    return secrets.token_hex(8)


def new_handle_id(replica_id: str) -> str:
    """Unguessable id of a prompt-KV handle."""
    return f"{replica_id}.{secrets.token_urlsafe(18)}"


def replica_id_of(name: str) -> str | None:
    """Id of the replica that created a rollout id or handle id; None if that is malformed."""
    found = _NAME.match(name)
    return None if found is None else found["replica"]
