"""LoRA adapters: loaded by a path or uploaded, then named by rollouts."""

from typing import Annotated

from pydantic import Field

from coppice.wire.base import AnswerModel, Label, RequestModel


class LoadAdapterRequest(RequestModel):
    """An adapter as PEFT saves it, in one of the server's configured directories.

    Without a version it gets the next one that nobody has named.
    """

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    version: Label | None = None


class AdapterAnswer(AnswerModel):
    """One version of an adapter. `current`: new rollouts get it; another is only there for the
    rollouts that run under it."""

    name: str
    version: str
    current: bool
    rank: int
    num_bytes: int
    rollouts_running: int


class AdaptersAnswer(AnswerModel):
    """Every adapter version that is loaded, and how many may be."""

    adapters: list[AdapterAnswer]
    max_adapters: int
    max_rank: int
