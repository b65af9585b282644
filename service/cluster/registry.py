"""The directory: what replicas know of one another, behind one small interface.

It holds who is there and what each serves, which weights there are and which of them are wanted,
and who took an idempotency key. It owns nothing: a rollout, a handle and a checkpoint belong to the
replica that has them, and the names of the first two say which one that is
(service/cluster/ids.py). So its loss costs the way to things, never the things.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from coppice.wire.weights import ActivationMode

ReplicaState = Literal["starting", "serving", "draining"]


class RegistryUnavailable(Exception):
    """It did not answer in time: nothing is known of what was asked."""


class ManifestConflict(Exception):
    """The version is published with other content, or its sequence is another version's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One server as the others see it. An entry of another release may lack what is defaulted.

    `epoch`: of the last order that it has carried out; `holds`: the versions whose files it gives
    to others, `staged`: those that it could serve at once; `failed`: the version that it could not
    bring itself to serve, for `error`.
    """

    id: str
    url: str
    state: ReplicaState
    version: str
    sequence: int
    epoch: int = 0
    holds: tuple[str, ...] = ()
    staged: tuple[str, ...] = ()
    failed: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFile:
    name: str
    sha256: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A version's files. `delta`: the same as changes of the version `base`; `path`: where they
    lie, if it is a directory that every replica has."""

    version: str
    sequence: int
    files: tuple[ManifestFile, ...]
    base: str | None = None
    delta: ManifestFile | None = None
    path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationTarget:
    """The version that all are to serve. Of two, the one with the higher epoch stands."""

    epoch: int
    version: str
    mode: ActivationMode = "keep"
    allow_rollback: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """All of it at one moment. `known`: the replica that looked was still listed from before; if it
    was not, the directory has lost what it held, or had given the replica up. `view_number`: counts
    the replica's own looks, in the order in which they began."""

    known: bool
    replicas: Mapping[str, Replica]
    manifests: Mapping[str, Manifest]
    target: ActivationTarget | None
    view_number: int = 0


class ClusterRegistry(Protocol):
    """Contract. Every method raises DirectoryLost within a bounded time if there is no answer.

    beat: lists the replica, or renews it, for so many seconds; answers what else there is.
    leave: the replica is listed no more. Again changes nothing.
    claim: who has this place: the replica if nobody had it, or if who had it is listed no more and
        `allow_takeover` is set; otherwise who has had it. Forgotten after so many seconds.
    release: the place is nobody's, if it was the replica's.
    publish: adds a manifest; again with the same content changes nothing. ManifestConflict.
    withdraw: the manifest is gone. Again changes nothing.
    order: the order that stands now: this one if its epoch is the highest.
    """

    async def beat(self, replica: Replica, *, ttl_seconds: float) -> ClusterView: ...

    async def leave(self, replica_id: str) -> None: ...

    async def claim(
        self, claim_key: str, replica_id: str, *, ttl_seconds: float, allow_takeover: bool
    ) -> str: ...

    async def release(self, claim_key: str, replica_id: str) -> None: ...

    async def publish(self, manifest: Manifest) -> None: ...

    async def withdraw(self, version: str) -> None: ...

    async def target(self, target: ActivationTarget) -> ActivationTarget: ...

    async def close(self) -> None: ...
