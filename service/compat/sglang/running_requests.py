"""Map of SGLang's request ids to the running rollouts, for aborts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from fastapi import Depends, Request

from service.rollouts.rollout import Rollout


class RequestIds:
    """Lookup of running rollouts by API key and client-chosen request id, to abort them.

    Several rollouts may have the same id.
    """

    def __init__(self) -> None:
        self._rollouts: dict[tuple[str, str], set[Rollout]] = {}

    @contextmanager
    def register(self, owner: str, name: str, rollout: Rollout) -> Iterator[None]:
        key = (owner, name)
        self._rollouts.setdefault(key, set()).add(rollout)
        try:
            yield
        finally:
            self._rollouts[key].discard(rollout)
            if not self._rollouts[key]:
                del self._rollouts[key]

    def find(self, owner: str, name: str) -> list[Rollout]:
        return list(self._rollouts.get((owner, name), ()))


async def _request_ids(request: Request) -> RequestIds:
    request_ids: RequestIds = request.app.state.request_ids
    return request_ids


RunningRequests = Annotated[RequestIds, Depends(_request_ids)]
