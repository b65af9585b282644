"""Client operations on weights: upload, stage, activate, list and delete."""

import logging
import tempfile
from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from urllib.parse import quote

from pydantic import TypeAdapter

from coppice.errors import (
    BaseUnavailable,
    WeightsRefused,
)
from coppice.operations.weight_uploads import WeightUploads
from coppice.transport.messages import (
    HttpRequest,
    file_request,
    json_request,
)
from coppice.transport.retry import RequestSender
from coppice.weights.checkpoint_files import (
    checkpoint_files,
    file_of,
    fingerprint,
    one_file,
    sha256_of,
    shards_of,
    tensors_of_source,
)
from coppice.weights.delta_writer import BaseFile
from coppice.weights.tensor_serialization import StateDict
from coppice.wire.base import Label
from coppice.wire.columns.kv_version_spans import ActivationKv
from coppice.wire.weights import (
    ActivateRequest,
    ActivationAnswer,
    ActivationMode,
    StageRequest,
    VersionAnswer,
    VersionsAnswer,
)

log = logging.getLogger("coppice")
MAX_STREAMS = 64
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
        streams: int = 1,
        timeout: float | None = None,
    ) -> VersionAnswer:
        """Uploads weights: a state dict, a .safetensors file or a checkpoint directory.

        A state dict is sent from the memory of its tensors, one tensor at a time, and must not
        change meanwhile.

        With `delta` the weights are written to a temporary file, which is kept until the next
        upload or until the client is closed. The next upload then sends only the changes,
        bit-exactly, or the full weights if the server no longer has the base.

        With several `streams` the weights are uploaded as a sharded checkpoint of as many files,
        each over a connection of its own. This is faster where the round-trip time limits the rate
        of a connection. Such a version cannot be the base of a delta.
        """
        _check_streams(streams, delta)
        if delta:
            return await self._upload_changes(version, source, sequence, timeout)
        address, image = address_of(version), one_file(source)
        uploads = WeightUploads(self._sender, address, sequence, timeout)
        if streams > 1:
            return await uploads.upload_all(shards_of(tensors_of_source(source), streams))
        if image is not None:
            return await uploads.upload(file_of(image))
        assert not isinstance(source, Mapping), "a state dict has an image"
        return await self._upload_shards(address, Path(source), sequence, timeout)

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
        return await self._stage(version, request, timeout)

    async def activate_weights(
        self,
        version: str,
        *,
        mode: ActivationMode = "keep",
        kv: ActivationKv = "reset",
        allow_rollback: bool = False,
        timeout: float | None = None,
    ) -> ActivationAnswer:
        """Activates a weights version; `mode` determines how running samples are handled.

        With `kv="keep_running"`, sessions and rollouts with `keep_kv` keep their cached KV.

        With allow_rollback the call is not retried after a lost connection.
        """
        request = ActivateRequest(mode=mode, kv=kv, allow_rollback=allow_rollback)
        call = json_request(
            "POST",
            address_of(version) + "/activate",
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
        kv: ActivationKv = "reset",
        allow_rollback: bool = False,
        delta: bool = False,
        streams: int = 1,
        timeout: float | None = None,
    ) -> ActivationAnswer:
        """Publishes and activates weights.

        A file or directory that the server sees, too, in one of its configured directories, is read
        from there. It must not change while the server has the version. Other weights are uploaded,
        and so are those with `delta` or several `streams`. The client logs which way it took.
        """
        _check_streams(streams, delta)
        is_shared = not (
            isinstance(source, Mapping) or delta or streams > 1
        ) and await self._stage_if_shared(version, Path(source), sequence, timeout)
        if not is_shared:
            await self.upload_weights(
                version, source, sequence=sequence, delta=delta, streams=streams, timeout=timeout
            )
        return await self.activate_weights(
            version, mode=mode, kv=kv, allow_rollback=allow_rollback, timeout=timeout
        )

    async def weights(self) -> VersionsAnswer:
        """Lists the weights versions that the server has, and the active one."""
        return await self._sender.get("/v1/weights", VersionsAnswer)

    async def delete_weights(self, version: str) -> None:
        """Deletes a weights version that is not active. Not retried after a lost connection."""
        reply = await self._sender.send(HttpRequest(method="DELETE", path=address_of(version)))
        reply.check()

    async def _stage(
        self, version: str, request: StageRequest, timeout: float | None
    ) -> VersionAnswer:
        call = json_request("POST", address_of(version), request, read_timeout=timeout)
        return (await self._sender.send(call)).read(VersionAnswer)

    async def _stage_if_shared(
        self, version: str, source: Path, sequence: int | None, timeout: float | None
    ) -> bool:
        """Stages files by their path; returns False if the server does not see them there."""
        path = source.resolve()
        request = StageRequest(path=str(path), fingerprint=fingerprint(path), sequence=sequence)
        try:
            await self._stage(version, request, timeout)
        except WeightsRefused as error:
            if error.code != "path_refused":
                raise
            log.info("the weights of %s are uploaded: %s", version, error)
            return False
        log.info("the server reads the weights of %s from %s", version, path)
        return True

    async def _upload_changes(
        self,
        version: str,
        source: StateDict | str | PathLike[str],
        sequence: int | None,
        timeout: float | None,
    ) -> VersionAnswer:
        base, new_file = self._base_file, BaseFile(version)
        await self._sender.driver.run_steps(new_file.write(tensors_of_source(source)))
        answer = None
        if base is not None:
            answer = await self._put_delta(base, new_file, sequence, timeout)
        if answer is None:
            answer = await self._put(
                address_of(version), new_file.path, new_file.digest, sequence, timeout
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
            address = address_of(new_file.version)
            try:
                return await self._put(address, path, digest, sequence, timeout, base.version)
            except BaseUnavailable as error:
                log.info("%s; sending the full weights of %s", error, new_file.version)
                return None

    async def _upload_shards(
        self, address: str, source: Path, sequence: int | None, timeout: float | None
    ) -> VersionAnswer:
        checkpoint = checkpoint_files(source)
        for path in checkpoint.files:
            digest = await self._sender.driver.run_steps(sha256_of(path))
            target = f"{address}/files/{quote(path.name)}"
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
        params = _params(sequence, base)
        call = file_request(address, path, digest, params=params, read_timeout=timeout)
        return (await self._sender.send(call)).read(VersionAnswer)


def _params(sequence: int | None, base: str | None) -> dict[str, str]:
    params = {"sequence": None if sequence is None else str(sequence), "base": base}
    return {name: value for name, value in params.items() if value is not None}


def address_of(version: str) -> str:
    return f"/v1/weights/{_LABEL.validate_python(version)}"


def _check_streams(streams: int, delta: bool) -> None:
    if not 1 <= streams <= MAX_STREAMS:
        raise ValueError(f"streams must be from 1 to {MAX_STREAMS}")
    if delta and streams > 1:
        raise ValueError("delta and several streams exclude each other: a delta is one file")
