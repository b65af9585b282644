"""Draft model operations: status, download, upload."""

import base64
from os import PathLike
from pathlib import Path

from pydantic import TypeAdapter

from coppice.transport.messages import FileBody, HttpRequest
from coppice.transport.request_sender import RequestSender
from coppice.weights.digest import sha256_of
from coppice.wire.base import Label
from coppice.wire.drafter import DrafterAnswer

_LABEL: TypeAdapter[str] = TypeAdapter(Label)
_FILE = "application/octet-stream"


class DrafterOperations:
    """Draft model operations. They raise NotFound if the server uses no draft model."""

    _sender: RequestSender

    async def drafter(self) -> DrafterAnswer:
        """Returns the version, acceptance rates and training state of the draft model."""
        reply = await self._sender.send(
            HttpRequest(method="GET", path="/v1/drafter", is_idempotent=True)
        )
        return reply.read(DrafterAnswer)

    async def download_drafter(self, path: str | PathLike[str]) -> str:
        """Writes the draft model in use to a .safetensors file and returns its version."""
        call = HttpRequest(
            method="GET", path="/v1/drafter", headers={"Accept": _FILE}, is_idempotent=True
        )
        reply = await self._sender.send(call)
        Path(path).write_bytes(reply.body)
        return reply.headers["coppice-drafter-version"]

    async def upload_drafter(
        self, version: str, path: str | PathLike[str], *, timeout: float | None = None
    ) -> DrafterAnswer:
        """Uploads a draft model as a .safetensors file.

        It is promoted if a trial shows that it does no worse than the one in use. `drafter` reports
        the outcome; the trial needs traffic. The call is not retried after a lost connection: a
        version that exists raises VersionConflict.
        """
        source = Path(path)
        digest = await self._sender.driver.run_steps(sha256_of(source))
        call = HttpRequest(
            method="PUT",
            path=f"/v1/drafter/{_LABEL.validate_python(version)}",
            headers={
                "Content-Type": _FILE,
                # RFC 9530
                "Content-Digest": f"sha-256=:{base64.b64encode(digest).decode()}:",
            },
            body=FileBody(path=source, num_bytes=source.stat().st_size),
            read_timeout=timeout,
        )
        return (await self._sender.send(call)).read(DrafterAnswer)
