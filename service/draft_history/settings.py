"""Settings of the draft history that replicas share: whether it is shared, and its limits."""

from typing import Annotated

from pydantic import Field

from engine.settings_base import Seconds, Section
from service.draft_history.entries import MAX_ENTRY_BYTES

Rate = Annotated[int, Field(ge=MAX_ENTRY_BYTES)]


class DraftHistorySettings(Section):
    """Draft history that replicas share through Redis."""

    enabled: bool = Field(
        False,
        description="shares finished samples with the other replicas of the cluster, as token ids "
        "in Redis, so that each replica drafts from the samples of all; samples with a cache salt "
        "and calls of agent sessions are never shared; enable it if several replicas with "
        "speculation.mode siblings or auto sample the same prompts",
    )
    interval_seconds: Seconds = Field(
        1.0,
        description="interval between two exchanges with Redis, in seconds; reduce it if samples "
        "of one prompt run on several replicas at nearly the same time",
    )
    write_bytes_per_second: Rate = Field(
        2**18,
        description="maximum rate at which this replica writes samples to Redis, in bytes per "
        "second, 4 bytes per token; samples beyond it are dropped; increase it if "
        "coppice_draft_history_dropped_total with the reason overflow increases",
    )
    read_bytes_per_second: Rate = Field(
        2**20,
        description="maximum rate at which this replica reads samples from Redis, in bytes per "
        "second; increase it with the number of replicas",
    )
    stream_bytes: int = Field(
        2**28,
        ge=16 * MAX_ENTRY_BYTES,
        description="maximum size of the samples of one model in Redis, in bytes; increase it "
        "so that a new replica finds more samples",
    )
    max_age_seconds: Seconds = Field(
        3600.0,
        description="time for which samples are kept in Redis, in seconds; increase it if an "
        "epoch takes longer",
    )
