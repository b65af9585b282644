"""The answer to who asks the wrong replica: 307, which keeps the method and the body."""

from urllib.parse import quote

from fastapi import FastAPI, Request, Response


class RedirectToReplica(Exception):
    """Another replica has it. `url` is what that one says of itself."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.url = url


def install(app: FastAPI) -> None:
    app.add_exception_handler(RedirectToReplica, _redirect)


async def _redirect(request: Request, error: Exception) -> Response:
    """The same address there: nothing of it is ours to change."""
    assert isinstance(error, RedirectToReplica)
    query = request.scope["query_string"].decode("latin-1")
    location = error.url.rstrip("/") + quote(request.scope["path"]) + (query and f"?{query}")
    request.app.state.server.metrics.directory_redirects.inc()
    return Response(status_code=307, headers={"Location": location})
