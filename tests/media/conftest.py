"""A server on loopback that sends media."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from media_server import MediaServer

from batchline.media import fetching


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MediaServer]:
    """A server on loopback. Retries do not wait."""
    monkeypatch.setattr(fetching, "FIRST_DELAY_S", 0.0)
    media_server = MediaServer()
    await media_server.start()
    yield media_server
    await media_server.close()
