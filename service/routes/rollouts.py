"""/v1/rollouts: start one, come back to it, end it."""

import asyncio
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from coppice.wire.packed import pack
from coppice.wire.rollouts import RolloutAnswer, RolloutRequest
from service.auth.access import Caller, needs
from service.http.bodies import INLINE_BYTES
from service.http.disconnect import NOBODY_READS, while_connected
from service.http.errors import (
    DirectoryUnavailable,
    Draining,
    EngineGone,
    Forbidden,
    IdempotencyInProgress,
    IdempotencyMismatch,
    InvalidRequest,
    NotAcceptable,
    RolloutNotFound,
)
from service.http.json_response import PartsResponse, rollout_parts
from service.http.params import wait_seconds
from service.http.preferences import Form, wanted_form, wants_async
from service.http.responses import (
    ELSEWHERE,
    JSON,
    OF_BODY,
    OF_ENGINE_WORK,
    OF_FLEET,
    WHEN_READY,
    WITH_KEY,
    answers,
)
from service.rollouts.claim import Claim
from service.rollouts.rollout import Rollout
from service.routes.dependencies import ROLLOUT_HERE, AnyServer
from service.server import Server

router = APIRouter(prefix="/v1/rollouts")

IDEMPOTENCY = (IdempotencyInProgress, IdempotencyMismatch)
LOST = (*OF_FLEET, RolloutNotFound, Draining, EngineGone)
STARTED = answers(
    {200: tuple(Form), 202: JSON, **ELSEWHERE},
    *(*WITH_KEY, *WHEN_READY, *OF_BODY, *OF_ENGINE_WORK, *IDEMPOTENCY),
    *(NotAcceptable, RolloutNotFound, DirectoryUnavailable),
)
LOOKED = answers(
    {200: tuple(Form), 202: JSON, **ELSEWHERE}, *WITH_KEY, *LOST, NotAcceptable, InvalidRequest
)
ABORTED = answers({200: {Form.JSON, Form.PACKED}, **ELSEWHERE}, *WITH_KEY, *LOST, NotAcceptable)


@router.post("", responses=STARTED)
@needs("rollout")
async def start(request: Request, server: AnyServer, caller: Caller) -> Response:
    """With a key it may be the retry of what runs already, which a drain does not send away."""
    headers = request.headers
    key = headers.get("idempotency-key")
    if key is None:
        server.readiness.check_ready()
    else:
        server.readiness.check_serving()
    form = wanted_form(headers.get("accept"))
    respond_async = wants_async(",".join(headers.getlist("prefer")))
    content = await server.bodies.content(request)
    body = await server.bodies.parsed(content, RolloutRequest)
    if body.kv is not None and "kv" not in caller.roles:
        raise Forbidden("the key lacks the role kv, which prompt KV needs")
    owner = caller.name
    claim = None if key is None else await _claim(owner, key, content)
    starting = server.rollouts.start(body, owner=owner, detached=respond_async, claim=claim)
    rollout = await while_connected(request, starting)
    if rollout is None:
        return NOBODY_READS
    if respond_async:
        return _accepted(rollout, {"Preference-Applied": "respond-async"})
    if body.stream or form is Form.NDJSON:
        return _stream(rollout, _own_lines(server, rollout))
    try:
        await while_connected(request, rollout.wait())
    finally:
        server.rollouts.left(rollout)
    return await _answer(rollout, form) if rollout.ended else NOBODY_READS


@router.get("/{rollout_id}", responses=LOOKED, dependencies=[ROLLOUT_HERE])
@needs("rollout")
async def look(rollout_id: str, request: Request, server: AnyServer, caller: Caller) -> Response:
    """What has ended is answered at once, what has not is awaited as long as the caller likes."""
    form = wanted_form(request.headers.get("accept"))
    seconds = wait_seconds(request.query_params)
    rollout = server.rollouts.get(rollout_id, owner=caller.name)
    if form is Form.NDJSON:
        return _stream(rollout, _lines(rollout))
    if not rollout.ended:
        try:
            async with asyncio.timeout(seconds):
                await while_connected(request, rollout.wait())
        except TimeoutError:
            return _accepted(rollout, {})
    return await _answer(rollout, form) if rollout.ended else NOBODY_READS


@router.delete("/{rollout_id}", responses=ABORTED, dependencies=[ROLLOUT_HERE])
@needs("rollout")
async def abort(rollout_id: str, request: Request, server: AnyServer, caller: Caller) -> Response:
    """The tokens so far come back here as well as to whoever started the rollout."""
    form = wanted_form(request.headers.get("accept"))
    rollout = server.rollouts.get(rollout_id, owner=caller.name)
    await server.rollouts.cancel(rollout)
    return await _answer(rollout, Form.JSON if form is Form.NDJSON else form)


async def _claim(owner: str, key: str, content: bytes) -> Claim:
    """A large body takes long to hash."""
    if len(content) <= INLINE_BYTES:
        return Claim.of(owner, key, content)
    return await asyncio.to_thread(Claim.of, owner, key, content)


def _stream(rollout: Rollout, lines: AsyncIterator[bytes]) -> Response:
    return StreamingResponse(lines, media_type=Form.NDJSON, headers=_headers(rollout))


async def _own_lines(server: Server, rollout: Rollout) -> AsyncIterator[bytes]:
    """For whoever started the rollout; others may come and go."""
    try:
        async for line in _lines(rollout):
            yield line
    finally:
        server.rollouts.left(rollout)


async def _lines(rollout: Rollout) -> AsyncIterator[bytes]:
    async for record in rollout.records():
        yield record.model_dump_json(exclude_none=True).encode() + b"\n"
    rollout.promised = False


async def _answer(rollout: Rollout, form: Form) -> Response:
    """Encoded in a thread: large answers would hold up everybody else's streams."""
    rollout.promised = False  # a server that stops waits for what it is sending
    answer = await rollout.answer()
    parts = await asyncio.to_thread(_encoded, answer, form)
    return PartsResponse(parts, media_type=form, headers=_headers(rollout))


def _encoded(answer: RolloutAnswer, form: Form) -> list[bytes]:
    return [pack(answer)] if form is Form.PACKED else list(rollout_parts(answer))


def _accepted(rollout: Rollout, headers: dict[str, str]) -> Response:
    rollout.promised = True
    progress: BaseModel = rollout.progress()
    location = {"Location": f"/v1/rollouts/{rollout.id}"}
    return Response(
        progress.model_dump_json(),
        status_code=202,
        media_type=Form.JSON,
        headers=_headers(rollout) | location | headers,
    )


def _headers(rollout: Rollout) -> dict[str, str]:
    return {"Coppice-Rollout-Id": rollout.id}
