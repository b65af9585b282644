"""GPU memory with exported KV: its description for callers that open it by CUDA IPC.

A process on the same host opens it by CUDA IPC. Such a process can read the KV of all API keys in
that memory, so it is described only to callers that hold a handle, and only if they name the boot
id of this host. That id is no secret: it keeps apart hosts, not callers.
"""

from collections.abc import Sequence

from coppice.wire.prompt_kv import KvGpu, KvGpuIpc, KvGpuMemory, KvLocator
from engine.types.kv import GpuMemory
from service.kv.handles.file_layout import Layout
from service.kv.store import Entry


class GpuKv:
    """Description of the ranks' GPU memory. `agent` is a random name of this server's memory."""

    def __init__(self, ranks: Sequence[GpuMemory], agent: str, *, boot_id: str | None) -> None:
        self._ranks = ranks
        self._agent = agent
        self._boot_id = boot_id

    @property
    def capacity_bytes(self) -> int:
        """Bytes that every rank has; offsets are the same on all ranks."""
        return min((rank.num_bytes for rank in self._ranks), default=0)

    def rank_bytes(self, layout: Layout) -> int:
        """Bytes of a prompt's KV on the rank with most heads; 0 without GPU memory."""
        num_heads = max((rank.num_heads for rank in self._ranks), default=0)
        return layout.data_bytes // layout.format.num_kv_heads * num_heads

    def locators(self, entry: Entry) -> list[KvLocator]:
        if entry.gpu_extent is None:
            return []
        start = entry.gpu_extent.start
        return [KvLocator(transport="cuda_ipc", agent=self._agent, offset=start)]

    def describe(self, boot_id: str | None) -> KvGpu | None:
        """GPU memory for a caller on the host `boot_id`; None if it cannot read it."""
        if not self._ranks or boot_id is None or boot_id != self._boot_id:
            return None
        return KvGpu(agent=self._agent, ranks=[_describe(rank) for rank in self._ranks])


def _describe(rank: GpuMemory) -> KvGpuMemory:
    return KvGpuMemory(
        gpu=rank.gpu,
        num_bytes=rank.num_bytes,
        first_head=rank.first_head,
        num_heads=rank.num_heads,
        ipc=KvGpuIpc.model_validate(rank.ipc, from_attributes=True),
    )
