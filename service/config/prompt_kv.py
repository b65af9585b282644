"""Settings section `kv`: export of prompt KV, and the cache of KV shared between prompts."""

from pathlib import Path

from pydantic import Field

from engine.settings.base import BufferBytes, Bytes, PositiveInt, Seconds, Section


class KvSettings(Section):
    """Memory, lease and download settings of prompt KV, which `engine.prompt_kv` enables."""

    directory: Path = Field(
        Path("/dev/shm"),
        description="shared-memory mount for the prompt KV arena; change it if /dev/shm is too "
        "small",
    )
    capacity_bytes: BufferBytes | None = Field(
        None,
        description="maximum size of the prompt KV arena, in bytes, and at most half of the free "
        "space of kv.directory; memory is taken when prompts are exported; none: that half, but "
        "at most 8 GiB; increase it for long prompts or long leases",
    )
    spans_bytes: Bytes | None = Field(
        None,
        description="maximum size of the cache for the KV of prompt spans and observations, in "
        "bytes, and at most half of the free space of kv.directory; the KV reuse modes splice and "
        "predict need it; none: a quarter of that space, but at most 4 GiB; 0: these modes "
        "prefill all prompts; increase it for many or long spans",
    )
    max_lease_seconds: Seconds = Field(
        60.0,
        description="maximum lease of a handle, in seconds, counted from the rollout's end or from "
        "a renewal; renewals end after 60 times this; increase it if a training step takes longer",
    )
    max_open_transfers: PositiveInt = Field(
        256,
        description="maximum number of open downloads, of which one API key may "
        "have half; more are refused; increase it for trainers with many processes",
    )
    nixl: bool = Field(
        False,
        description="enables one-sided reads over NIXL; requires the extra nixl; enable it if "
        "trainers read over RDMA",
    )
