"""A large Parquet file in and out, with a SIGKILL in the middle: peak memory, time and what was kept.

    python benchmarks/table_runs.py [--rows 1000000] [--group-rows 1048576]

The command line runs with a backend that answers at once, so that only Batchline's own memory and time are measured.
After a quarter of the rows the process is killed with SIGKILL, and the same command finishes the run. Every row of the
output is compared with its input. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchline.backends.base import Answer, EndpointRequest
from batchline.backends.registry import register_backend
from batchline.testing import FakeBackend

_BLOCK_ROWS = 50_000


class InstantBackend(FakeBackend):
    """Echoes at once, and keeps no list of requests. Counts its answers in a file, which survives its process."""

    def __init__(self, count_file: str) -> None:
        super().__init__("fake")
        self._counts = os.open(count_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def identity(self) -> Mapping[str, str]:
        """The same for every count file."""
        return {"backend": "instant"}

    async def answer(self, request: EndpointRequest) -> Answer:
        """One byte of the count file is one answer."""
        answered = await super().answer(request)
        self.requests.clear()
        os.write(self._counts, b".")
        return answered


@register_backend("instant")
def _instant(_: Sequence[object], options: Mapping[str, str]) -> InstantBackend:
    return InstantBackend(options["count"])


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended. peak_mib: its resident memory."""

    status: int
    wall_s: float
    peak_mib: float


def write_table(path: Path, num_rows: int, group_rows: int) -> None:
    """Rows with a text of 40 words that is different in each row, and columns that only pass through."""
    rng = random.Random(0)
    words = [f"word{number}" for number in range(2000)]
    kinds = pa.array(["news", "review", "mail"]).dictionary_encode().dictionary
    schema = pa.schema(
        [
            ("id", pa.int64()),
            ("text", pa.string()),
            ("kind", pa.dictionary(pa.int8(), pa.string())),
            ("at", pa.timestamp("us")),
        ]
    )
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        pending: list[pa.Table] = []
        for first in range(0, num_rows, _BLOCK_ROWS):
            count = min(_BLOCK_ROWS, num_rows - first)
            ids = range(first, first + count)
            columns = [
                pa.array(ids, pa.int64()),
                pa.array([f"{number} {' '.join(rng.choices(words, k=40))}" for number in ids]),
                pa.DictionaryArray.from_arrays(pa.array([number % 3 for number in ids], pa.int8()), kinds),
                pa.array([1_700_000_000_000_000 + number for number in ids], pa.timestamp("us")),
            ]
            pending.append(pa.Table.from_arrays(columns, schema=schema))
            if sum(map(len, pending)) >= group_rows or first + count == num_rows:
                writer.write_table(pa.concat_tables(pending), row_group_size=group_rows)
                pending = []


def run(folder: Path, kill_after: int | None) -> Ended:
    """The command, in a process of its own. kill_after: how many answers it may give before it is killed."""
    count = folder / "count"
    command = [sys.executable, "-m", "batchline", "run-batch", "--backend-plugin", __file__, "--backend", "instant"]
    command += [
        "--backend-option",
        f"count={count}",
        "-i",
        str(folder / "in.parquet"),
        "-o",
        str(folder / "out.parquet"),
    ]
    command += ["--prompt-template", "Which kind is it? {{ text }}", "--system", "You sort texts.", "--quiet"]
    environment = {**os.environ, "BATCHLINE_STATE_DIR": str(folder / "state")}
    started = time.perf_counter()
    child = os.posix_spawn(sys.executable, command, environment)
    while kill_after is not None and not (count.exists() and count.stat().st_size >= kill_after):
        time.sleep(0.05)
    if kill_after is not None:
        os.kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    return Ended(status, time.perf_counter() - started, usage.ru_maxrss / 1024)


def rows_of(path: Path, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """The values of each row."""
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(8192, columns=list(columns)):
            yield from zip(*(batch.column(name).to_pylist() for name in columns), strict=True)


def check(folder: Path) -> int:
    """Compare every row of the output with its input. Returns the number of rows."""
    own = ("id", "text", "kind", "at")
    both = zip(
        rows_of(folder / "in.parquet", own), rows_of(folder / "out.parquet", (*own, "answer", "error")), strict=True
    )
    number = -1
    for number, (before, after) in enumerate(both):
        assert after[:4] == before
        assert after[4:] == (f"Which kind is it? {before[1]}", None)
        assert before[0] == number
    return number + 1


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--group-rows", type=int, default=1 << 20)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write_table(options.write, options.rows, options.group_rows)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # in a process of its own: Linux counts the memory of the process that starts a child as the child's peak
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--write", str(folder / "in.parquet")], check=True)
        size_mb = (folder / "in.parquet").stat().st_size / 1e6
        groups = pq.ParquetFile(folder / "in.parquet").num_row_groups
        print(f"{options.rows:,} rows, {size_mb:,.0f} MB of Parquet in {groups} row groups")
        killed = run(folder, options.rows // 4)
        num_first = (folder / "count").stat().st_size
        finished = run(folder, None)
        num_answers = (folder / "count").stat().st_size
        assert finished.status == 0, finished
        assert check(folder) == options.rows
        left = sorted(path.name for path in folder.iterdir())
        assert left == ["count", "in.parquet", "out.parquet", "state"], left
    print(f"killed   after {num_first:,} answers, {killed.wall_s:.1f} s, peak {killed.peak_mib:.0f} MiB")
    print(f"finished {finished.wall_s:.1f} s, peak {finished.peak_mib:.0f} MiB")
    print(f"{num_answers - options.rows:,} requests ran twice: those in flight at the kill")
    result = {"rows": options.rows, "mb": round(size_mb), "killed_peak_mib": round(killed.peak_mib)}
    result |= {"peak_mib": round(finished.peak_mib), "resumed_s": round(finished.wall_s, 1)}
    print(json.dumps(result | {"computed_twice": num_answers - options.rows}))


if __name__ == "__main__":
    main()
