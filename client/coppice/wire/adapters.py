"""Wire types of LoRA adapters, which are loaded or uploaded and then used by rollouts."""

from typing import Annotated

from pydantic import Field

from coppice.wire.base import AnswerModel, Label, RequestModel


class LoadAdapterRequest(RequestModel):
    """An adapter in PEFT format, in one of the server's configured directories.

    Without a version the next unused one is assigned.
    """

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    version: Label | None = None


class AdapterAnswer(AnswerModel):
    """One version of an adapter.

    New rollouts use the `current` version; other versions remain loaded for the rollouts that
    started with them.
    """

    name: str
    version: str
    current: bool
    rank: int
    num_bytes: int
    rollouts_running: int


class AdaptersAnswer(AnswerModel):
    """All loaded adapter versions, and the limits."""

    adapters: list[AdapterAnswer]
    max_adapters: int
    max_rank: int
