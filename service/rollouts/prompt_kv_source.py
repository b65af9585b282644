"""Source of a group's prompt KV: prefilled by the samples themselves, or prepared before them."""

from collections.abc import Sequence
from typing import Protocol

from coppice.wire.rollouts import GroupAnswer
from engine.kv_types import ExportSlot, KvLoad
from engine.protocol import Engine
from engine.types import Completion, SampleRequest


class GroupMonitor(Protocol):
    """Group as seen by its prompt source: tracks the source's engine requests, signals its end."""

    @property
    def ends(self) -> bool:
        """True once the group is ending; requests submitted from then on must be aborted."""

    async def wait_for_end(self) -> None:
        """Wait until the group is ending."""

    def on_submitted(self, request_id: str) -> None: ...

    def on_finished(self, request_id: str) -> None: ...

    async def abort_requests(self, engine: Engine) -> None:
        """Abort all requests that were submitted and have not finished."""


class PromptSource(Protocol):
    """Prompt of one group: what its samples load, and what runs in the engine beside them.

    `prefills` are submitted with the samples, the first of which carries `export`.
    """

    @property
    def prefills(self) -> Sequence[SampleRequest]: ...

    @property
    def export(self) -> ExportSlot | None: ...

    async def prepare(self, engine: Engine, monitor: GroupMonitor) -> KvLoad | None:
        """KV that the samples load; None if they prefill the prompt.

        If cancelled, its requests remain in the engine; the monitor knows them.
        """

    async def on_completed(self, request: SampleRequest, done: Completion) -> None:
        """Record the end of a prefill; called in the order of `prefills`."""

    def annotated(self, answer: GroupAnswer) -> GroupAnswer:
        """The group's answer with the report of its prompt."""

    def release(self, *, settled: bool) -> None:
        """Release what the samples load, even if the preparation did not complete.

        `settled`: every request that was to load has ended by itself.
        """


class PrefilledPrompt:
    """Prompt that the samples prefill; nothing to prepare, to report or to release."""

    prefills: Sequence[SampleRequest] = ()
    export: ExportSlot | None = None

    async def prepare(self, engine: Engine, monitor: GroupMonitor) -> KvLoad | None:
        return None

    async def on_completed(self, request: SampleRequest, done: Completion) -> None:
        raise AssertionError("there are no prefills")

    def annotated(self, answer: GroupAnswer) -> GroupAnswer:
        return answer

    def release(self, *, settled: bool) -> None:
        pass
