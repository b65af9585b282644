"""A prompt's keys and values in this process: fetched, or mapped where they lie."""

import math
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from coppice.errors import ConnectionFailed, CoppiceError, KvLost, TimedOut
from coppice.prompt_kv.download_buffer import DownloadBuffer
from coppice.prompt_kv.http_client import Download
from coppice.prompt_kv.layout import LENGTH_BYTES, Layout, header_bytes, layout_of
from coppice.prompt_kv.source import KvSource
from coppice.wire.kv import KvHandle, KvLocator

PIECE_BYTES = 4 * 2**20
_NUMPY = {"float32": np.float32, "float16": np.float16}


class PromptKV:
    """Keys and values of every layer, [kv_heads, tokens, head_dim], checked against their sums.

    Of a handle over `shm` the bytes are the server's own: they are right for as long as the lease
    runs, which `renew` lengthens. Leaving it, as a context manager, releases the handle.
    """

    def __init__(
        self,
        handle: KvHandle,
        source: KvSource,
        layout: Layout,
        download_buffer: DownloadBuffer,
        transport: str,
    ) -> None:
        self.handle = handle
        self.layout = layout
        self.transport = transport
        self._source = source
        self._download_buffer = download_buffer

    @classmethod
    def fetch(
        cls,
        handle: KvHandle | None,
        source: KvSource,
        *,
        buffer: Any = None,
        wait: bool = True,
    ) -> "PromptKV | None":
        """None: compute the prompt yourself; `source.counts` says how often and why.

        Over HTTP the bytes are read into `buffer`, any writable memory of at least
        `handle.num_bytes` (a pinned tensor's, say), or into fresh memory; over NIXL always into
        fresh memory, because a read that was given up may still write there. Without `wait` it
        comes back with the first bytes: layers are waited for when they are asked for, and KvLost
        is raised where they cannot be had any more.
        """
        if handle is None:
            return None
        offered = {locator.transport: locator for locator in handle.locators}
        for transport in source.transports:
            if transport not in offered:
                continue
            try:
                found = cls._fetch_over(transport, handle, offered[transport], source, buffer)
                if found is not None:
                    if wait:
                        found.wait()
                    return found
            except CoppiceError as error:
                source.count_failure(error)
                return None
        source.count("no_transport")
        return None

    @classmethod
    def _fetch_over(
        cls, transport: str, handle: KvHandle, at: KvLocator, source: KvSource, buffer: Any
    ) -> "PromptKV | None":
        if transport == "shm":
            return cls._from_shm(handle, at, source)
        if transport == "nixl":
            return cls._from_nixl(handle, at, source)
        return cls._from_http(handle, at, source, buffer)

    @classmethod
    def _from_shm(cls, handle: KvHandle, at: KvLocator, source: KvSource) -> "PromptKV | None":
        """The lease is renewed first: memory knows neither keys nor leases, the server does."""
        began = time.monotonic()
        room = source.shared_memory.get_file(handle, at)
        if room is None:
            return None
        source.renew(handle.handle, handle.lease_seconds or 1.0)
        head = bytes(room[: header_bytes(bytes(room[:LENGTH_BYTES]), handle)])
        layout = layout_of(head, handle)
        source.fetched("shm", handle.num_bytes, began)
        return cls(handle, source, layout, DownloadBuffer(room, handle.num_bytes), "shm")

    @classmethod
    def _from_nixl(cls, handle: KvHandle, at: KvLocator, source: KvSource) -> "PromptKV | None":
        """Checked at once. If the read itself goes wrong, the next transport is tried."""
        began = time.monotonic()
        lease = source.renew(handle.handle, handle.lease_seconds or 1.0)
        try:
            room = source.nixl_reader.get_file(
                handle, at, began + source.endpoint.timeout_seconds(lease)
            )
            if room is None:
                return None
            head = bytes(room[: header_bytes(bytes(room[:LENGTH_BYTES]), handle)])
            found = cls(
                handle,
                source,
                layout_of(head, handle),
                DownloadBuffer(room, handle.num_bytes),
                "nixl",
            )
            found.wait()
        except CoppiceError:
            source.count("nixl_failed")
            return None
        source.fetched("nixl", handle.num_bytes, began)
        return found

    @classmethod
    def _from_http(
        cls, handle: KvHandle, at: KvLocator, source: KvSource, buffer: Any
    ) -> "PromptKV":
        """The server sends for as long as the lease runs, so it is renewed on the way."""
        began = time.monotonic()
        room = _destination(buffer, handle.num_bytes)
        path = at.url or f"/v1/kv/{handle.handle}/data"
        download = Download(source.endpoint, path, handle.num_bytes)
        try:
            download.readinto(room[:LENGTH_BYTES])
            start = header_bytes(bytes(room[:LENGTH_BYTES]), handle)
            download.readinto(room[LENGTH_BYTES:start])
            layout = layout_of(bytes(room[:start]), handle)
        except BaseException:
            download.close()
            raise
        download_buffer = DownloadBuffer(room, start)

        def read() -> None:
            lease_seconds, renewed_at = handle.lease_seconds or 1.0, -math.inf
            try:
                for end in _progress_offsets(layout):
                    if time.monotonic() - renewed_at > lease_seconds / 2:
                        renewed_at = time.monotonic()
                        with suppress(ConnectionFailed, TimedOut):  # the download tries again
                            source.renew(handle.handle, lease_seconds)
                    download.readinto(room[download_buffer.num_received : end])
                    download_buffer.on_progress(end)
                source.fetched("http", handle.num_bytes, began)
            except CoppiceError as error:
                download_buffer.on_error(error)
            except Exception as error:  # whoever waits is told, whatever it is
                download_buffer.on_error(KvLost(f"prompt KV: {error!r}"))
            finally:
                download.close()

        threading.Thread(target=read, name="coppice-kv", daemon=True).start()
        return cls(handle, source, layout, download_buffer, "http")

    def wait(self) -> None:
        """Until every layer is here and is what it should be."""
        for part in self.layout.parts:
            self._download_buffer.wait_for_part(part)

    def layer(self, index: int) -> tuple[memoryview, memoryview]:
        """The bytes of a layer's keys and values, as soon as they are here."""
        keys, values = self.layout.layer(index)
        return self._download_buffer.wait_for_part(keys), self._download_buffer.wait_for_part(
            values
        )

    def numpy(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """A layer's keys and values; bfloat16, which numpy does not have, as its bits in uint16."""
        keys, values = self.layer(index)
        return self._array(keys), self._array(values)

    def torch_layers(self) -> Iterator[tuple[Any, Any]]:
        """Each layer's keys and values as torch tensors, in order, as they arrive; no copy."""
        for index in range(self.layout.num_layers):
            keys, values = self.layer(index)
            yield self._tensor(keys), self._tensor(values)

    def tensors(self) -> dict[str, Any]:
        """k.0, v.0 and so on, as coppice.train.PromptKV.of_named takes them; no copy."""
        named: dict[str, Any] = {}
        for index, (keys, values) in enumerate(self.torch_layers()):
            named |= {f"k.{index}": keys, f"v.{index}": values}
        return named

    def renew(self, seconds: float = 60.0) -> float:
        """Seconds that the lease now runs; KvUnavailable if it is over."""
        return self._source.renew(self.handle.handle, seconds)

    def release(self) -> None:
        """Over `shm` nothing may look at the bytes any more."""
        self._source.release(self.handle.handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.release()
        except CoppiceError as failure:
            self._source.count_failure(failure)  # its lease ends by itself

    def _array(self, data: memoryview) -> NDArray[Any]:
        dtype = _NUMPY.get(self.layout.dtype, np.uint16)
        return np.frombuffer(data, dtype).reshape(self.layout.shape)

    def _tensor(self, data: memoryview) -> Any:
        torch = import_module("torch")
        with warnings.catch_warnings():
            # Of memory that is mapped read-only: writing there would end the process, as it should.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(data, dtype=getattr(torch, self.layout.dtype))
        return flat.view(self.layout.shape)


def _progress_offsets(layout: Layout) -> Iterator[int]:
    """Where to say how far it has come: after every layer, and in large ones on the way."""
    for part in layout.parts:
        yield from range(part.start + PIECE_BYTES, part.end, PIECE_BYTES)
        yield part.end


def _destination(buffer: Any, num_bytes: int) -> memoryview:
    given: Any = np.empty(num_bytes, np.uint8) if buffer is None else buffer
    room = memoryview(given).cast("B")
    if room.readonly or len(room) < num_bytes:
        raise ValueError(f"the buffer must be writable and have {num_bytes} bytes")
    return room[:num_bytes]
