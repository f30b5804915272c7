"""Uploads results: one HTTP PUT, or a multipart upload through fsspec.

The local file stays unchanged, so that a failed upload can be repeated.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import aiohttp

from batchline.batch.locations import Location
from batchline.batch.remote import (
    RETRIED_STATUSES,
    TRANSIENT_ERRORS,
    RetryPolicy,
    file_system,
    http_session,
    response_excerpt,
)
from batchline.errors import RunFailed

logger = logging.getLogger(__name__)


async def upload_file(path: Path, location: Location, retry: RetryPolicy | None = None) -> None:
    """Send the file to an http(s) or fsspec location. Raises: RunFailed, saying where the results are."""
    if location.kind == "http":
        reason = await _put_until_accepted(path, location, retry or RetryPolicy())
    else:
        reason = await asyncio.to_thread(_put_through_fsspec, path, location)
    if reason is not None:
        raise RunFailed(
            f"The upload to {location.display} failed: {reason}\n"
            f"The results are complete in {path}. Run the same command again, or send them with:\n"
            f"  batchline upload {path} '<URL>'"
        )


async def _put_until_accepted(path: Path, location: Location, retry: RetryPolicy) -> str | None:
    """One PUT that the server accepts. Returns None, or why none was."""
    async with http_session() as session:
        for failures in range(1, retry.attempts + 1):
            try:
                reason, is_final = await _put(session, path, location)
            except TRANSIENT_ERRORS as exc:
                reason, is_final = str(exc) or type(exc).__name__, False
            except aiohttp.ClientError as exc:
                return f"the request failed ({type(exc).__name__})"  # its text may show a signed URL
            if reason is None or is_final:
                return reason
            if failures < retry.attempts:
                logger.warning("upload to %s failed: %s; trying again", location.display, reason)
                await asyncio.sleep(retry.delay_s(failures))
    return f"{reason} (given up after {retry.attempts} attempts)"


async def _put(session: aiohttp.ClientSession, path: Path, location: Location) -> tuple[str | None, bool]:
    """One PUT. Returns (why it failed or None, whether trying again is useless)."""
    with path.open("rb") as file:
        headers = {"Content-Length": str(os.fstat(file.fileno()).st_size)}
        async with session.put(location.text, data=file, headers=headers, allow_redirects=False) as response:
            # The status alone decides: what breaks after a 2xx must not cause a second upload.
            if 200 <= response.status < 300:
                return None, True
            return await response_excerpt(response), response.status not in RETRIED_STATUSES


def _put_through_fsspec(path: Path, location: Location) -> str | None:
    fs, remote_path = file_system(location)
    try:
        fs.put_file(str(path), remote_path)
    except Exception as exc:
        # Each cloud client has an exception tree of its own; this is the seam that turns them all into words.
        logger.debug("upload failed", exc_info=True)
        return f"{type(exc).__name__}: {exc}"
    return None
