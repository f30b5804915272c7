"""Answers with a stored file that is not on this machine's disk, whole or in part (`Range`)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from typing import BinaryIO

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from batchline.jobs.service import Jobs
from batchline.jobs.tables import FileRecord

_PIECE_BYTES = 1 << 20
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


async def content_response(
    request: Request, jobs: Jobs, file: FileRecord, media_type: str, headers: Mapping[str, str]
) -> Response:
    """The file's bytes, or one range of them. Several ranges are answered with the whole file, as HTTP allows.

    Raises: StorageUnavailable.
    """
    headers = {**headers, "Accept-Ranges": "bytes"}
    # the answer has no validator, so a range under the condition of one does not apply
    wanted = None if "if-range" in request.headers else _RANGE.fullmatch(request.headers.get("range", "").strip())
    start, end, status = 0, file.bytes, 200
    if wanted is not None and any(wanted.groups()):
        start, end = _bounds(wanted[1], wanted[2], file.bytes)
        if start >= end:
            return Response(status_code=416, headers={**headers, "Content-Range": f"bytes */{file.bytes}"})
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{file.bytes}"
        status = 206
    headers["Content-Length"] = str(end - start)
    if request.method == "HEAD":
        return Response(status_code=status, media_type=media_type, headers=headers)
    reader = await asyncio.to_thread(jobs.open, file)
    return StreamingResponse(_pieces(reader, start, end), status_code=status, media_type=media_type, headers=headers)


def _bounds(first: str, last: str, size: int) -> tuple[int, int]:
    """The first byte of a range, and the one after its last. Without a first one, it is the last so many bytes."""
    if not first:
        return max(0, size - int(last)), size
    return int(first), min(int(last) + 1, size) if last else size


def _pieces(reader: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    with reader:
        reader.seek(start)
        while start < end and (piece := reader.read(min(_PIECE_BYTES, end - start))):
            start += len(piece)
            yield piece
