"""A scheduled step as flat arrays: its rows, where they are written, and their tiles of attention.

Only numpy: the host computes everything that the kernels read and sends it at once, so it never waits for the device.
`kernels.py` describes tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from batchline.engine.model_runner import selected_rows
from batchline.engine.scheduler import Chunk, Step


@dataclass(frozen=True, slots=True)
class FreshRun:
    """Neighbouring chunks that start their sequences: query rows [bounds[0], bounds[-1]), chunk i being rows
    [bounds[i], bounds[i + 1]). bounds: (num_chunks + 1,) int64."""

    bounds: np.ndarray

    @property
    def longest(self) -> int:
        """Rows of its longest chunk."""
        return int(np.diff(self.bounds).max())


@dataclass(frozen=True, slots=True)
class PackedStep:
    """All int64. tokens, positions, slots: (num_tokens,); rows: the rows whose logits are wanted, in order.

    decodes: (n, 4) tiles of the chunks of one token. prefills: (n, 4) tiles of longer chunks: first the `num_chunked`
    tiles of chunks after a context, then those of `fresh`. tables: the concatenated block tables.
    """

    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    rows: np.ndarray
    decodes: np.ndarray
    prefills: np.ndarray
    num_chunked: int
    fresh: tuple[FreshRun, ...]
    tables: np.ndarray

    @property
    def is_decode(self) -> bool:
        """Whether every chunk is one token."""
        return len(self.prefills) == 0


def pack(step: Step, block_size: int, max_queries: int) -> PackedStep:
    """max_queries: the limit of a prefill's tile."""
    chunks = step.chunks
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    lengths = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int64)
    first_rows = np.cumsum(lengths) - lengths
    tables = [_table(chunk, block_size) for chunk in chunks]
    table_lengths = np.array([len(table) for table in tables], dtype=np.int64)
    table_starts = np.cumsum(table_lengths) - table_lengths
    flat_tables = np.concatenate(tables)
    owners = np.repeat(np.arange(len(chunks)), lengths)
    positions = np.arange(len(owners)) - first_rows[owners] + starts[owners]
    blocks = flat_tables[table_starts[owners] + positions // block_size]

    def tiles(indices: np.ndarray) -> np.ndarray:
        """The tiles of whole chunks, in the given order."""
        counts = -(-lengths[indices] // max_queries)
        chunk = np.repeat(indices, counts)
        offset = (np.arange(len(chunk)) - np.repeat(np.cumsum(counts) - counts, counts)) * max_queries
        size = np.minimum(max_queries, lengths[chunk] - offset)
        return np.stack([first_rows[chunk] + offset, size, starts[chunk] + offset, table_starts[chunk]], axis=1)

    chunked = tiles(np.flatnonzero((lengths > 1) & (starts > 0)))
    return PackedStep(
        tokens=np.concatenate([chunk.sequence.tokens_between(chunk.start, chunk.end) for chunk in chunks]),
        positions=positions,
        slots=blocks * block_size + positions % block_size,
        rows=np.concatenate([rows for _, rows in selected_rows(step)]),
        decodes=tiles(np.flatnonzero(lengths == 1)),
        prefills=np.concatenate([chunked, tiles(np.flatnonzero((lengths > 1) & (starts == 0)))]),
        num_chunked=len(chunked),
        fresh=tuple(_fresh_runs(chunks, first_rows)),
        tables=flat_tables,
    )


def _table(chunk: Chunk, block_size: int) -> np.ndarray:
    return np.array(chunk.sequence.block_table[: -(-chunk.end // block_size)], dtype=np.int64)


def _fresh_runs(chunks: Sequence[Chunk], first_rows: np.ndarray) -> Iterator[FreshRun]:
    """Runs of neighbouring chunks that start their sequences with more than one token."""
    bounds: list[int] = []
    for chunk, row in zip(chunks, first_rows.tolist(), strict=True):
        if chunk.start == 0 and chunk.num_tokens > 1:
            bounds = [*(bounds or [row]), row + chunk.num_tokens]
        elif bounds:
            yield FreshRun(np.array(bounds))
            bounds = []
    if bounds:
        yield FreshRun(np.array(bounds))
