"""Import of the config and tensor files of a LoRA adapter into a private directory.

Files from a directory are copied, because a trainer may write the next version to the same path. An
upload is one safetensors file whose metadata contains the adapter config as `adapter_config`.
"""

import asyncio
import hashlib
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from coppice.safetensors_io import read_header
from engine.weights.validation import ADAPTER_CONFIG_FILE, ADAPTER_TENSORS_FILE
from service.checkpoint_store import CheckpointStore, Upload
from service.errors import InsufficientStorage, WeightsRefused

MAX_CONFIG_BYTES = 2**20
COPY_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedAdapter:
    """Files of a received LoRA adapter, not validated yet; the digest identifies their content."""

    folder: Path
    digest: str


class AdapterFiles:
    """Copies received LoRA adapters into private directories, which `discard` deletes."""

    def __init__(self, checkpoints: CheckpointStore, *, max_bytes: int) -> None:
        self._checkpoints = checkpoints
        self._max_bytes = max_bytes

    async def from_directory(self, path: str) -> ReceivedAdapter:
        """Copy an adapter from a directory; raises PathRefused unless the directory is allowed."""
        directory = self._checkpoints.resolve_allowed(path)
        limits = {ADAPTER_CONFIG_FILE: MAX_CONFIG_BYTES, ADAPTER_TENSORS_FILE: self._max_bytes}
        files = {name: self._checkpoints.resolve_allowed(str(directory / name)) for name in limits}
        return await self._create(lambda folder: _copy(files, limits, folder))

    async def from_upload(
        self, chunks: AsyncIterator[bytes], content_digest: str | None
    ) -> ReceivedAdapter:
        upload = await self._checkpoints.receive(chunks, content_digest)
        try:
            return await self._create(lambda folder: _unpack(upload, folder))
        finally:
            self._checkpoints.discard(upload)

    def discard(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    async def _create(self, fill: Callable[[Path], str]) -> ReceivedAdapter:
        folder = self._checkpoints.make_temp_dir(".adapter-")
        try:
            digest = await asyncio.to_thread(fill, folder)
        except OSError as error:
            self.discard(folder)
            raise InsufficientStorage() from error
        except BaseException:
            self.discard(folder)
            raise
        return ReceivedAdapter(folder=folder, digest=digest)


def _copy(files: Mapping[str, Path], limits: Mapping[str, int], folder: Path) -> str:
    """Copy the files of an adapter into `folder`; returns the SHA-256 of their content.

    Each copy gets the name given in `files`, since a symlink's target may be named differently.
    """
    sha256 = hashlib.sha256()
    for name, file in files.items():
        with (folder / name).open("wb") as target:
            for chunk in _chunks(name, file, limits[name]):
                sha256.update(chunk)
                target.write(chunk)
    return sha256.hexdigest()


def _chunks(name: str, file: Path, limit: int) -> Iterator[bytes]:
    """Read a file in chunks. The size limit is checked during the read, as the file may grow."""
    left = limit
    try:
        if not file.is_file() or file.stat().st_size > limit:
            raise WeightsRefused(f"{name} must be a file of at most {limit} bytes")
        with file.open("rb") as source:
            while chunk := source.read(min(COPY_BYTES, left + 1)):
                left -= len(chunk)
                if left < 0:
                    raise WeightsRefused(f"{name} must be a file of at most {limit} bytes")
                yield chunk
    except OSError as error:
        raise WeightsRefused(f"{name} cannot be read: {error.strerror}") from error


def _unpack(upload: Upload, folder: Path) -> str:
    config = _read_config(upload.path)
    (folder / ADAPTER_CONFIG_FILE).write_bytes(config)
    upload.path.rename(folder / ADAPTER_TENSORS_FILE)
    assert upload.sha256 is not None, "computed by `receive`"
    return upload.sha256


def _read_config(path: Path) -> bytes:
    try:
        metadata = read_header(path).metadata
    except ValueError as error:
        raise WeightsRefused(f"the adapter is not a valid safetensors file: {error}") from error
    config = metadata.get("adapter_config", "").encode()
    if not 0 < len(config) <= MAX_CONFIG_BYTES:
        raise WeightsRefused("the metadata of the safetensors file must contain adapter_config")
    return config
