"""The parts that input and output over the network share: fsspec's file systems, HTTP sessions, and retries.

Here the exceptions of cloud clients and of the HTTP client become Batchline's. Messages show a location without its
query, because a presigned URL is a secret.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from batchline.batch.locations import Location
from batchline.errors import UsageError

RETRIED_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
TRANSIENT_ERRORS = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, asyncio.TimeoutError, ConnectionError)

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
_EXCERPT_CHARS = 2000
_HEAD_TIMEOUT_S = 10
_VERSION_FIELDS = ("size", "ETag", "etag", "LastModified", "last_modified", "mtime", "updated", "generation", "blob_id")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often to try in vain before giving up, and how long to wait: doubled each time, up to `max_delay_s`."""

    attempts: int = 6
    first_delay_s: float = 1.0
    max_delay_s: float = 30.0

    def delay_s(self, failures: int) -> float:
        """Seconds to wait after that many failures in a row."""
        return min(self.first_delay_s * 2.0 ** (failures - 1), self.max_delay_s)


def http_session() -> aiohttp.ClientSession:
    """A session that waits long for slow servers but not for ever, and hands bytes on as they were stored."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=300)
    return aiohttp.ClientSession(timeout=timeout, auto_decompress=False, headers={"Accept-Encoding": "identity"})


async def response_excerpt(response: aiohttp.ClientResponse) -> str:
    """What the server said, shortened for a message."""
    text = (await response.content.read(_EXCERPT_CHARS)).decode(errors="replace").strip()
    return f"HTTP {response.status} {response.reason or ''}".strip() + (f": {text}" if text else "")


async def head(location: Location) -> tuple[int | None, str | None]:
    """Status and strong ETag that a HEAD request for an HTTP location gets; (None, None) if it gets no answer."""
    timeout = aiohttp.ClientTimeout(total=_HEAD_TIMEOUT_S)
    try:
        async with http_session() as session, session.head(location.text, timeout=timeout) as response:
            etag = response.headers.get("ETag")
            return response.status, None if etag is None or etag.startswith("W/") else etag
    except (*TRANSIENT_ERRORS, aiohttp.ClientError):
        return None, None


def object_version(fs: Any, path: str) -> dict[str, Any]:
    """What changes when a remote file is written anew, as far as its file system says; None for what it does not."""
    fs.invalidate_cache()
    info = fs.info(path)
    return {name: info.get(name) for name in _VERSION_FIELDS}


def file_system(location: Location) -> tuple[Any, str]:
    """fsspec's file system of a location and the path in it. Raises: UsageError, naming a missing extra."""
    from fsspec.core import url_to_fs  # its import reads the configuration of every installed file system

    try:
        fs, path = url_to_fs(location.text)
    except ImportError as exc:
        raise UsageError(_missing_client(location)) from exc
    except ValueError as exc:
        raise UsageError(f"Cannot use {location.display!r}: {exc}") from exc
    except Exception as exc:
        # Some file systems connect at once, and each has an exception tree of its own.
        raise UsageError(f"Cannot use {location.display!r}: {type(exc).__name__}: {exc}") from exc
    return fs, path


def refuse_unknown_host(location: Location) -> None:
    """Look the host of an HTTP location up. Raises: UsageError."""
    try:
        parts = urlsplit(location.text)
        host, port = parts.hostname, parts.port
    except ValueError as exc:
        raise UsageError(f"Cannot use {location.display!r}: {exc}") from exc
    if not host:
        raise UsageError(f"Cannot use {location.display!r}: it names no host.")
    try:
        socket.getaddrinfo(host, port or (443 if location.scheme == "https" else 80), type=socket.SOCK_STREAM)
    except OSError as exc:
        raise UsageError(f"Cannot use {location.display!r}: the host {host!r} is not known ({exc.strerror}).") from exc


def _missing_client(location: Location) -> str:
    extra = _EXTRAS.get(location.scheme)
    if extra is None:
        return f"Cannot use {location.display!r}: no installed package serves {location.scheme}:// locations."
    return f"{location.scheme}:// locations need the {extra!r} extra: pip install 'batchline[{extra}]'"
