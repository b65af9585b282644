"""Keys and values of a prompt in CPU memory, fetched by shared memory, NIXL or HTTP."""

import math
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coppice.errors import ConnectionFailed, CoppiceError, KvLost, TimedOut
from coppice.prompt_kv.file_layout import Layout, header_bytes, layout_of, read_layout
from coppice.prompt_kv.http_client import Download, DownloadBuffer
from coppice.prompt_kv.server_kv_source import KvSource, LeasedKv
from coppice.safetensors_io import LENGTH_BYTES
from coppice.wire.prompt_kv import KvHandle, KvLocator

PIECE_BYTES = 4 * 2**20
_NUMPY = {"float32": np.float32, "float16": np.float16}


class PromptKV(LeasedKv):
    """Prompt KV: keys and values [kv_heads, tokens, head_dim] of every layer, with checksums.

    With the transport `shm` the bytes are the server's own memory: they are valid until the lease
    expires or `release` is called; `renew` extends it. As a context manager, it releases the handle
    at exit.
    """

    def __init__(
        self,
        handle: KvHandle,
        source: KvSource,
        layout: Layout,
        download_buffer: DownloadBuffer,
        transport: str,
    ) -> None:
        super().__init__(handle, source)
        self.layout = layout
        self.transport = transport
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
        """Fetches the prompt KV of a handle; returns None if the caller must recompute the prompt.

        `source.counts` counts the reasons. Over HTTP the data is read into `buffer`, any writable
        memory of at least `handle.num_bytes` bytes (for example a pinned tensor), or into new
        memory. NIXL always uses new memory, because an abandoned read may still write to it. With
        wait=False it returns after the header: accessing a layer waits for it, and raises KvLost if
        it cannot arrive any more.
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
        """Maps the KV from shared memory, and renews the lease before the bytes are used.

        Only the server can check the API key and the lease.
        """
        began = time.monotonic()
        memory = source.shared_memory.get_file(handle, at)
        if memory is None:
            return None
        source.renew(handle.handle, handle.lease_seconds or 1.0)
        layout = read_layout(memory, handle)
        source.fetched("shm", handle.num_bytes, began)
        return cls(handle, source, layout, DownloadBuffer(memory, handle.num_bytes), "shm")

    @classmethod
    def _from_nixl(cls, handle: KvHandle, at: KvLocator, source: KvSource) -> "PromptKV | None":
        """Reads the KV by NIXL and verifies it; returns None to try the next transport."""
        began = time.monotonic()
        lease = source.renew(handle.handle, handle.lease_seconds or 1.0)
        try:
            memory = source.nixl_reader.get_file(
                handle, at, began + source.endpoint.timeout_seconds(lease)
            )
            if memory is None:
                return None
            layout = read_layout(memory, handle)
            found = cls(handle, source, layout, DownloadBuffer(memory, handle.num_bytes), "nixl")
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
        """Starts the HTTP download of the KV, which continues on a thread after the header."""
        began = time.monotonic()
        memory = _destination(buffer, handle.num_bytes)
        path = at.url or f"/v1/kv/{handle.handle}/data"
        download = Download(source.endpoint, path, handle.num_bytes)
        try:
            download.readinto(memory[:LENGTH_BYTES])
            start = header_bytes(bytes(memory[:LENGTH_BYTES]), handle)
            download.readinto(memory[LENGTH_BYTES:start])
            layout = layout_of(bytes(memory[:start]), handle)
        except BaseException:
            download.close()
            raise
        found = cls(handle, source, layout, DownloadBuffer(memory, start), "http")
        threading.Thread(
            target=found._download_tensors, args=(download, began), name="coppice-kv", daemon=True
        ).start()
        return found

    def wait(self) -> None:
        """Waits until the KV of every layer has arrived, and verifies the checksums."""
        for part in self.layout.parts:
            self._download_buffer.wait_for_part(part)

    def layer(self, index: int) -> tuple[memoryview, memoryview]:
        """Bytes of a layer's keys and values; the call waits until they have arrived."""
        keys, values = self.layout.layer(index)
        buffer = self._download_buffer
        return buffer.wait_for_part(keys), buffer.wait_for_part(values)

    def numpy(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Numpy arrays of a layer's keys and values; bfloat16 values are given as uint16 bits."""
        keys, values = self.layer(index)
        return self._array(keys, index), self._array(values, index)

    def torch_layers(self) -> Iterator[tuple[Any, Any]]:
        """Yields each layer's keys and values as they arrive, as torch tensors without a copy."""
        for index in range(self.layout.num_layers):
            keys, values = self.layer(index)
            yield self._tensor(keys, index), self._tensor(values, index)

    def tensors(self) -> dict[str, Any]:
        """Torch tensors named k.0, v.0 and so on, for coppice.train.PromptKV.of_named; no copy."""
        named: dict[str, Any] = {}
        for index, (keys, values) in enumerate(self.torch_layers()):
            named |= {f"k.{index}": keys, f"v.{index}": values}
        return named

    def renew(self, lease_seconds: float = 60.0) -> float:
        """Renews the KV's lease; returns the seconds left. Raises KvUnavailable if it expired."""
        return self._source.renew(self.handle.handle, lease_seconds)

    def _download_tensors(self, download: Download, began: float) -> None:
        buffer = self._download_buffer
        try:
            self._read_to_end(download)
            self._source.fetched("http", self.handle.num_bytes, began)
        except CoppiceError as error:
            buffer.on_error(error)
        except Exception as error:  # any failure must wake up the waiting threads
            buffer.on_error(KvLost(f"prompt KV: {error!r}"))
        finally:
            download.close()

    def _read_to_end(self, download: Download) -> None:
        """Downloads all tensors, renewing the lease meanwhile so that the server keeps sending."""
        buffer, lease_seconds = self._download_buffer, self.handle.lease_seconds or 1.0
        renewed_at = -math.inf
        for end in _progress_offsets(self.layout):
            if time.monotonic() - renewed_at > lease_seconds / 2:
                renewed_at = time.monotonic()
                with suppress(ConnectionFailed, TimedOut):  # the download itself retries
                    self._source.renew(self.handle.handle, lease_seconds)
            download.readinto(buffer.bytes[buffer.num_received : end])
            buffer.on_progress(end)

    def _array(self, data: memoryview, index: int) -> NDArray[Any]:
        dtype = _NUMPY.get(self.layout.dtype, np.uint16)
        return np.frombuffer(data, dtype).reshape(self.layout.layer(index)[0].shape)

    def _tensor(self, data: memoryview, index: int) -> Any:
        torch = import_module("torch")
        with warnings.catch_warnings():
            # Mapped memory is read-only; a write to it would be a segmentation fault, as intended.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(data, dtype=getattr(torch, self.layout.dtype))
        return flat.view(self.layout.layer(index)[0].shape)


def _progress_offsets(layout: Layout) -> Iterator[int]:
    """File offsets at which a download reports progress: tensor ends, and every PIECE_BYTES."""
    for part in layout.parts:
        yield from range(part.start + PIECE_BYTES, part.end, PIECE_BYTES)
        yield part.end


def _destination(buffer: Any, num_bytes: int) -> memoryview:
    given: Any = np.empty(num_bytes, np.uint8) if buffer is None else buffer
    memory = memoryview(given).cast("B")
    if memory.readonly or len(memory) < num_bytes:
        raise ValueError(f"the buffer must be writable and have {num_bytes} bytes")
    return memory[:num_bytes]
