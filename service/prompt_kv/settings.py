"""Settings section `kv`: exported prompt KV, and the cache of the KV of prompt spans."""

from pathlib import Path

from pydantic import Field

from engine.settings_base import BufferBytes, Bytes, PositiveInt, Seconds, SecondsOrZero, Section


class KvSettings(Section):
    """Memory, lease and download settings of prompt KV, which `engine.prompt_kv` enables."""

    directory: Path = Field(
        Path("/dev/shm"), description="shared-memory mount for the prompt KV arena"
    )
    capacity_bytes: BufferBytes = Field(
        256 * 2**20,
        description="size of the prompt KV arena, in bytes; at most half of the free space of "
        "kv.directory",
    )
    spans_bytes: Bytes = Field(
        0,
        description="size of the cache for the KV of prompt spans and observed prompts, in bytes, "
        "used by kv_reuse.mode splice and predict; at most half of the free space of "
        "kv.directory; 0: all prompts are prefilled",
    )
    max_lease_seconds: Seconds = Field(
        60.0, description="maximum lease of a handle when granted or renewed, in seconds"
    )
    max_lifetime_seconds: Seconds = Field(
        3600.0, description="time after which a lease cannot be renewed again, in seconds"
    )
    grace_seconds: SecondsOrZero = Field(
        5.0,
        description="time that KV is kept after its lease has expired, in seconds, for readers "
        "that map the memory directly",
    )
    max_transfers: PositiveInt = Field(
        4, description="maximum number of downloads sent concurrently; others wait for a turn"
    )
    max_open_transfers: PositiveInt = Field(
        256,
        description="maximum number of open downloads, including those of slow readers; one API "
        "key may hold half of them; more are refused",
    )
    min_bytes_per_second: float = Field(
        2**18,
        gt=0,
        description="minimum rate of a reader, in bytes per second; a slower download is closed, "
        "and can be resumed with a Range header",
    )
    slow_reader_seconds: Seconds = Field(
        10.0,
        description="time over which kv.min_bytes_per_second is measured, in seconds",
    )
    nixl: bool = Field(
        False, description="enables one-sided reads over NIXL; requires the extra nixl"
    )
    max_bytes_per_second: float | None = Field(
        None,
        gt=0,
        description="maximum rate of all downloads together, in bytes per second; none: no limit",
    )
