"""Store of responses of OpenAI's Responses API, for `previous_response_id` of later requests."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from fastapi import Depends, Request

KEEP_SECONDS = 3600.0
MAX_OWNER_BYTES = 64 * 2**20
MAX_BYTES = 512 * 2**20


class ResponseName(NamedTuple):
    """Name of a stored response.

    It counts for the API key `owner`. It is found only by requests of its `scope`: the owner, or
    one agent session of the owner.
    """

    owner: str
    scope: str
    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response and its conversation as JSON: all messages except its instructions.

    The objects would take several times the memory of their JSON.
    """

    response: bytes
    messages: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.messages)


class ResponseStore:
    """Stored responses in memory.

    The oldest are dropped after KEEP_SECONDS, or when those of one key, or of all, become too many.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._owners: OrderedDict[str, OrderedDict[ResponseName, StoredResponse]] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._expiries: deque[tuple[float, ResponseName]] = deque()

    def get(self, name: ResponseName) -> StoredResponse | None:
        self._drop_expired()
        return self._owners.get(name.owner, OrderedDict()).get(name)

    def put(self, name: ResponseName, stored: StoredResponse) -> None:
        """Store a response, unless it alone is larger than the limit of a key."""
        self._drop_expired()
        if stored.num_bytes > MAX_OWNER_BYTES:
            return
        owner = name.owner
        self._owners.setdefault(owner, OrderedDict())[name] = stored
        self._owners.move_to_end(owner)
        self._sizes[owner] = self._sizes.get(owner, 0) + stored.num_bytes
        self._expiries.append((self._clock() + KEEP_SECONDS, name))
        while self._sizes[owner] > MAX_OWNER_BYTES:
            self.delete(next(iter(self._owners[owner])))
        while sum(self._sizes.values()) > MAX_BYTES:
            first = next(iter(self._owners))
            self.delete(next(iter(self._owners[first])))

    def delete(self, name: ResponseName) -> bool:
        """Drop a response; false if there is none of this name."""
        owner = name.owner
        stored = self._owners.get(owner, OrderedDict()).pop(name, None)
        if stored is None:
            return False
        self._sizes[owner] -= stored.num_bytes
        if not self._owners[owner]:
            del self._owners[owner], self._sizes[owner]
        return True

    def _drop_expired(self) -> None:
        while self._expiries and self._expiries[0][0] <= self._clock():
            _, name = self._expiries.popleft()
            self.delete(name)


async def _store(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store


Responses = Annotated[ResponseStore, Depends(_store)]
