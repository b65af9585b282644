"""Client operations on weights (upload, stage, activate, list, delete) and the draft model."""

import logging
import tempfile
from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from urllib.parse import quote

from pydantic import TypeAdapter

from coppice.errors import BaseUnavailable
from coppice.transport.messages import OCTET_STREAM, HttpRequest, file_request, json_request
from coppice.transport.retry import RequestSender
from coppice.weights.delta_writer import BaseFile
from coppice.weights.safetensors_index import checkpoint_files
from coppice.weights.safetensors_writer import (
    StateDict,
    Tensor,
    sha256_of,
    tensors_from_files,
    tensors_of,
    write_safetensors,
)
from coppice.wire.base import Label
from coppice.wire.weights import (
    ActivateRequest,
    ActivationAnswer,
    ActivationMode,
    DrafterAnswer,
    StageRequest,
    VersionAnswer,
    VersionsAnswer,
)

log = logging.getLogger("coppice")
_LABEL: TypeAdapter[str] = TypeAdapter(Label)


class WeightsOperations:
    """Client operations on weights; keeps the last uploaded file as the base of the next delta.

    Their duration depends on the size of the weights and on the running samples, so there is no
    timeout by default. `timeout` is in seconds.
    """

    _sender: RequestSender
    _base_file: BaseFile | None = None

    async def upload_weights(
        self,
        version: str,
        source: StateDict | str | PathLike[str],
        *,
        sequence: int | None = None,
        delta: bool = False,
        timeout: float | None = None,
    ) -> VersionAnswer:
        """Uploads weights: a state dict, a .safetensors file or a checkpoint directory.

        A state dict is written to a temporary file first, one tensor at a time. With `delta` that
        file is kept until the next upload or until the client is closed. The next upload then sends
        only the changes, bit-exactly, or the full weights if the server no longer has the base.
        """
        address = _address(version)
        if delta:
            return await self._upload_changes(version, source, sequence, timeout)
        if not isinstance(source, Mapping):
            return await self._upload_files(address, Path(source), sequence, timeout)
        with tempfile.TemporaryDirectory(prefix="coppice-") as folder:
            path = Path(folder) / "model.safetensors"
            digest = await self._sender.driver.run_steps(
                write_safetensors(path, tensors_of(source))
            )
            return await self._put(address, path, digest, sequence, timeout)

    async def stage_weights(
        self,
        version: str,
        path: str | PathLike[str],
        *,
        sequence: int | None = None,
        timeout: float | None = None,
    ) -> VersionAnswer:
        """Stages weights that are already in one of the server's configured directories.

        The call is not retried after a lost connection: a version that exists raises
        VersionConflict.
        """
        request = StageRequest(path=fspath(path), sequence=sequence)
        call = json_request("POST", _address(version), request, read_timeout=timeout)
        return (await self._sender.send(call)).read(VersionAnswer)

    async def activate_weights(
        self,
        version: str,
        *,
        mode: ActivationMode = "keep",
        allow_rollback: bool = False,
        timeout: float | None = None,
    ) -> ActivationAnswer:
        """Activates a weights version; `mode` determines how running samples are handled.

        With allow_rollback the call is not retried after a lost connection.
        """
        request = ActivateRequest(mode=mode, allow_rollback=allow_rollback)
        call = json_request(
            "POST",
            _address(version) + "/activate",
            request,
            read_timeout=timeout,
            # Activating the active version again does nothing. If another client has activated a
            # newer one since, the retry is refused as a rollback, unless rollbacks are allowed.
            is_idempotent=not allow_rollback,
        )
        return (await self._sender.send(call)).read(ActivationAnswer)

    async def publish_weights(
        self,
        version: str,
        source: StateDict | str | PathLike[str],
        *,
        sequence: int | None = None,
        mode: ActivationMode = "keep",
        allow_rollback: bool = False,
        delta: bool = False,
        timeout: float | None = None,
    ) -> ActivationAnswer:
        """Uploads and activates weights: calls upload_weights, then activate_weights."""
        await self.upload_weights(version, source, sequence=sequence, delta=delta, timeout=timeout)
        return await self.activate_weights(
            version, mode=mode, allow_rollback=allow_rollback, timeout=timeout
        )

    async def weights(self) -> VersionsAnswer:
        """Lists the weights versions that the server has, and the active one."""
        return await self._sender.get("/v1/weights", VersionsAnswer)

    async def delete_weights(self, version: str) -> None:
        """Deletes a weights version that is not active. Not retried after a lost connection."""
        reply = await self._sender.send(HttpRequest(method="DELETE", path=_address(version)))
        reply.check()

    async def _upload_changes(
        self,
        version: str,
        source: StateDict | str | PathLike[str],
        sequence: int | None,
        timeout: float | None,
    ) -> VersionAnswer:
        base, new_file = self._base_file, BaseFile(version)
        await self._sender.driver.run_steps(new_file.write(_tensors(source)))
        answer = None
        if base is not None:
            answer = await self._put_delta(base, new_file, sequence, timeout)
        if answer is None:
            answer = await self._put(
                _address(version), new_file.path, new_file.digest, sequence, timeout
            )
        self._base_file = new_file
        return answer

    async def _put_delta(
        self, base: BaseFile, new_file: BaseFile, sequence: int | None, timeout: float | None
    ) -> VersionAnswer | None:
        """Uploads weights as a delta; returns None if the full weights must be sent instead."""
        with tempfile.TemporaryDirectory(prefix="coppice-") as folder:
            path = Path(folder) / "delta.safetensors"
            run_steps = self._sender.driver.run_steps
            if await run_steps(new_file.write_delta(base, path)) is None:
                return None
            digest = await run_steps(sha256_of(path))
            address = _address(new_file.version)
            try:
                return await self._put(address, path, digest, sequence, timeout, base.version)
            except BaseUnavailable as error:
                log.info("%s; sending the full weights of %s", error, new_file.version)
                return None

    async def _upload_files(
        self, address: str, source: Path, sequence: int | None, timeout: float | None
    ) -> VersionAnswer:
        checkpoint = checkpoint_files(source)
        for path in checkpoint.files:
            target = f"{address}/files/{quote(path.name)}" if checkpoint.sharded else address
            digest = await self._sender.driver.run_steps(sha256_of(path))
            answer = await self._put(target, path, digest, sequence, timeout)
            # The server may have assigned a sequence to the first file; all files share it.
            sequence = answer.sequence
        return answer

    async def _put(
        self,
        address: str,
        path: Path,
        digest: bytes,
        sequence: int | None,
        timeout: float | None,
        base: str | None = None,
    ) -> VersionAnswer:
        params = {"sequence": None if sequence is None else str(sequence), "base": base}
        given = {name: value for name, value in params.items() if value is not None}
        call = file_request(address, path, digest, params=given, read_timeout=timeout)
        return (await self._sender.send(call)).read(VersionAnswer)


def _tensors(source: StateDict | str | PathLike[str]) -> list[Tensor]:
    if isinstance(source, Mapping):
        return tensors_of(source)
    checkpoint = checkpoint_files(Path(source))
    return tensors_from_files(checkpoint.files[1:] if checkpoint.sharded else checkpoint.files)


def _address(version: str) -> str:
    return f"/v1/weights/{_LABEL.validate_python(version)}"


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
