"""Downloads a batch file by HTTP GET: streams it to disk, and continues with Range after a broken connection.

A part is appended only if it fits: the same ETag or modification time, the right start, the announced length. Otherwise
the download starts over.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import aiohttp

from batchline.batch.locations import Location
from batchline.batch.remote import RETRIED_STATUSES, TRANSIENT_ERRORS, RetryPolicy, http_session, response_excerpt
from batchline.errors import InputUnreadable

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Received:
    """The data so far. validator: its strong ETag or modification time."""

    num_bytes: int = 0
    total: int | None = None
    validator: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all announced bytes are there; without an announced length, assumed to be true."""
        return self.total is None or self.num_bytes == self.total


async def download(location: Location, target: Path, retry: RetryPolicy | None = None) -> None:
    """Fetch an http(s) location into the file `target`. Raises: InputUnreadable."""
    retry = retry or RetryPolicy()
    received = _Received()
    failures = 0
    with target.open("w+b") as file:
        async with http_session() as session:
            while True:
                before = received.num_bytes
                reason = await _attempt(session, location, file, received)
                if reason is None:
                    return
                failures = 1 if received.num_bytes > before else failures + 1
                if failures >= retry.attempts:
                    raise InputUnreadable(location.display, f"{reason} (given up after {failures} attempts)")
                logger.warning("download of %s broke off: %s; trying again", location.display, reason)
                await asyncio.sleep(retry.delay_s(failures))


async def _attempt(
    session: aiohttp.ClientSession, location: Location, file: BinaryIO, received: _Received
) -> str | None:
    """One GET of what is missing. Returns None when all is there, else why it has to be tried again."""
    headers = {}
    if received.num_bytes and received.validator:
        headers = {"Range": f"bytes={received.num_bytes}-", "If-Range": received.validator}
    try:
        async with session.get(location.text, headers=headers) as response:
            if response.status in RETRIED_STATUSES:
                return await response_excerpt(response)
            if response.status == 416 and received.num_bytes:
                _start_over(file, received)
                return "the server refused to continue where the connection broke"
            if response.status not in (200, 206):
                raise InputUnreadable(location.display, await response_excerpt(response))
            if not (response.status == 206 and _continues(response, received)):
                _start_over(file, received)
                if response.status == 206:
                    return "the server sent a part that was not asked for"
                received.total = response.content_length
                received.validator = _validator(response)
            async for chunk in response.content.iter_chunked(1 << 20):
                await asyncio.to_thread(file.write, chunk)
                received.num_bytes += len(chunk)
    except TRANSIENT_ERRORS as exc:
        return str(exc) or type(exc).__name__
    except aiohttp.ClientError as exc:
        # Only the kind of the error: its text may show a signed URL.
        raise InputUnreadable(location.display, f"the request failed ({type(exc).__name__}).") from exc
    if not received.is_complete:
        return f"it ended after {received.num_bytes} of {received.total} bytes"
    return None


def _start_over(file: BinaryIO, received: _Received) -> None:
    file.seek(0)
    file.truncate()
    os.ftruncate(file.fileno(), 0)
    received.num_bytes = 0
    received.total = received.validator = None


def _continues(response: aiohttp.ClientResponse, received: _Received) -> bool:
    """Whether a partial answer is what follows the bytes received."""
    part, _, total = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
    is_next = part.split("-")[0] == str(received.num_bytes)
    same_total = received.total is None or total in ("*", str(received.total))
    return is_next and same_total and received.validator in (None, _validator(response))


def _validator(response: aiohttp.ClientResponse) -> str | None:
    etag = response.headers.get("ETag")
    if etag and not etag.startswith("W/"):
        return etag
    return response.headers.get("Last-Modified")
