import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any, Protocol, cast

import httpx
import pytest

from coppice import AsyncRollouts, Retry, Rollouts
from tests.client.app import App
from tests.client.awaited import Awaited


class Connect(Protocol):
    """Makes a client of an app, or of a real server if there is none.

    It does not retry by default.
    """

    def __call__(self, app: App | None = None, /, **options: Any) -> Rollouts: ...


@pytest.fixture(params=["blocking", "asyncio"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Either client: every test must hold for both."""
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())

        def connect(app: App | None = None, /, **options: Any) -> Rollouts:
            options.setdefault("base_url", "http://coppice.test")
            options.setdefault("retry", Retry.none())
            if app is not None:
                options["transport"] = httpx.MockTransport(app)
            if request.param == "blocking":
                return stack.enter_context(closing(Rollouts(**options)))
            awaited = Awaited(AsyncRollouts(**options), runner)
            return cast(Rollouts, stack.enter_context(closing(awaited)))

        yield connect
