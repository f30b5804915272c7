"""A step's arrays: which rows go where, and which tiles of attention they make."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchline.engine.cuda.packed_step import PackedStep, pack
from batchline.engine.request import GenerationRequest, SamplingParams
from batchline.engine.scheduler import Chunk, Step
from batchline.engine.sequence import Sequence

BLOCK_SIZE = 4


def chunk(start: int, end: int, first_block: int, *, num_tokens: int | None = None) -> Chunk:
    """Positions [start, end) of a sequence whose token at position p is 100 + p, in blocks from `first_block` on."""
    tokens = tuple(range(100, 100 + (num_tokens or end)))
    request = GenerationRequest(
        request_id=str(first_block), prompt_token_ids=tokens, sampling=SamplingParams(max_tokens=1)
    )
    sequence = Sequence(request, seed=0)
    sequence.block_table = list(range(first_block, first_block + -(-len(tokens) // BLOCK_SIZE)))
    return Chunk(sequence, start, end)


def packed(*chunks: Chunk, max_queries: int = 4) -> PackedStep:
    return pack(Step(chunks), BLOCK_SIZE, max_queries)


def test_a_mixed_step() -> None:
    step = packed(chunk(9, 10, 50), chunk(2, 9, 20), chunk(0, 6, 30), chunk(0, 3, 40, num_tokens=5))
    assert step.tokens.tolist() == [109, *range(102, 109), *range(100, 106), *range(100, 103)]
    assert step.positions.tolist() == [9, *range(2, 9), *range(6), *range(3)]
    assert step.slots[:3].tolist() == [52 * 4 + 1, 20 * 4 + 2, 20 * 4 + 3]
    assert step.rows.tolist() == [0, 7, 13]  # the last chunk does not end its sequence
    assert step.tables.tolist() == [50, 51, 52, 20, 21, 22, 30, 31, 40]
    assert step.decodes.tolist() == [[0, 1, 9, 0]]
    assert step.prefills.tolist() == [[1, 4, 2, 3], [5, 3, 6, 3], [8, 4, 0, 6], [12, 2, 4, 6], [14, 3, 0, 8]]
    assert step.num_chunked == 2
    assert [run.bounds.tolist() for run in step.fresh] == [[8, 14, 17]]
    assert step.fresh[0].longest == 6
    assert not step.is_decode


def test_chunks_with_a_context_divide_the_runs_of_those_without() -> None:
    step = packed(chunk(0, 2, 1), chunk(0, 3, 2), chunk(4, 6, 3), chunk(0, 2, 5), chunk(0, 1, 6))
    assert [run.bounds.tolist() for run in step.fresh] == [[0, 2, 5], [7, 9]]


def test_decodes_alone() -> None:
    step = packed(chunk(9, 10, 50), chunk(0, 1, 20), chunk(3, 4, 30, num_tokens=9))
    assert step.is_decode
    assert step.prefills.shape == (0, 4)
    assert step.decodes.tolist() == [[0, 1, 9, 0], [1, 1, 0, 3], [2, 1, 3, 4]]
    assert step.rows.tolist() == [0, 1]


@given(
    bounds=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=6),
    max_queries=st.integers(1, 7),
)
def test_each_row_is_in_one_tile_that_says_its_position(bounds: list[tuple[int, int]], max_queries: int) -> None:
    chunks = [chunk(start, start + length, 10 * index) for index, (start, length) in enumerate(bounds)]
    step = packed(*chunks, max_queries=max_queries)
    positions = np.full(len(step.tokens), -1)
    for row, num_queries, first_position, table in [*step.decodes.tolist(), *step.prefills.tolist()]:
        assert 1 <= num_queries <= max_queries
        rows = np.arange(row, row + num_queries)
        assert (positions[rows] == -1).all()
        positions[rows] = first_position + rows - row
        blocks = step.tables[table + positions[rows] // BLOCK_SIZE]
        assert (step.slots[rows] == blocks * BLOCK_SIZE + positions[rows] % BLOCK_SIZE).all()
    assert (positions == step.positions).all()
    assert (step.tokens == 100 + positions).all()
