"""The command line: turns options into calls of the library, and results into messages and exit codes.

`main` maps errors to exit codes. Each command has a file with its options; `model_options` has those that they share.
Nothing here imports torch or transformers before a model is needed, so that `--help` and refusals are instant.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NoReturn


def command(arguments: Sequence[str] | None = None) -> NoReturn:
    """The command line as a separate process, see `main.command`. Ctrl-C while modules are imported ends it."""
    try:
        from batchline.cli import main  # it takes half a second
    except KeyboardInterrupt:
        os._exit(130)
    main.command(arguments)
