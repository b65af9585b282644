"""KV exports of one group: of its prompt and, in a rollout tree, of paths that continue.

A group's export ends with a handle, whose lease starts once the rollout has ended:
`GroupKvExports` -> `Export` -> `Handle`, which reads an entry of the store.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from coppice.wire.prompt_kv import KvHandle, KvReason
from coppice.wire.rollouts import GroupAnswer
from engine.types.kv import ExportSlot
from service.kv.handles.exports import Export
from service.kv.handles.manager import PromptKvManager


class KvState(NamedTuple):
    """KV fields of a prompt or segment in a response: a handle, or the reason why there is none."""

    kv: KvHandle | None
    kv_reason: KvReason | None


NOT_CONTINUED = KvState(None, "not_continued")
OnExport = Callable[[str | None, KvState], None]


@asynccontextmanager
async def exporting_group(
    prompt_kv: PromptKvManager,
    owner: str,
    lease_seconds: float | None,
    token_ids: Sequence[int],
    on_export: OnExport,
) -> AsyncIterator["GroupKvExports | None"]:
    """Context manager that begins a group's prompt-KV exports and finishes them on exit.

    Enter it before the first engine request of the group, exit it after the last. Exports that the
    engine has not written by then end without a handle. If `lease_seconds` is None, there are no
    exports.
    """
    if lease_seconds is None:
        yield None
        return
    async with asyncio.TaskGroup() as tasks:
        exports = GroupKvExports(prompt_kv, owner, lease_seconds, tasks=tasks, on_export=on_export)
        exports.begin(token_ids)
        try:
            yield exports
            await exports.finish()
        except BaseException:
            exports.abandon()
            raise


class GroupKvExports:
    """Prompt-KV exports of one group, by segment id.

    The key None is the prompt; a segment id stands for the path that ends with that segment. Create
    it inside the task group `tasks`, which waits for the exports. `on_export` is called with each
    export that has ended, unless it was dropped.
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
        self._exports: dict[str | None, Export] = {}
        self._dropped: set[str] = set()

    def begin(self, token_ids: Sequence[int], segment: str | None = None) -> ExportSlot | None:
        """Start an export; returns the slot that the engine request must write, or None.

        `token_ids` are the tokens of the path, `segment` is its last segment.
        """
        assert segment not in self._exports, "a path is exported once"
        export = self._prompt_kv.begin(self._owner, token_ids, self._lease_seconds)
        self._exports[segment] = export
        self._tasks.create_task(self._report_when_ended(segment, export))
        return export.slot

    @property
    def prompt_slot(self) -> ExportSlot | None:
        return self._exports[None].slot

    def on_writer_ended(self, segment: str | None) -> None:
        """Finish an export after the request that writes it has left the engine."""
        export = self._exports.get(segment)
        if export is not None and export.is_writer and not export.ended.is_set():
            self._tasks.create_task(self._prompt_kv.exports.finish(export))

    def drop(self, segments: Iterable[str]) -> None:
        """Release the KV handles of tree paths that were dropped, so nobody will read them.

        The writing request may not have reached the engine yet, so the handle of an export that has
        not ended is released once it ends.
        """
        for segment in segments:
            self._dropped.add(segment)
            export = self._exports.get(segment)
            if export is not None:
                self._release(export)

    async def finish(self) -> None:
        """Finish all exports of the group, after all its requests have left the engine.

        Exports that write are finished first, because other exports may share their entries.
        """
        for writes in (True, False):
            exports = [e for e in self._exports.values() if e.is_writer is writes]
            pending = [export for export in exports if not export.ended.is_set()]
            await asyncio.gather(*map(self._prompt_kv.exports.finish, pending))

    def abandon(self) -> None:
        """End all exports of the group early, because the group was aborted."""
        for export in self._exports.values():
            self._prompt_kv.exports.abandon(export)

    def start_leases(self) -> None:
        """Start the leases of all handles, once the rollout has ended and its caller gets them."""
        for export in self._exports.values():
            if export.handle is not None:
                export.handle.start_lease()

    def state(self, segment: str | None) -> KvState:
        """KV fields of the prompt or a segment after its export; `NOT_CONTINUED` without export."""
        export = self._exports.get(segment)
        if export is None:
            return NOT_CONTINUED
        handle = None if export.handle is None else self._prompt_kv.answer(export.handle)
        return KvState(handle, export.reason)

    def with_kv(self, answer: GroupAnswer) -> GroupAnswer:
        """Copy of the group's answer with the KV fields of its prompt and segments filled in."""
        segments = answer.segments and [
            segment.model_copy(update=self.state(segment.id)._asdict())
            for segment in answer.segments
        ]
        return answer.model_copy(update={**self.state(None)._asdict(), "segments": segments})

    async def _report_when_ended(self, segment: str | None, export: Export) -> None:
        await export.ended.wait()
        if segment in self._dropped:
            self._release(export)
        else:
            self._on_export(segment, self.state(segment))

    def _release(self, export: Export) -> None:
        if export.handle is not None:
            self._prompt_kv.handles.end(export.handle)
