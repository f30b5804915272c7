"""The options that limit an input, shared by the commands that check one."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from batchline.batch.options import HOSTED_LIMITS, Limits
from batchline.cli.values import parse_num_bytes

MaxRequests = Annotated[int | None, typer.Option(min=1, help="Refuse a batch file with more requests.")]
MaxFileSize = Annotated[
    int | None, typer.Option(parser=parse_num_bytes, metavar="SIZE", help="Refuse a larger batch file, e.g. 100MB.")
]
LimitPreset = Annotated[
    Literal["none", "hosted"],
    typer.Option("--limits", help="Preset limits; hosted: 50,000 requests and 100 MB, as in hosted batch services."),
]


def limits_of(preset: str, max_requests: int | None, max_file_bytes: int | None) -> Limits:
    """The preset's limits, where they are not given one by one."""
    base = HOSTED_LIMITS if preset == "hosted" else Limits()
    return Limits(max_requests=max_requests or base.max_requests, max_file_bytes=max_file_bytes or base.max_file_bytes)
