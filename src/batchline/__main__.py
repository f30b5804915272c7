"""`python -m batchline`: the command line."""

from __future__ import annotations

from batchline.cli import command

if __name__ == "__main__":
    command()
