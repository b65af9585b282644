"""Lifetime of a group's KV exports: from before its first engine request until after its last."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from coppice.wire.rollouts import GroupAnswer
from service.prompt_kv.group_export import GroupKvExports, OnExport
from service.prompt_kv.prompt_kv import PromptKvManager
from service.rollouts.group import Group


@asynccontextmanager
async def exporting_group(
    prompt_kv: PromptKvManager, group: Group, on_export: OnExport
) -> AsyncIterator[None]:
    """Context manager that begins a group's exports and finishes them on exit.

    Exports that the engine has not written by then end without a handle. Without
    `group.kv_lease_seconds` nothing is exported.
    """
    if group.kv_lease_seconds is None:
        yield
        return
    async with asyncio.TaskGroup() as tasks:
        exports = GroupKvExports(
            prompt_kv, group.owner, group.kv_lease_seconds, tasks=tasks, on_export=on_export
        )
        exports.begin(group.prompt_token_ids)
        group.exports = exports
        try:
            yield
            await exports.finish()
        except BaseException:
            exports.abandon()
            raise


def with_kv(answer: GroupAnswer, exports: GroupKvExports | None) -> GroupAnswer:
    if exports is None:
        return answer
    segments = answer.segments and [
        segment.model_copy(update=exports.state(segment.id)._asdict())
        for segment in answer.segments
    ]
    return answer.model_copy(update={**exports.state(None)._asdict(), "segments": segments})
