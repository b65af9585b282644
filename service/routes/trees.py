"""/v1/rollouts/{id}/branch and /segments: a tree that somebody outside grows."""

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from coppice.wire.branching import BranchRequest
from coppice.wire.rollouts import BranchAnswer, DropAnswer
from service.auth.access import Caller, needs
from service.http.bodies import INLINE_BYTES, parse, read
from service.http.disconnect import NOBODY_READS, while_connected
from service.http.errors import (
    IdempotencyInProgress,
    IdempotencyMismatch,
    RolloutNotFound,
    SegmentNotFound,
    TreeClosed,
)
from service.http.responses import ELSEWHERE, JSON, OF_BODY, OF_FLEET, WHEN_READY, WITH_KEY, answers
from service.rollouts.claim import Claim
from service.routes.dependencies import ROLLOUT_HERE, ReadyServer

router = APIRouter(prefix="/v1/rollouts/{rollout_id}", dependencies=[ROLLOUT_HERE])

OF_TREE = (*OF_FLEET, RolloutNotFound, SegmentNotFound, TreeClosed)
BRANCHED = answers(
    {200: JSON, **ELSEWHERE},
    *(*WITH_KEY, *WHEN_READY, *OF_BODY, *OF_TREE),
    *(IdempotencyInProgress, IdempotencyMismatch),
)
DROPPED = answers({200: JSON, **ELSEWHERE}, *WITH_KEY, *WHEN_READY, *OF_TREE)


@router.post("/branch", responses=BRANCHED)
@needs("rollout")
async def branch(
    rollout_id: str, request: Request, server: ReadyServer, caller: Caller
) -> Response:
    content = await read(request, limit=INLINE_BYTES)
    body = parse(content, BranchRequest)
    key = request.headers.get("idempotency-key")
    claim = None if key is None else Claim.of(caller.name, key, content)
    tree = await server.open_trees.find(rollout_id, body.group, owner=caller.name)
    growing = await tree.branch(body, claim)
    try:
        segments = await while_connected(request, growing.segments())
    finally:
        server.open_trees.left(tree, growing)
    if segments is None:
        return NOBODY_READS
    return _json(BranchAnswer(segments=segments, lease_seconds=tree.lease_seconds))


@router.delete("/segments/{segment_id}", responses=DROPPED)
@needs("rollout")
async def drop(rollout_id: str, segment_id: str, server: ReadyServer, caller: Caller) -> Response:
    """The group is in the segment's own name."""
    index = segment_id.partition(".")[0]
    group = int(index) if index.isdecimal() and len(index) < 5 else 0
    tree = await server.open_trees.find(rollout_id, group, owner=caller.name)
    dropped = await tree.drop(segment_id)
    return _json(DropAnswer(dropped=dropped, lease_seconds=tree.lease_seconds))


def _json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")
