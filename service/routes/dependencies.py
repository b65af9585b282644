"""FastAPI dependencies of routes: server, readiness, uploads, redirects to the owning replica."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from service.auth.access import Caller
from service.cluster.idempotency_claim import move_key
from service.cluster.registry import replica_id_of
from service.errors import KvGone, NotReady, ReplicaGone
from service.http.bodies import stream_body
from service.server import Server


async def _server(request: Request) -> Server:
    server: Server = request.app.state.server
    return server


async def _ready(server: Annotated[Server, Depends(_server)]) -> Server:
    server.readiness.check_ready()
    return server


async def _serving(server: Annotated[Server, Depends(_server)]) -> Server:
    server.readiness.check_serving()
    return server


@dataclass(frozen=True, slots=True)
class Upload:
    """File in the body of an upload request, and the digest that its bytes must have."""

    chunks: AsyncIterator[bytes]
    digest: str | None


async def _upload(request: Request, server: Annotated[Server, Depends(_ready)]) -> Upload:
    chunks = stream_body(request, limit=server.settings.weights.max_upload_bytes)
    return Upload(chunks, request.headers.get("content-digest"))


async def check_local(resource_id: str, server: Server) -> None:
    """Redirect the request to the replica that owns a resource, if it is another one."""
    replica_id = replica_id_of(resource_id)
    if replica_id is not None:
        await server.cluster.check_local(replica_id)


async def _check_rollout_local(
    rollout_id: str, server: Annotated[Server, Depends(_server)], caller: Caller
) -> None:
    """Redirect the request to the replica that has the rollout, if it is another one.

    Raises NotReady while the rollout arrives at this replica, which has its keys already.
    """
    if server.rollouts.find(rollout_id) is None:
        if server.handoff.receiver.is_arriving(rollout_id):
            raise NotReady("the rollout arrives at this replica", retry_after_seconds=1.0)
        key = move_key(rollout_id, caller.name)
        await server.idempotency_keys.check_local(rollout_id, key)


async def _check_session_local(
    session_id: str, server: Annotated[Server, Depends(_server)]
) -> None:
    """Redirect the request to the replica that has the session, if it is another one.

    Raises ReplicaGone or ClusterUnavailable for a session of a replica that is not known.
    """
    await server.sessions.addresses.check_local(session_id)
    if server.sessions.store.find(session_id) is None:
        await check_local(session_id, server)


async def _check_handle_local(handle: str, server: Annotated[Server, Depends(_server)]) -> None:
    """Redirect the request to the replica that has the prompt-KV handle, if it is another one.

    Raises KvGone, as for an expired lease, if the replica has left the cluster, because its KV no
    longer exists.
    """
    try:
        await check_local(handle, server)
    except ReplicaGone:
        raise KvGone("the replica that had the prompt KV has left the cluster") from None


AnyServer = Annotated[Server, Depends(_server)]
ReadyServer = Annotated[Server, Depends(_ready)]
ServingServer = Annotated[Server, Depends(_serving)]
UploadedFile = Annotated[Upload, Depends(_upload)]
ROLLOUT_LOCAL = Depends(_check_rollout_local)
SESSION_LOCAL = Depends(_check_session_local)
HANDLE_LOCAL = Depends(_check_handle_local)
