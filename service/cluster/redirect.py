"""Redirect of a request to the replica that owns the id: 307, which keeps method and body."""

from urllib.parse import quote

from fastapi import FastAPI, Request, Response


class RedirectToReplica(Exception):
    """The resource belongs to another replica, whose registered base URL is `url`."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.url = url


def install(app: FastAPI) -> None:
    app.add_exception_handler(RedirectToReplica, _redirect)


async def _redirect(request: Request, error: Exception) -> Response:
    """Redirect to the same path and query on the other replica."""
    assert isinstance(error, RedirectToReplica)
    query = request.scope["query_string"].decode("latin-1")
    location = error.url.rstrip("/") + quote(request.scope["path"]) + (query and f"?{query}")
    request.app.state.server.metrics.directory_redirects.inc()
    return Response(status_code=307, headers={"Location": location})
