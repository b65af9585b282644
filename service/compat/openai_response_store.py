"""Responses of OpenAI's Responses API that later requests continue by their id."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request

from service.compat.openai_response_items import Message

KEEP_SECONDS = 3600.0
MAX_OWNER_BYTES = 64 * 2**20
MAX_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response and its conversation: all messages except its instructions.

    `num_bytes` is their size as JSON.
    """

    response: dict[str, Any]
    messages: list[Message]
    num_bytes: int


class ResponseStore:
    """Stored responses by API key and id, in memory.

    The oldest are dropped after KEEP_SECONDS, or when those of one key, or of all, become too many.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._owners: OrderedDict[str, OrderedDict[str, StoredResponse]] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._expiries: deque[tuple[float, str, str]] = deque()

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        self._drop_expired()
        return self._owners.get(owner, OrderedDict()).get(response_id)

    def put(self, owner: str, response_id: str, stored: StoredResponse) -> None:
        """Store a response, unless it alone is larger than the limit of a key."""
        self._drop_expired()
        if stored.num_bytes > MAX_OWNER_BYTES:
            return
        self._owners.setdefault(owner, OrderedDict())[response_id] = stored
        self._owners.move_to_end(owner)
        self._sizes[owner] = self._sizes.get(owner, 0) + stored.num_bytes
        self._expiries.append((self._clock() + KEEP_SECONDS, owner, response_id))
        while self._sizes[owner] > MAX_OWNER_BYTES:
            self.delete(owner, next(iter(self._owners[owner])))
        while sum(self._sizes.values()) > MAX_BYTES:
            first = next(iter(self._owners))
            self.delete(first, next(iter(self._owners[first])))

    def delete(self, owner: str, response_id: str) -> bool:
        """Drop a response; false if there is none of this id."""
        stored = self._owners.get(owner, OrderedDict()).pop(response_id, None)
        if stored is None:
            return False
        self._sizes[owner] -= stored.num_bytes
        if not self._owners[owner]:
            del self._owners[owner], self._sizes[owner]
        return True

    def _drop_expired(self) -> None:
        while self._expiries and self._expiries[0][0] <= self._clock():
            _, owner, response_id = self._expiries.popleft()
            self.delete(owner, response_id)


def _store(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store


Responses = Annotated[ResponseStore, Depends(_store)]
