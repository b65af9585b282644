"""A headless Chromium, controlled over its DevTools protocol.

scripts/tools.sh unpacks it from Debian's packages; without them, one on the PATH is used.
"""

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

from tests.tools import TOOLS, tool_environment

FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests run as root in containers
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
SECONDS = 60
UNPACKED = TOOLS / "usr" / "lib" / "chromium" / "chromium-headless-shell"
# Only the unpacked font, so that a picture has the same text on every machine.
FONTS = f"""<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "urn:fontconfig:fonts.dtd">
<fontconfig>
  <dir>{TOOLS}/usr/share/fonts</dir><cachedir prefix="cwd">font-cache</cachedir>
</fontconfig>
"""


class Tab:
    """One tab; `requested` are the addresses it has fetched, `messages` its console's errors."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self.requested: list[str] = []
        self.messages: list[str] = []

    async def open(self, url: str, *, width: int = 1440, height: int = 900) -> None:
        for domain in ("Page", "Network", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.resize(width, height)
        await self.call("Page.navigate", url=url)

    async def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)

    async def prefer_dark(self, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def shown(self, script: str) -> Any:
        """Returns as soon as the script's value is true; until then it may also fail."""
        async with asyncio.timeout(SECONDS):
            while not (value := await self.value(f"try {{ {script} }} catch {{}}")):
                await asyncio.sleep(0.1)
        return value

    async def value(self, script: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def text(self, selector: str) -> str:
        found = await self.value(f"document.querySelector({selector!r}).innerText")
        return " ".join(str(found).split())

    async def press(self, key: str) -> None:
        text = {"text": "\r"} if key == "Enter" else {}
        code = {"Enter": 13, "Tab": 9}[key]
        for kind in ("keyDown", "keyUp"):
            event = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code, **text}
            await self.call("Input.dispatchKeyEvent", **event)

    async def photograph(self, file: Path) -> None:
        answer = await self.call("Page.captureScreenshot")
        file.write_bytes(base64.b64decode(answer["data"]))

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        await self._connection.send(json.dumps(message))
        async with asyncio.timeout(SECONDS):
            while (answer := json.loads(await self._connection.recv())).get("id") != number:
                self._on_event(answer)
        result: dict[str, Any] = answer["result"]
        return result

    def _on_event(self, event: dict[str, Any]) -> None:
        found = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.requested.append(found["request"]["url"])
        if event.get("method") == "Log.entryAdded" and found["entry"]["level"] == "error":
            self.messages.append(found["entry"]["text"])
        if event.get("method") == "Runtime.exceptionThrown":
            self.messages.append(str(found["exceptionDetails"]))


def _command(profile: Path) -> tuple[str, dict[str, str]]:
    """Path and environment of the browser."""
    if UNPACKED.exists():
        fonts = profile.with_suffix(".fonts.conf")
        fonts.write_text(FONTS)
        return str(UNPACKED), tool_environment() | {"FONTCONFIG_FILE": str(fonts)}
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("no Chromium: scripts/tools.sh gets it from Debian")
    return found, tool_environment()


@asynccontextmanager
async def tab(url: str, profile: Path) -> AsyncIterator[Tab]:
    """Runs a browser with one tab at the address, 1440 pixels wide."""
    program, environment = _command(profile)
    process = await asyncio.create_subprocess_exec(
        program,
        *FLAGS,
        f"--user-data-dir={profile}",
        "about:blank",
        env=environment,
        cwd=profile.parent,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(SECONDS):
            port = await _port(profile / "DevToolsActivePort")
            place = f"http://127.0.0.1:{port}/json/new?about:blank"
            async with httpx.AsyncClient() as http:
                opened = (await http.put(place)).json()
        async with connect(
            opened["webSocketDebuggerUrl"], max_size=None, max_queue=None, ping_interval=None
        ) as connection:
            page = Tab(connection)
            await page.open(url)
            yield page
    finally:
        process.terminate()
        await process.wait()


async def _port(file: Path) -> int:
    """The port, which Chromium writes to a file once it listens."""
    while not (file.exists() and file.read_text().strip()):
        await asyncio.sleep(0.1)
    return int(file.read_text().splitlines()[0])
