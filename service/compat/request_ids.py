"""Rollouts that run under a name of their client's, so that it can end them by that name."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from fastapi import Depends, Request

from service.rollouts.rollout import Rollout


class Names:
    """A key's names are its own. The same name may be given to several requests."""

    def __init__(self) -> None:
        self._named: dict[tuple[str, str], set[Rollout]] = {}

    @contextmanager
    def named(self, owner: str, name: str, rollout: Rollout) -> Iterator[None]:
        key = (owner, name)
        self._named.setdefault(key, set()).add(rollout)
        try:
            yield
        finally:
            self._named[key].discard(rollout)
            if not self._named[key]:
                del self._named[key]

    def find(self, owner: str, name: str) -> list[Rollout]:
        return list(self._named.get((owner, name), ()))


def _names(request: Request) -> Names:
    names: Names = request.app.state.names
    return names


Running = Annotated[Names, Depends(_names)]
