"""A server in a thread of its own, for callers that block."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.protocol import Engine
from tests.serving import serving


@contextmanager
def serving_in_thread(
    engine: Engine, tmp_path: Path, /, **sections: dict[str, Any]
) -> Iterator[str]:
    """Yields the server's address."""
    address: Future[str] = Future()
    leave: Future[None] = Future()

    async def serve() -> None:
        async with serving(engine, tmp_path, wait=True, port=0, shared=None, **sections) as served:
            address.set_result(served.url)
            await asyncio.wrap_future(leave)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        yield address.result(timeout=30)
    finally:
        leave.set_result(None)
        thread.join(timeout=30)
        assert not thread.is_alive()
