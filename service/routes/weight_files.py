"""Route that serves the files of weights versions to other replicas."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import APIRouter, Response
from starlette.responses import StreamingResponse

from service.auth.access import requires_role
from service.http.errors import VersionNotFound
from service.http.responses import AUTH_ERRORS, declare_responses
from service.routes.dependencies import AnyServer
from service.weights.checkpoint_store import DELTA, WRITE_BYTES
from service.weights.replication import announcer
from service.weights.versions import Version

router = APIRouter(prefix="/v1/weights")

MEDIA_TYPE = "application/octet-stream"
FILE_RESPONSES = declare_responses({200: [MEDIA_TYPE]}, *AUTH_ERRORS, VersionNotFound)


@router.get("/{version}/files/{name}", responses=FILE_RESPONSES)
@requires_role("replica")
async def file(version: str, name: str, server: AnyServer) -> Response:
    path = _path(server.versions.find(version), name)
    if path is None:
        raise VersionNotFound("it has no such file here")
    num_bytes = path.stat().st_size
    return StreamingResponse(
        _chunks(path), media_type=MEDIA_TYPE, headers={"Content-Length": str(num_bytes)}
    )


def _path(version: Version | None, name: str) -> Path | None:
    """Path of an uploaded file of a version; None if there is no such file.

    The name must be one that was recorded at the upload, so that the request cannot choose a path.
    """
    if version is None or version.state == "incomplete":
        return None
    if name in version.digests:
        return version.path / name
    if name == announcer.DELTA and version.delta_sha256 is not None:
        return version.path / DELTA
    return None


async def _chunks(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as content:
        while chunk := await asyncio.to_thread(content.read, WRITE_BYTES):
            yield chunk
