"""Growing a tree from outside: a search, or a process reward model."""

import uuid
from urllib.parse import quote

from coppice.operations.pending import rollout_path
from coppice.results import segment_of
from coppice.transport.messages import HttpRequest, json_request
from coppice.transport.request_sender import RequestSender
from coppice.tree import Segment
from coppice.wire.branching import BranchRequest
from coppice.wire.rollouts import BranchAnswer, DropAnswer


class TreeOperations:
    """Needs a courier and keeps no state beside it."""

    _sender: RequestSender

    async def branch(
        self,
        rollout_id: str,
        segment: str | None = None,
        *,
        n: int = 1,
        max_tokens: int | None = None,
        group: int = 0,
        timeout: float | None = None,
    ) -> tuple[Segment, ...]:
        """Grows n segments from the end of one that was cut, or from the prompt; waits for them.

        The tree is a rollout submitted with Branching(mode="external"); every call renews its
        lease, and `abort` says that it is whole. With max_tokens the segments are cut there, at the
        next place where that costs nothing; without, they grow to their own end. It takes as long
        as the server needs, or `timeout` seconds of silence.
        """
        body = BranchRequest(segment=segment, group=group, n=n, max_tokens=max_tokens)
        is_enabled = self._sender.retry.is_enabled
        headers = {"Idempotency-Key": uuid.uuid4().hex} if is_enabled else {}
        call = json_request(
            "POST",
            f"{rollout_path(rollout_id)}/branch",
            body,
            headers=headers,
            read_timeout=timeout,
            is_idempotent=is_enabled,
        )
        answer = (await self._sender.send(call)).read(BranchAnswer)
        return tuple(segment_of(each) for each in answer.segments)

    async def drop_segment(self, rollout_id: str, segment: str) -> tuple[str, ...]:
        """Takes a segment and all that grew from it out of the tree; the ids that are gone.

        The tree's answer says how many were: what is left was not sampled from the model alone.
        """
        path = f"{rollout_path(rollout_id)}/segments/{quote(segment, safe='')}"
        reply = await self._sender.send(HttpRequest(method="DELETE", path=path))
        return tuple(reply.read(DropAnswer).dropped)
