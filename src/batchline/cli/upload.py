"""`batchline upload`: send results that stayed on disk to where they belong."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from batchline.cli.messages import tell


def upload(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to send.", exists=True, dir_okay=False)],
    url: Annotated[str, typer.Argument(metavar="URL", help="http(s):// (one PUT), s3://, gs://, az:// or hf://.")],
) -> None:
    """Upload a file, as a run does at its end."""
    import asyncio

    from batchline.batch.locations import parse_location
    from batchline.batch.upload import upload_file
    from batchline.errors import UsageError

    location = parse_location(url)
    if location.kind not in ("http", "fsspec"):
        raise UsageError(f"{url!r} is not a URL to upload to.")
    asyncio.run(upload_file(file, location))
    tell(f"Sent {file} to {location.display}")
