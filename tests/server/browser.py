"""A page in Chromium without a window, driven over the DevTools protocol."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0")
TIMEOUT_S = 60


class Page:
    """The browser's only page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = count(1)

    async def call(self, method: str, **params: Any) -> Any:
        """The result of a command of the protocol."""
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while (message := await self._socket.receive_json(timeout=TIMEOUT_S)).get("id") != number:
            pass  # an event
        assert "error" not in message, message
        return message["result"]

    async def evaluate(self, script: str) -> Any:
        """The JSON value of an expression; of what it resolves to, if it is a promise."""
        result = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def open(self, url: str, *, width: int) -> None:
        """Show a URL in a window of this width, in CSS pixels. The page may still be loading."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        await self.call("Page.navigate", url=url)


@asynccontextmanager
async def browser_page(profile: Path) -> AsyncIterator[Page]:
    """A page of a browser that ends with the block. profile: an empty folder for the browser's files."""
    assert BROWSER is not None
    process = await asyncio.create_subprocess_exec(
        BROWSER, *OPTIONS, f"--user-data-dir={profile}", "about:blank", stderr=asyncio.subprocess.PIPE
    )
    try:
        port = await asyncio.wait_for(_port(process), TIMEOUT_S)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            async with session.get("/json/list") as listed:
                (target,) = [one for one in json.loads(await listed.text()) if one["type"] == "page"]
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Page(socket)
    finally:
        process.terminate()
        await process.communicate()


async def _port(process: asyncio.subprocess.Process) -> int:
    """Where the browser listens for commands, which it writes to its standard error."""
    assert process.stderr is not None
    async for line in process.stderr:
        if line.startswith(b"DevTools listening on ws://127.0.0.1:"):
            return int(line.split(b":")[2].partition(b"/")[0])
    raise AssertionError("the browser has ended")
