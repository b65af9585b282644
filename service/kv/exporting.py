"""A group's export, from before its first request enters the engine until its last has left it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from coppice.wire.kv import KvHandle
from coppice.wire.rollouts import GroupAnswer
from service.group import Group
from service.kv.export import Export
from service.kv.prompt_kv import PromptKv

KvReady = Callable[[KvHandle], None]


@asynccontextmanager
async def exporting(prompt_kv: PromptKv, group: Group, ready: KvReady) -> AsyncIterator[None]:
    """What the engine leaves unwritten is given up afterwards. `ready` hears of the handle."""
    if group.kv_lease_seconds is None:
        yield
        return
    export = prompt_kv.begin(group.owner, group.prompt_token_ids, group.kv_lease_seconds)
    group.export = export
    telling = asyncio.create_task(_tell(prompt_kv, export, ready))
    try:
        yield
        await prompt_kv.finish(export)
        await telling
    except BaseException:
        telling.cancel()
        prompt_kv.abandon(export)
        raise


def with_kv(answer: GroupAnswer, prompt_kv: PromptKv, export: Export | None) -> GroupAnswer:
    if export is None:
        return answer
    handle = None if export.handle is None else prompt_kv.answer(export.handle)
    return answer.model_copy(update={"kv": handle, "kv_reason": export.reason})


async def _tell(prompt_kv: PromptKv, export: Export, ready: KvReady) -> None:
    await export.ended.wait()
    if export.handle is not None:
        ready(prompt_kv.answer(export.handle))
