"""Where input and output live: standard streams, local paths, http(s) URLs, and everything that fsspec reaches.

Parses what the user wrote, nothing more; opening is for `source` and `sink`. A location is shown to people through
`display`, which leaves out the query and the credentials of a URL: a presigned URL is a secret.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from batchline.errors import UsageError

LocationKind = Literal["stdio", "path", "http", "fsspec"]

STDIO = "-"


@dataclass(frozen=True, slots=True)
class Location:
    """An input or output. text: as the user wrote it. path: for kind `path` alone."""

    text: str
    kind: LocationKind
    path: Path | None = None

    @property
    def scheme(self) -> str:
        """`s3` of `s3://bucket/key`; empty for paths and standard streams."""
        return urlsplit(self.text).scheme.lower() if self.is_remote else ""

    @property
    def is_remote(self) -> bool:
        """Whether it is reached over the network."""
        return self.kind in ("http", "fsspec")

    @property
    def name(self) -> str:
        """The last part of the path, as a suffix like `.gz` is looked for there; `-` for standard streams.

        It can be the name of a local file: an object's key may have an escaped slash in it.
        """
        if self.path is not None:
            return self.path.name
        if self.kind == "stdio":
            return STDIO
        parts = urlsplit(self.text)
        path = unquote(parts.path).replace("\0", "")
        return path.rstrip("/").rpartition("/")[2] or parts.netloc.rpartition("@")[2]

    @property
    def display(self) -> str:
        """The location without secrets: no query, no user name, no password."""
        if self.kind in ("path", "stdio"):
            return self.text
        parts = urlsplit(self.text)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    @property
    def tag(self) -> str:
        """A short stable name for the location: two presigned URLs of one object have the same tag."""
        return hashlib.sha256(self.display.encode(errors="surrogatepass")).hexdigest()[:10]


def parse_location(text: str) -> Location:
    """The location that `text` names: `-`, `http(s)://...`, `<scheme>://...`, or a path (`file://` included).

    Raises: UsageError for what looks like a URL and is none.
    """
    if text == STDIO:
        return Location(text, "stdio")
    scheme, separator, rest = text.partition("://")
    if not separator or not scheme.replace("+", "").replace("-", "").isalnum():
        return Location(text, "path", Path(text))
    if scheme.lower() == "file":
        return Location(text, "path", Path(unquote("/" + rest.lstrip("/"))))
    try:
        urlsplit(text)
    except ValueError as exc:
        raise UsageError(f"A location that begins with {scheme}:// is not a valid URL: look at its host.") from exc
    if scheme.lower() in ("http", "https"):
        return Location(text, "http")
    return Location(text, "fsspec")
