"""Reader that copies prompt KV from the server's GPU memory to the trainer's GPU by CUDA IPC.

A process on the server's host opens that memory by CUDA IPC. The server neither sees such a read
nor waits for it. So the lease is renewed first, and a copy that ends after the lease is discarded.
There is no checksum.
"""

import base64
import binascii
import threading
import time
from importlib import import_module
from typing import Any

from coppice.errors import BadAnswer, CoppiceError, KvLost
from coppice.prompt_kv.boot_id import read_boot_id
from coppice.prompt_kv.server_kv_source import KvSource, LeasedKv
from coppice.wire.prompt_kv import KvGpu, KvGpuMemory, KvHandle, KvLayout, KvLocator

TRANSPORT = "cuda_ipc"


class GpuKvReader:
    """Reader of the GPU memory of one server; thread-safe.

    Opened memory is kept, so that only the first read of a server is slow.
    """

    def __init__(self, source: KvSource) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._server: KvGpu | None = None
        self._opened: dict[str, Any] = {}

    def fetch(self, handle: KvHandle | None, *, device: Any = "cuda") -> "GpuPromptKV | None":
        """Copies the prompt KV of a handle to a GPU of this process.

        Returns None if the KV is not in GPU memory or cannot be read from there: then use
        `PromptKV.fetch`. The counts of the source have the reasons.
        """
        locators = () if handle is None else handle.locators
        at = next((at for at in locators if at.transport == TRANSPORT), None)
        if handle is None or at is None:
            return None
        try:
            return self._fetch(handle, at, device)
        except Exception as error:  # of CUDA and HTTP, which have no common base class
            self._source.count(f"{TRANSPORT}_failed")
            if isinstance(error, CoppiceError):
                self._source.count_failure(error)
        return None

    def _fetch(self, handle: KvHandle, at: KvLocator, device: Any) -> "GpuPromptKV":
        began = time.monotonic()
        lease = self._source.renew(handle.handle, handle.lease_seconds or 1.0)
        until = began + self._source.endpoint.timeout_seconds(lease)
        layout, server = self._source.layout(handle.handle), self._server_of(handle, at)
        if layout.version != handle.version:
            raise BadAnswer(f"the KV has version {layout.version}, not {handle.version}")
        out = empty_kv(layout, device)
        assert at.offset is not None, "checked with the server's memory"
        for rank in server.ranks:
            self._read(rank, server.agent, at.offset, out)
        import_module("torch").cuda.synchronize(out.device)
        if time.monotonic() > until:
            raise KvLost("the lease ended before the copy")
        self._source.fetched(TRANSPORT, handle.num_bytes, began)
        return GpuPromptKV(handle, self._source, layout, out)

    def _server_of(self, handle: KvHandle, at: KvLocator) -> KvGpu:
        """The server's GPU memory, requested once until the server restarts."""
        with self._lock:
            if self._server is None or self._server.agent != at.agent:
                boot_id = read_boot_id()
                query = "" if boot_id is None else f"?boot_id={boot_id}"
                path = f"/v1/kv/{handle.handle}/gpu{query}"
                self._server = self._source.endpoint.request("GET", path).read(KvGpu)
                self._opened.clear()
            if self._server.agent != at.agent or at.offset is None:
                raise BadAnswer("the server's GPU memory is not that of the locator")
            return self._server

    def _read(self, rank: KvGpuMemory, server: str, offset: int, out: Any) -> None:
        """Copy a rank's heads from memory that is opened by CUDA IPC."""
        with self._lock:
            key = f"{server}/{rank.gpu}/{rank.first_head}"
            if key not in self._opened:
                self._opened[key] = open_ipc(rank)
            memory = self._opened[key]
        heads = heads_of(out, rank)
        heads.copy_(typed(part_of(memory, offset, heads.nbytes), heads), non_blocking=True)


class GpuPromptKV(LeasedKv):
    """Prompt KV on a GPU: keys and values [kv_heads, tokens, head_dim] of every layer.

    It is a copy, so it stays valid after the lease. As a context manager, it releases the handle at
    exit.
    """

    def __init__(self, handle: KvHandle, source: KvSource, layout: KvLayout, kv: Any) -> None:
        super().__init__(handle, source)
        self.layout = layout
        self._kv = kv

    def tensors(self) -> dict[str, Any]:
        """Torch tensors named k.0, v.0 and so on, for coppice.train.PromptKV.of_named; no copy."""
        named: dict[str, Any] = {}
        for index, (keys, values) in enumerate(self._kv):
            named |= {f"k.{index}": keys, f"v.{index}": values}
        return named


def empty_kv(layout: KvLayout, device: Any) -> Any:
    torch = import_module("torch")
    shape = (
        layout.num_layers,
        2,
        layout.num_kv_heads,
        layout.num_tokens,
        layout.head_dim,
    )
    return torch.empty(shape, dtype=getattr(torch, layout.dtype), device=device)


def heads_of(kv: Any, rank: KvGpuMemory) -> Any:
    """View of a rank's heads. Raises BadAnswer if the model has no such heads."""
    end = rank.first_head + rank.num_heads
    if not 0 <= rank.first_head < end <= kv.shape[2]:
        raise BadAnswer(f"the server's memory has the heads {rank.first_head} to {end}")
    return kv[:, :, rank.first_head : end]


def part_of(memory: Any, offset: int, num_bytes: int) -> Any:
    """Bytes of opened memory. Raises BadAnswer if they are outside of it."""
    if offset < 0 or offset + num_bytes > len(memory):
        raise BadAnswer("the KV is outside the server's GPU memory")
    return memory[offset : offset + num_bytes]


def typed(data: Any, like: Any) -> Any:
    """Bytes as a tensor with the dtype and shape of another one."""
    return data.view(like.dtype).view(like.shape)


def open_ipc(rank: KvGpuMemory) -> Any:
    """GPU memory of another process as a tensor of bytes, opened by PyTorch.

    It is opened on this process's device with the same UUID, which need not have the same index.
    """
    torch = import_module("torch")
    ipc, size = rank.ipc, (rank.ipc.num_bytes,)
    reductions: Any = import_module("torch.multiprocessing.reductions")
    try:
        handle, counter, event = (
            base64.b64decode(text, validate=True)
            for text in (ipc.handle, ipc.ref_counter, ipc.event)
        )
    except binascii.Error as error:
        raise BadAnswer("the CUDA IPC handle is not base64") from error
    return reductions.rebuild_cuda_tensor(
        *(torch.Tensor, size, (1,), 0, torch.storage.TypedStorage, torch.uint8),
        *(index_of_gpu(rank.gpu), handle, ipc.num_bytes, ipc.offset, False),
        *(counter, ipc.ref_counter_offset, event, ipc.event_sync_required),
    )


def index_of_gpu(uuid: str) -> int:
    """Index of a GPU in this process. Raises KvLost if it is not visible here."""
    cuda = import_module("torch").cuda
    for index in range(cuda.device_count()):
        if str(cuda.get_device_properties(index).uuid) == uuid:
            return index
    raise KvLost(f"the GPU {uuid} is not visible to this process")
