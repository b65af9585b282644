"""A headless Chromium, controlled over its DevTools protocol."""

import asyncio
import base64
import itertools
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect

FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests run as root in containers
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
    "--window-size=1100,900",
)
SECONDS = 60


class Tab:
    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)

    async def shown(self, script: str) -> Any:
        """Returns as soon as the script's value is true."""
        async with asyncio.timeout(SECONDS):
            while not (value := await self.value(script)):
                await asyncio.sleep(0.1)
        return value

    async def value(self, script: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        return answer["result"].get("value")

    async def photograph(self, file: Path) -> None:
        answer = await self.call("Page.captureScreenshot")
        file.write_bytes(base64.b64decode(answer["data"]))

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        await self._connection.send(json.dumps(message))
        async with asyncio.timeout(SECONDS):
            while (answer := json.loads(await self._connection.recv())).get("id") != number:
                pass
        result: dict[str, Any] = answer["result"]
        return result


@asynccontextmanager
async def tab(url: str, profile: Path) -> AsyncIterator[Tab]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no chromium on the PATH: the page is not drawn")
    process = await asyncio.create_subprocess_exec(
        chromium,
        *FLAGS,
        f"--user-data-dir={profile}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(SECONDS):
            port = await _port(profile / "DevToolsActivePort")
            place = f"http://127.0.0.1:{port}/json/new?{url}"
            async with httpx.AsyncClient() as http:
                opened = (await http.put(place)).json()
        async with connect(opened["webSocketDebuggerUrl"], max_size=None) as connection:
            yield Tab(connection)
    finally:
        process.terminate()
        await process.wait()


async def _port(file: Path) -> int:
    """The port, which Chromium writes to a file once it listens."""
    while not (file.exists() and file.read_text().strip()):
        await asyncio.sleep(0.1)
    return int(file.read_text().splitlines()[0])
