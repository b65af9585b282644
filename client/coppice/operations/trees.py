"""Operations on externally grown trees, for search or process reward models."""

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
    """Operations on externally grown trees."""

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
        """Samples n segments from the end of a cut segment, or from the prompt; waits for them.

        The tree is a rollout submitted with Branching(mode="external"). Every call renews its
        lease; `abort` completes the tree. With max_tokens the segments are cut there, rounded up to
        the next position at which a cut costs no extra prefill. Without it they run to their own
        end. `timeout` is the longest silence in seconds; None means no limit.
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
        """Removes a segment with all its descendants from the tree; returns the removed ids.

        The tree's result reports the number of removed segments, because the remaining ones are
        then no unbiased sample from the model.
        """
        path = f"{rollout_path(rollout_id)}/segments/{quote(segment, safe='')}"
        reply = await self._sender.send(HttpRequest(method="DELETE", path=path))
        return tuple(reply.read(DropAnswer).dropped)
