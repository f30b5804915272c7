"""Keys and values of every layer, in blocks of `block_size` positions.

Owns the tensors; knows nothing about sequences. A *slot* is one position: block number * block_size + offset. Layers
may have different numbers of heads and head sizes; the probe of the model finds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from batchline.config import CacheConfig
from batchline.engine.memory import LEDGER, fresh_zeros


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The data that one attention layer stores per position. sliding_window: positions it looks back, None for all.
    group: query heads that share a key-value head."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    sliding_window: int | None = None
    group: int = 1

    @property
    def num_elements(self) -> int:
        """Elements per position, keys and values together."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


class KVCache:
    """keys[layer]: (num_blocks, block_size, num_kv_heads, key_dim); values[layer] likewise with value_dim."""

    def __init__(
        self, specs: Sequence[LayerSpec], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.keys = [_blocks(num_blocks, block_size, s.num_kv_heads, s.key_dim, dtype, device) for s in specs]
        self.values = [_blocks(num_blocks, block_size, s.num_kv_heads, s.value_dim, dtype, device) for s in specs]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store new positions. slots: (num_tokens,) int64; keys, values: (num_tokens, num_kv_heads, dim)."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, values)

    def clear(self, blocks: Sequence[int]) -> None:
        """Set whole blocks to 0."""
        numbers = torch.tensor(blocks, dtype=torch.int64, device=self.keys[0].device)
        for tensor in (*self.keys, *self.values):
            tensor.index_fill_(0, numbers, 0)

    def gather(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of whole blocks. blocks: (..., n) int64; returns (..., n * block_size, num_kv_heads, dim) twice."""
        return _gather(self.keys[layer], blocks), _gather(self.values[layer], blocks)


def bytes_per_block(specs: Sequence[LayerSpec], block_size: int, dtype: torch.dtype) -> int:
    """Size of one block over all layers."""
    return block_size * dtype.itemsize * sum(spec.num_elements for spec in specs)


def choose_num_blocks(
    config: CacheConfig, block_bytes: int, *, max_model_len: int, max_num_seqs: int, free_bytes: int
) -> int:
    """The number of blocks for the configured size, or else for the free memory, up to the largest useful size.

    That is `max_num_seqs` sequences of `max_model_len` positions, since more are never in use at once. Blocks not in
    use hold prefixes for reuse.
    """
    useful = max_num_seqs * -(-max_model_len // config.block_size)
    if config.num_bytes is not None:
        return max(1, config.num_bytes // block_bytes)
    return max(1, min(useful, int(free_bytes * config.memory_utilization) // block_bytes))


def _blocks(count: int, size: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # zeros, not empty: unused positions of a block are read and masked, and a NaN there would survive the mask. On a
    # CPU a mapping of its own, which takes no memory until it is written; torch writes its zeros at once.
    if device.type != "cpu":
        return torch.zeros(count, size, heads, dim, dtype=dtype, device=device)
    memory = LEDGER.promise(fresh_zeros(count * size * heads * dim * dtype.itemsize))
    return torch.from_numpy(memory).view(dtype).view(count, size, heads, dim)


def _gather(blocks: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    picked = blocks.index_select(0, numbers.flatten())
    return picked.view(*numbers.shape[:-1], numbers.shape[-1] * blocks.shape[1], *blocks.shape[2:])
