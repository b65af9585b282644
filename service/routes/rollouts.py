"""POST and DELETE /v1/rollouts."""

import asyncio
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from coppice.wire.rollouts import RolloutAnswer, RolloutRequest
from service.bodies import read_json
from service.errors import NotAcceptable
from service.rollout import Rollout
from service.routes.dependencies import ReadyServer
from service.server import Server

router = APIRouter(prefix="/v1/rollouts")

NDJSON = "application/x-ndjson"
JSON = "application/json"


@router.post("")
async def start(request: Request, server: ReadyServer) -> Response:
    media_type = _wanted(request.headers.get("accept", "*/*"))
    body = await read_json(request, RolloutRequest, limit=server.settings.limits.max_body_bytes)
    rollout = await server.rollouts.start(body)
    headers = {"Coppice-Rollout-Id": rollout.id}
    if body.stream or media_type == NDJSON:
        return StreamingResponse(_lines(server, rollout), media_type=NDJSON, headers=headers)
    await _ended_or_left(request, server, rollout)
    return _json(await rollout.answer(), headers)


@router.delete("/{rollout_id}")
async def abort(rollout_id: str, server: ReadyServer) -> Response:
    """The tokens so far come back here as well as to whoever started the rollout."""
    rollout = server.rollouts.get(rollout_id)
    await server.rollouts.cancel(rollout)
    return _json(await rollout.answer(), {})


async def _lines(server: Server, rollout: Rollout) -> AsyncIterator[bytes]:
    """Left early, by a reader who went away, it ends the rollout."""
    try:
        async for record in rollout.records():
            yield record.model_dump_json(exclude_none=True).encode() + b"\n"
    finally:
        if not rollout.ended:
            await server.rollouts.cancel(rollout)


async def _ended_or_left(request: Request, server: Server, rollout: Rollout) -> None:
    """Nobody reads the answer of a caller who has gone: the rollout ends with the connection."""
    left = asyncio.create_task(_disconnected(request))
    ended = asyncio.create_task(rollout.wait())
    try:
        await asyncio.wait({left, ended}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        left.cancel()
        ended.cancel()
        if not rollout.ended:
            await server.rollouts.cancel(rollout)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _wanted(accept: str) -> str:
    accepted = {part.partition(";")[0].strip().lower() for part in accept.split(",")}
    if NDJSON in accepted:
        return NDJSON
    if accepted & {JSON, "application/*", "*/*"}:
        return JSON
    raise NotAcceptable(f"this server answers {JSON} and {NDJSON}")


def _json(answer: RolloutAnswer, headers: dict[str, str]) -> Response:
    return Response(answer.model_dump_json(), media_type=JSON, headers=headers)
