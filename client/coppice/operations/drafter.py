"""Client operations on the draft model of speculative decoding: status, download and upload."""

from os import PathLike
from pathlib import Path

from pydantic import TypeAdapter

from coppice.transport.messages import OCTET_STREAM, HttpRequest, file_request
from coppice.transport.retry import RequestSender
from coppice.weights.checkpoint_files import sha256_of
from coppice.wire.base import Label
from coppice.wire.weights import DrafterAnswer

_LABEL: TypeAdapter[str] = TypeAdapter(Label)


class DrafterOperations:
    """Client operations on the draft model; they raise NotFound if the server uses none."""

    _sender: RequestSender

    async def drafter(self) -> DrafterAnswer:
        """Returns the version, acceptance rates and training state of the draft model."""
        return await self._sender.get("/v1/drafter", DrafterAnswer)

    async def download_drafter(self, path: str | PathLike[str]) -> str:
        """Writes the draft model in use to a .safetensors file and returns its version."""
        call = HttpRequest(
            method="GET", path="/v1/drafter", headers={"Accept": OCTET_STREAM}, is_idempotent=True
        )
        reply = await self._sender.send(call)
        Path(path).write_bytes(reply.body)
        return reply.headers["coppice-drafter-version"]

    async def upload_drafter(
        self, version: str, path: str | PathLike[str], *, timeout: float | None = None
    ) -> DrafterAnswer:
        """Uploads a draft model as a .safetensors file.

        The server promotes it if a trial shows that it does no worse than the draft model in use.
        The trial needs traffic; `drafter` reports the outcome. The call is not retried after a lost
        connection: a version that exists raises VersionConflict.
        """
        source = Path(path)
        digest = await self._sender.driver.run_steps(sha256_of(source))
        address = f"/v1/drafter/{_LABEL.validate_python(version)}"
        call = file_request(address, source, digest, read_timeout=timeout, is_idempotent=False)
        return (await self._sender.send(call)).read(DrafterAnswer)
