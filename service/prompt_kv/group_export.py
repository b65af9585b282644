"""One group's exports: of its prompt, and of the paths of its tree that are gone on with."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from coppice.wire.kv import KvHandle, KvReason
from engine.kv_types import ExportSlot
from service.prompt_kv.export_request import ExportRequest
from service.prompt_kv.prompt_kv import PromptKvManager


class KvState(NamedTuple):
    """What an answer says; the names are the wire's."""

    kv: KvHandle | None
    kv_reason: KvReason | None


NOT_CONTINUED = KvState(None, "not_continued")
OnExport = Callable[[str | None, KvState], None]


class GroupKvExports:
    """None names the prompt's, a segment's id that of the path which ends with it.

    Made inside the task group that waits for them. `on_export` hears of each when it has ended.
    """

    def __init__(
        self,
        prompt_kv: PromptKvManager,
        owner: str,
        lease_seconds: float,
        *,
        tasks: asyncio.TaskGroup,
        on_export: OnExport,
    ) -> None:
        self._prompt_kv = prompt_kv
        self._owner = owner
        self._lease_seconds = lease_seconds
        self._tasks = tasks
        self._on_export = on_export
        self._exports: dict[str | None, ExportRequest] = {}
        self._dropped: set[str] = set()

    def begin(self, token_ids: Sequence[int], segment: str | None = None) -> ExportSlot | None:
        """The place that the request of these tokens is to carry, if it is the one that writes."""
        assert segment not in self._exports, "a path is exported once"
        export = self._prompt_kv.begin(self._owner, token_ids, self._lease_seconds)
        self._exports[segment] = export
        self._tasks.create_task(self._report_when_done(segment, export))
        return export.export_slot

    @property
    def prompt_slot(self) -> ExportSlot | None:
        return self._exports[None].export_slot

    def on_writer_ended(self, segment: str | None) -> None:
        """The request has left the engine: what it has not written it never will."""
        export = self._exports.get(segment)
        if export is not None and export.export_slot is not None and not export.ended.is_set():
            self._tasks.create_task(self._prompt_kv.finish(export))

    def drop(self, segments: Iterable[str]) -> None:
        """Nobody will read their paths. A writer may still be on its way into the engine, so what
        has not ended is dropped when it has."""
        for segment in segments:
            self._dropped.add(segment)
            export = self._exports.get(segment)
            if export is not None:
                self._prompt_kv.drop(export)

    async def finish(self) -> None:
        """All requests have left the engine. Writers first: others may wait for what they wrote."""
        for writes in (True, False):
            exports = [e for e in self._exports.values() if (e.export_slot is not None) is writes]
            pending = [export for export in exports if not export.ended.is_set()]
            await asyncio.gather(*map(self._prompt_kv.finish, pending))

    def abandon(self) -> None:
        """The group broke off."""
        for export in self._exports.values():
            self._prompt_kv.abandon(export)

    def start_leases(self) -> None:
        """The rollout has ended: from now on its caller can know of them."""
        self._prompt_kv.start_leases(self._exports.values())

    def state(self, segment: str | None) -> KvState:
        """Of what has ended."""
        export = self._exports.get(segment)
        if export is None:
            return NOT_CONTINUED
        handle = None if export.handle is None else self._prompt_kv.answer(export.handle)
        return KvState(handle, export.reason)

    async def _report_when_done(self, segment: str | None, export: ExportRequest) -> None:
        await export.ended.wait()
        if segment in self._dropped:
            self._prompt_kv.drop(export)
        else:
            self._on_export(segment, self.state(segment))
