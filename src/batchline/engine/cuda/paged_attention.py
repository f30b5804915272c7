"""Launches the Triton kernels for attention over the blocked cache.

Decodes are tiles (`kernels.py`) of one query. If they are too few to fill the device, their context is split among
programs. Prefill chunks are tiles with as many queries as give a program `PREFILL_ROWS` rows. The shapes of launches
depend on the layout's tensors, never on their contents, so a launch can be recorded in a CUDA graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from batchline.engine.cuda.kernels import attend_kernel, combine_kernel, write_kernel

TILE_FIELDS = 4
LOG2_E = math.log2(math.e)

MIN_LANES = 16
"""The smallest side of a matrix product in Triton."""

MAX_SPLITS = 32
"""Largest number of parts of a decode's context: with more, a part is shorter than what a program reads at once."""

PREFILL_ROWS = 64
"""Rows (queries times heads of a group) of a prefill's tile."""


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """How one layer attends. sliding_window: positions looked back on, the query's own included; None for all."""

    scale: float
    sliding_window: int | None
    softcap: float | None


def write_cache(
    keys: torch.Tensor,
    values: torch.Tensor,
    cached_keys: torch.Tensor,
    cached_values: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Store new positions. keys, values: (num_tokens, num_kv_heads, dim), their last dimension contiguous;
    cached_keys, cached_values: (num_blocks, block_size, num_kv_heads, dim); slots: (num_tokens,) int64."""
    num_tokens, num_kv_heads, key_dim = keys.shape
    value_dim = values.shape[2]
    write_kernel[(num_tokens,)](
        keys,
        values,
        cached_keys,
        cached_values,
        slots,
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        KV_HEADS=num_kv_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        HEAD_LANES=_power_of_two(num_kv_heads),
        KEY_LANES=_power_of_two(key_dim),
        VALUE_LANES=_power_of_two(value_dim),
    )


def attend_decodes(
    queries: torch.Tensor,
    cached_keys: torch.Tensor,
    cached_values: torch.Tensor,
    out: torch.Tensor,
    tiles: torch.Tensor,
    tables: torch.Tensor,
    params: AttentionParams,
    num_splits: int,
) -> None:
    """Attention of tiles of one query each, their contexts in `num_splits` parts (a power of two).

    queries: (num_tokens, num_heads, key_dim), last dimension contiguous; out: (num_tokens, num_heads, value_dim),
    contiguous, of which the tiles' rows are written.
    """
    num_heads, value_dim = out.shape[1:]
    rows = max(MIN_LANES, _power_of_two(num_heads // cached_keys.shape[2]))
    if num_splits == 1:
        _launch(queries, cached_keys, cached_values, out, None, tiles, tables, params, rows, 1)
        return
    parts = out.new_empty(len(tiles), num_heads, num_splits, value_dim, dtype=torch.float32)
    log_sums = out.new_empty(len(tiles), num_heads, num_splits, dtype=torch.float32)
    _launch(queries, cached_keys, cached_values, parts, log_sums, tiles, tables, params, rows, num_splits)
    combine_kernel[(len(tiles), num_heads)](
        parts,
        log_sums,
        out,
        tiles,
        HEADS=num_heads,
        VALUE_DIM=value_dim,
        VALUE_LANES=_power_of_two(value_dim),
        SPLITS=num_splits,
        FIELDS=TILE_FIELDS,
    )


def attend_prefills(
    queries: torch.Tensor,
    cached_keys: torch.Tensor,
    cached_values: torch.Tensor,
    out: torch.Tensor,
    tiles: torch.Tensor,
    tables: torch.Tensor,
    params: AttentionParams,
    max_queries: int,
) -> None:
    """Attention of tiles of at most `max_queries` queries. Shapes as `attend_decodes`."""
    group = queries.shape[1] // cached_keys.shape[2]
    rows = max(MIN_LANES, _power_of_two(group * max_queries))
    _launch(queries, cached_keys, cached_values, out, None, tiles, tables, params, rows, 1)


def queries_per_tile(group: int) -> int:
    """Queries of a prefill's tile if `group` query heads share a KV head."""
    return max(1, PREFILL_ROWS // group)


def choose_num_splits(num_tiles: int, num_kv_heads: int, num_processors: int) -> int:
    """Parts of each decode's context, so that there are about two programs per processor of the device.

    Depends on nothing that changes between replays of a graph. A part without positions costs almost nothing.
    """
    wanted = 2 * num_processors // (num_tiles * num_kv_heads)
    return min(MAX_SPLITS, 1 << max(0, wanted.bit_length() - 1))


def _launch(
    queries: torch.Tensor,
    cached_keys: torch.Tensor,
    cached_values: torch.Tensor,
    out: torch.Tensor,
    log_sums: torch.Tensor | None,
    tiles: torch.Tensor,
    tables: torch.Tensor,
    params: AttentionParams,
    rows: int,
    num_splits: int,
) -> None:
    """out: (num_tokens, num_heads, value_dim), or with splits their parts (num_tiles, num_heads, splits, value_dim)."""
    block_size, num_kv_heads, key_dim = cached_keys.shape[1:]
    num_heads = queries.shape[1]
    value_dim = cached_values.shape[3]
    scale, softcap = params.scale * LOG2_E, 1.0
    if params.softcap is not None:
        scale, softcap = params.scale / params.softcap, params.softcap * LOG2_E
    attend_kernel[(len(tiles), num_kv_heads, num_splits)](
        queries,
        cached_keys,
        cached_values,
        out,
        log_sums,
        tiles,
        tables,
        queries.stride(0),
        queries.stride(1),
        scale,
        softcap,
        HEADS=num_heads,
        GROUP=num_heads // num_kv_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEY_LANES=max(MIN_LANES, _power_of_two(key_dim)),
        VALUE_LANES=max(MIN_LANES, _power_of_two(value_dim)),
        ROWS=rows,
        KEYS=_keys_at_once(max(key_dim, value_dim) * queries.element_size()),
        BLOCK_SIZE=block_size,
        WINDOW=params.sliding_window or 0,
        HAS_SOFTCAP=params.softcap is not None,
        SPLITS=num_splits,
        FIELDS=TILE_FIELDS,
        num_warps=4,
        num_stages=2,
    )


def _keys_at_once(bytes_per_key: int) -> int:
    """How many keys a program reads at once: two stages of keys and values fit into 64 KiB of shared memory."""
    return max(MIN_LANES, min(64, 16384 // _power_of_two(bytes_per_key)))


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
