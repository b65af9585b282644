"""Source of the KV of a group's prompt: base class that leaves the prefill to the samples."""

from collections.abc import Sequence
from typing import Protocol

from coppice.wire.rollouts import GroupAnswer
from engine.protocol.generation import Generation
from engine.types.kv import ExportSlot, KvLoad
from engine.types.samples import Completion, SampleRequest


class GroupMonitor(Protocol):
    """Interface of a group for its prompt source: registers requests, signals the group's end.

    The source registers its own engine requests here, so that the group can abort them.
    """

    @property
    def ends(self) -> bool:
        """True once the group is ending; requests submitted from then on must be aborted."""

    async def wait_for_end(self) -> None:
        """Wait until the group is ending."""

    def on_submitted(self, request_id: str) -> None: ...

    def on_finished(self, request_id: str) -> None: ...

    async def abort_requests(self, engine: Generation) -> None:
        """Abort all requests that were submitted and have not finished."""


class PromptSource:
    """Source of the KV of a group's prompt; this one leaves the prefill to the samples.

    `prefills` are additional engine requests, submitted together with the samples. The first
    sample's request carries the export slot `export`.
    """

    prefills: Sequence[SampleRequest] = ()
    export: ExportSlot | None = None

    async def prepare(self, engine: Generation, monitor: GroupMonitor) -> KvLoad | None:
        """Prepare the prompt KV; returns what the samples load, or None if they prefill.

        If this is cancelled, its requests remain in the engine; they are registered in `monitor`.
        """
        return None

    async def on_completed(self, request: SampleRequest, done: Completion) -> None:
        """Record that a prefill request has completed; called in the order of `prefills`."""

    def annotated(self, answer: GroupAnswer) -> GroupAnswer:
        """Group answer to which the report about the prompt's KV is added."""
        return answer

    def release(self, *, settled: bool) -> None:
        """Release the KV that the samples load, even if `prepare` did not complete.

        `settled` is True if every request that was to load KV has ended by itself.
        """
