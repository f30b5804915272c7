"""A scheduled step as plain arrays: what a runner needs to compute it, on any device and in any process.

Only numpy, so a step can be pickled. Query rows are packed without padding: the chunks one after another, in the step's
order. `ModelRunner` and `CudaRunner` make their layouts of attention from it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from batchline.engine.scheduler import Step


@dataclass(frozen=True, slots=True, eq=False)
class PackedStep:
    """One forward pass. All arrays are int64.

    tokens, positions: (num_tokens,). slots: (num_tokens,), where the cache stores each row's keys and values.
    rows: the rows whose logits are wanted, in order.
    chunks: (num_chunks, 4), each chunk's first row, its number of rows, the position after its last one, and where its
    sequence's block numbers start in `tables`.
    tables: the block numbers of each chunk's positions up to its end, one chunk after another.
    blocks_to_clear: blocks to set to 0 first.
    """

    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    rows: np.ndarray
    chunks: np.ndarray
    tables: np.ndarray
    blocks_to_clear: np.ndarray

    @property
    def num_tokens(self) -> int:
        """New positions of all chunks."""
        return len(self.tokens)


def pack(step: Step, block_size: int) -> PackedStep:
    """The step's arrays, for a cache with blocks of `block_size` positions."""
    tokens = array("q")
    tables: list[int] = []
    chunks: list[tuple[int, int, int, int]] = []
    num_rows: list[int] = []
    for chunk in step.chunks:
        sequence, start, end = chunk.sequence, chunk.start, chunk.end
        chunks.append((len(tokens), end - start, end, len(tables)))
        tokens += sequence.token_ids[start:end]
        tables += sequence.block_table[: -(-end // block_size)]
        num_rows.append(chunk.num_wanted_rows)
    packed_chunks = np.array(chunks, dtype=np.int64)
    first_rows, lengths, ends, first_blocks = packed_chunks.T
    positions = _ranges(ends - lengths, lengths)
    flat_tables = np.array(tables, dtype=np.int64)
    blocks = flat_tables[np.repeat(first_blocks, lengths) + positions // block_size]
    counts = np.array(num_rows, dtype=np.int64)
    return PackedStep(
        tokens=np.frombuffer(tokens, dtype=np.int64),
        positions=positions,
        slots=blocks * block_size + positions % block_size,
        rows=_ranges(first_rows + lengths - counts, counts),
        chunks=packed_chunks,
        tables=flat_tables,
        blocks_to_clear=np.array(step.blocks_to_clear, dtype=np.int64),
    )


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The integers [start, start + length) of each pair, one range after another."""
    ends = np.cumsum(lengths)
    return np.asarray(np.arange(ends[-1]) + np.repeat(starts - ends + lengths, lengths))
