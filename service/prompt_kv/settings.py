"""Settings section `kv`."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class KvSettings(BaseModel):
    """Location, lease and bandwidth settings of prompt KV, which `engine.prompt_kv` enables."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    directory: Annotated[Path, Field(description="shared-memory mount that prompt KV lies in")] = (
        Path("/dev/shm")
    )
    capacity_bytes: Annotated[
        int,
        Field(ge=2**20, description="bytes that prompt KV takes; at most half of the mount's rest"),
    ] = 256 * 2**20
    segments_bytes: Annotated[
        int,
        Field(
            ge=0,
            description="bytes of the mount that prompts' segments and anchors take, for "
            "reuse.mode recompute and anchors, at most half of its rest; 0: none, prompts are "
            "computed",
        ),
    ] = 0
    max_lease_seconds: Annotated[
        float, Field(gt=0, description="seconds that a lease is granted or renewed for at most")
    ] = 60.0
    max_lifetime_seconds: Annotated[
        float, Field(gt=0, description="seconds after which a lease cannot be renewed any more")
    ] = 3600.0
    grace_seconds: Annotated[
        float,
        Field(ge=0, description="seconds that bytes are left alone after a lease has run out"),
    ] = 5.0
    max_transfers: Annotated[
        int,
        Field(ge=1, description="downloads that are sent at a time; others wait for short turns"),
    ] = 4
    max_open_transfers: Annotated[
        int,
        Field(
            ge=1,
            description="downloads that are open at a time, those of slow readers included; one "
            "key may have half of them; more are refused",
        ),
    ] = 256
    min_bytes_per_second: Annotated[
        float,
        Field(
            gt=0,
            description="least bytes a second that a reader takes while it is waited for; a slower "
            "one is cut off, and can continue with a range",
        ),
    ] = 2**18
    slow_reader_seconds: Annotated[
        float,
        Field(gt=0, description="seconds of waiting over which kv.min_bytes_per_second counts"),
    ] = 10.0
    nixl: Annotated[
        bool, Field(description="one-sided reads over NIXL are offered; needs the extra nixl")
    ] = False
    max_bytes_per_second: Annotated[
        float | None,
        Field(gt=0, description="most bytes a second of all downloads together; none: no bound"),
    ] = None
