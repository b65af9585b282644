"""Routes /v1/rollouts/{id}/branch and /segments, for rollout trees branched by the caller."""

from fastapi import APIRouter, Request, Response

from coppice.wire.branching import BranchRequest
from coppice.wire.rollouts import BranchAnswer, DropAnswer
from service.auth.access import Caller, requires_role
from service.cluster.idempotency_claim import IdempotencyClaim
from service.errors import (
    IdempotencyInProgress,
    IdempotencyMismatch,
    RolloutNotFound,
    SegmentNotFound,
    TreeClosed,
)
from service.http.bodies import read_small_json
from service.http.exception_handlers import cancel_on_disconnect
from service.http.responses import (
    AUTH_ERRORS,
    BODY_ERRORS,
    CLUSTER_ERRORS,
    JSON,
    READINESS_ERRORS,
    REDIRECT,
    declare_responses,
    json_response,
    large_response,
    to_json_bytes,
)
from service.routes.dependencies import ROLLOUT_LOCAL, ReadyServer

router = APIRouter(prefix="/v1/rollouts/{rollout_id}", dependencies=[ROLLOUT_LOCAL])
TREE_ERRORS = (*CLUSTER_ERRORS, RolloutNotFound, SegmentNotFound, TreeClosed)
BRANCH_RESPONSES = declare_responses(
    {200: JSON, **REDIRECT},
    *(*AUTH_ERRORS, *READINESS_ERRORS, *BODY_ERRORS, *TREE_ERRORS),
    *(IdempotencyInProgress, IdempotencyMismatch),
)
DROP_RESPONSES = declare_responses(
    {200: JSON, **REDIRECT}, *AUTH_ERRORS, *READINESS_ERRORS, *TREE_ERRORS
)


@router.post("/branch", responses=BRANCH_RESPONSES)
@requires_role("rollout")
async def branch(
    rollout_id: str, request: Request, server: ReadyServer, caller: Caller
) -> Response:
    body = await read_small_json(request, BranchRequest)
    key = request.headers.get("idempotency-key")
    claim = None
    if key is not None:
        fingerprint = await server.bodies.fingerprint(request, body)
        claim = IdempotencyClaim.of(caller.name, key, fingerprint)
    tree = await server.external_trees.find(rollout_id, body.group, owner=caller.name)
    branch_result = await tree.branch(body, claim)
    try:
        segments = await cancel_on_disconnect(request, branch_result.segments())
    finally:
        server.external_trees.on_disconnect(tree, branch_result)
    answer = BranchAnswer(segments=segments, lease_seconds=tree.lease_seconds)
    return await large_response(server.threads, lambda: to_json_bytes(answer))


@router.delete("/segments/{segment_id}", responses=DROP_RESPONSES)
@requires_role("rollout")
async def drop(rollout_id: str, segment_id: str, server: ReadyServer, caller: Caller) -> Response:
    """Drop a segment of an external tree, with the segments below it.

    The segment's id starts with the index of its group.
    """
    index = segment_id.partition(".")[0]
    group = int(index) if index.isdecimal() and len(index) < 5 else 0
    tree = await server.external_trees.find(rollout_id, group, owner=caller.name)
    dropped = await tree.drop(segment_id)
    return json_response(DropAnswer(dropped=dropped, lease_seconds=tree.lease_seconds))
