"""What routes ask for: the server, and that it is ready."""

from typing import Annotated

from fastapi import Depends, Request

from service.server import Server


def _server(request: Request) -> Server:
    server: Server = request.app.state.server
    return server


def _ready(server: Annotated[Server, Depends(_server)]) -> Server:
    server.check_ready()
    return server


def _serving(server: Annotated[Server, Depends(_server)]) -> Server:
    server.check_serving()
    return server


AnyServer = Annotated[Server, Depends(_server)]
ReadyServer = Annotated[Server, Depends(_ready)]
ServingServer = Annotated[Server, Depends(_serving)]
