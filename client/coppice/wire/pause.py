"""Requests and answers of POST /v1/pause, /v1/resume, /v1/sleep and /v1/wake."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from coppice.wire.base import AnswerModel, RequestModel

DEFAULT_PAUSE_LEASE_SECONDS = 120.0
DEFAULT_SLEEP_LEASE_SECONDS = 2.0**31 - 1
"""Lease that the server shortens to its maximum: a wake while a trainer uses the memory fails."""

PauseMode = Literal["abort", "wait", "keep"]
SleepLevel = Literal[1, 2]
SleepTag = Literal["kv_cache", "weights"]
SleepTags = Annotated[list[SleepTag], Field(min_length=1, max_length=2)]
PauseLease = Annotated[float, Field(gt=0, lt=2**31, allow_inf_nan=False)]


class PauseRequest(RequestModel):
    """Body of POST /v1/pause: running samples end (abort), finish (wait) or freeze (keep).

    The pause ends after `lease_seconds` unless it is repeated; None: only by a resume.
    """

    mode: PauseMode = "keep"
    lease_seconds: PauseLease | None = DEFAULT_PAUSE_LEASE_SECONDS


class ResumeRequest(RequestModel):
    """Body of POST /v1/resume; `all` also ends the pauses of other API keys."""

    all: bool = False


class PauseAnswer(AnswerModel):
    """Answer of POST /v1/pause and /v1/resume: the new state of sampling.

    `paused` is true while any API key pauses. `lease_seconds` is the time until the last pause ends
    by itself; None if sampling is not paused or a pause has no lease.
    """

    paused: bool
    lease_seconds: float | None = None


class SleepRequest(RequestModel):
    """Body of POST /v1/sleep: the memory to release, and the handling of running samples.

    Level 1 keeps the weights in host memory, level 2 drops them. The lease is that of a pause, but
    by default the longest that the server allows.
    """

    level: SleepLevel = 1
    tags: SleepTags = ["kv_cache", "weights"]
    mode: PauseMode = "keep"
    lease_seconds: PauseLease | None = DEFAULT_SLEEP_LEASE_SECONDS

    @field_validator("tags")
    @classmethod
    def _require_kv_cache(cls, tags: list[SleepTag]) -> list[SleepTag]:
        if "kv_cache" not in tags:
            raise ValueError("must include kv_cache, whose content depends on the weights")
        return tags


class WakeRequest(RequestModel):
    """Body of POST /v1/wake: the memory to allocate; `all`: also for a sleep of another API key."""

    tags: SleepTags = ["kv_cache", "weights"]
    all: bool = False


class SleepAnswer(AnswerModel):
    """Answer of POST /v1/sleep and /v1/wake: the new state of the engine.

    `level` is 0 if nothing is released. `paused` and `lease_seconds` are those of PauseAnswer.
    """

    level: Literal[0, 1, 2]
    sleeping_tags: list[SleepTag]
    paused: bool
    lease_seconds: float | None = None
