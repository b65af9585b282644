"""Routes /v1/pause, resume, sleep and wake: pause sampling, and release the engine's memory."""

from fastapi import APIRouter, Request, Response

from coppice.wire.pause import (
    PauseAnswer,
    PauseRequest,
    ResumeRequest,
    SleepAnswer,
    SleepRequest,
    WakeRequest,
)
from service.auth.access import Caller, requires_role
from service.errors import Asleep, Unsupported, VersionConflict
from service.http.bodies import read_small_json
from service.http.responses import ADMIN_ERRORS, BODY_ERRORS, JSON, declare_responses, json_response
from service.routes.dependencies import ReadyServer, ServingServer
from service.server import Server

router = APIRouter(prefix="/v1")
PAUSE_RESPONSES = declare_responses({200: JSON}, *ADMIN_ERRORS, *BODY_ERRORS, VersionConflict)
WAKE_RESPONSES = declare_responses({200: JSON}, *ADMIN_ERRORS, *BODY_ERRORS, Asleep, Unsupported)
SLEEP_RESPONSES = declare_responses(
    {200: JSON}, *ADMIN_ERRORS, *BODY_ERRORS, Asleep, Unsupported, VersionConflict
)


@router.post("/pause", responses=PAUSE_RESPONSES)
@requires_role("admin")
async def pause(request: Request, server: ReadyServer, caller: Caller) -> Response:
    """Pause sampling, or renew the pause of this API key."""
    body = await read_small_json(request, PauseRequest)
    await server.run_to_completion(
        server.activation.pauses.pause(caller.name, body.mode, body.lease_seconds)
    )
    return json_response(_answer(server))


@router.post("/resume", responses=declare_responses({200: JSON}, *ADMIN_ERRORS, *BODY_ERRORS))
@requires_role("admin")
async def resume(request: Request, server: ServingServer, caller: Caller) -> Response:
    """End the pause of this API key, or of all.

    Allowed while draining too, because paused samples could not finish otherwise.
    """
    body = await read_small_json(request, ResumeRequest)
    await server.run_to_completion(
        server.activation.pauses.resume(caller.name, is_for_all=body.all)
    )
    return json_response(_answer(server))


@router.post("/sleep", responses=SLEEP_RESPONSES)
@requires_role("admin")
async def sleep(request: Request, server: ReadyServer, caller: Caller) -> Response:
    body = await read_small_json(request, SleepRequest)
    check_can_sleep(server)
    work = server.activation.sleep.sleep(
        caller.name, body.level, frozenset(body.tags), body.mode, body.lease_seconds
    )
    await server.run_to_completion(work)
    return json_response(_sleep_answer(server))


@router.post("/wake", responses=WAKE_RESPONSES)
@requires_role("admin")
async def wake(request: Request, server: ServingServer, caller: Caller) -> Response:
    """Allocate the engine's memory again; allowed while draining, as is a resume."""
    body = await read_small_json(request, WakeRequest)
    work = server.activation.sleep.wake(caller.name, frozenset(body.tags), is_for_all=body.all)
    await server.run_to_completion(work)
    return json_response(_sleep_answer(server))


def check_can_sleep(server: Server) -> None:
    if not server.engine.info.can_sleep:
        raise Unsupported(
            "the engine was started without sleep mode: set engine.enable_sleep_mode to true"
        )


def _sleep_answer(server: Server) -> SleepAnswer:
    pauses, sleep = server.activation.pauses, server.activation.sleep
    return SleepAnswer.model_validate(
        {
            "level": sleep.level,
            "sleeping_tags": sorted(sleep.tags),
            "paused": pauses.paused,
            "lease_seconds": pauses.seconds_left,
        }
    )


def _answer(server: Server) -> PauseAnswer:
    pauses = server.activation.pauses
    return PauseAnswer(paused=pauses.paused, lease_seconds=pauses.seconds_left)
