"""Concurrent uploads of the files of one weights version to a server, verified by checksum."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from threading import Event

from coppice.errors import BadAnswer
from coppice.transport.messages import Chunk, HttpRequest, StreamedBody, upload_request
from coppice.transport.retry import RequestSender
from coppice.weights.checkpoint_files import FileImage
from coppice.weights.tensor_serialization import ChecksummedChunks
from coppice.wire.weights import VersionAnswer


class UploadStopped(Exception):
    """Another file of the same weights could not be uploaded."""


class ChecksumDiffers(BadAnswer):
    """The server received other bytes than were sent."""


class WeightUploads:
    """Uploads of the files of one version, whose path on the server is `address`.

    The version is deleted if a file arrives changed.
    """

    def __init__(
        self, sender: RequestSender, address: str, sequence: int | None, timeout: float | None
    ) -> None:
        self._sender = sender
        self._address = address
        self._params = {} if sequence is None else {"sequence": str(sequence)}
        self._timeout = timeout
        self._stop = Event()

    async def upload(self, file: FileImage) -> VersionAnswer:
        """Uploads a version of one file."""
        async with self._deleted_if_changed():
            return await self._send(self._address, file)

    async def upload_all(self, files: Sequence[FileImage]) -> VersionAnswer:
        """Uploads all files of a sharded checkpoint at the same time; returns the whole version.

        After a failure, the other uploads end with their next chunk.
        """
        calls = [self._send(f"{self._address}/files/{file.name}", file) for file in files]
        async with self._deleted_if_changed():
            answers = await self._sender.driver.run_all(calls, self._stop)
        return next((answer for answer in answers if not answer.missing_files), answers[-1])

    async def _send(self, target: str, file: FileImage) -> VersionAnswer:
        """Uploads a file and compares the server's checksum with that of the sent bytes.

        It is computed while they are sent: a digest takes longer than a fast network.
        """
        chunks = ChecksummedChunks()
        body = StreamedBody(
            num_bytes=file.num_bytes, chunks=lambda: chunks.of(chunks_until(self._stop, file))
        )
        call = upload_request(target, body, None, params=self._params, read_timeout=self._timeout)
        answer = (await self._sender.send(call)).read(VersionAnswer)
        if answer.xxh3_128 is not None and answer.xxh3_128 != chunks.checksum:
            raise ChecksumDiffers("the server received other bytes than were sent")
        return answer

    @asynccontextmanager
    async def _deleted_if_changed(self) -> AsyncIterator[None]:
        try:
            yield
        except ChecksumDiffers:
            call = HttpRequest(method="DELETE", path=self._address)
            await self._sender.send_best_effort(call)
            raise


def chunks_until(stop: Event, file: FileImage) -> Iterator[Chunk]:
    """Chunks of a file; raises UploadStopped once `stop` is set."""
    for chunk in file.chunks():
        if stop.is_set():
            raise UploadStopped
        yield chunk
