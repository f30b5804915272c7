"""`python -m batchline.run_batch`: the same as `batchline run-batch`, for users of other batch runners."""

from __future__ import annotations

import sys

from batchline.cli import command

if __name__ == "__main__":
    command(["run-batch", *sys.argv[1:]])
