"""What routes ask for: the server, that it is ready, and that it is the one that has it."""

from typing import Annotated

from fastapi import Depends, Request

from service.cluster.ids import replica_of
from service.http.errors import KvGone, ReplicaGone
from service.server import Server


def _server(request: Request) -> Server:
    server: Server = request.app.state.server
    return server


def _ready(server: Annotated[Server, Depends(_server)]) -> Server:
    server.readiness.check_ready()
    return server


def _serving(server: Annotated[Server, Depends(_server)]) -> Server:
    server.readiness.check_serving()
    return server


async def _rollout_here(rollout_id: str, server: Annotated[Server, Depends(_server)]) -> None:
    replica_id = replica_of(rollout_id)
    if replica_id is not None:
        await server.fleet.check_here(replica_id)


async def _handle_here(handle: str, server: Annotated[Server, Depends(_server)]) -> None:
    """The bytes went with their replica, as they do when a lease is over."""
    replica_id = replica_of(handle)
    if replica_id is not None:
        try:
            await server.fleet.check_here(replica_id)
        except ReplicaGone:
            raise KvGone("the replica that had them has gone") from None


AnyServer = Annotated[Server, Depends(_server)]
ReadyServer = Annotated[Server, Depends(_ready)]
ServingServer = Annotated[Server, Depends(_serving)]
ROLLOUT_HERE = Depends(_rollout_here)
HANDLE_HERE = Depends(_handle_here)
