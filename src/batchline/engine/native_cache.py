"""The KV cache in the native kernels' layout.

A block holds the keys and values of all layers for its positions, so that a cache uses only as much memory as it has
filled. Keys are stored transposed, with pairs of numbers innermost, so that 16 positions are multiplied at once without
a horizontal sum. Values are stored in rows, with pairs of positions innermost, after the keys of their head
(`arguments.h`). Only the kernels read and write the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from batchline.engine.cache_memory import CacheMemory
from batchline.engine.kv_cache import LayerSpec
from batchline.engine.memory import LEDGER, fresh_zeros
from batchline.native.library import DTYPES, CacheArgs, NativeKernels
from batchline.native.packing import PANEL

MAX_KEY_DIM = 1024
"""`kMaxKeyDim` of the kernels."""


class NativeKVCache:
    """layers[i] describes layer i's part to the kernels."""

    def __init__(
        self,
        kernels: NativeKernels,
        specs: Sequence[LayerSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        memory: CacheMemory | None = None,
    ) -> None:
        self.kernels = kernels
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._dtype = dtype
        in_layers = [padded(spec, dtype).num_elements * block_size for spec in specs]
        block_stride = sum(in_layers)
        # zeros, since unwritten positions are read and weighed with 0, which a NaN would survive
        num_bytes = num_blocks * block_stride * dtype.itemsize
        own = fresh_zeros(num_bytes) if memory is None else memory.take(num_bytes)
        self._memory = LEDGER.promise(own)
        self.layers = [
            CacheArgs(
                self._memory.ctypes.data + offset * dtype.itemsize,
                block_stride,
                block_size,
                spec.num_kv_heads,
                spec.key_dim,
                spec.value_dim,
            )
            for spec, offset in zip(specs, accumulate([0, *in_layers]), strict=False)
        ]

    def fill(self, value: float) -> None:
        """Set all numbers of all positions."""
        torch.from_numpy(self._memory).view(self._dtype).fill_(value)

    def clear(self, blocks: Sequence[int]) -> None:
        """Set whole blocks to 0."""
        self._memory.reshape(self.num_blocks, -1)[list(blocks)] = 0


def can_hold(specs: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels support such a cache."""
    fits = all(spec.key_dim <= MAX_KEY_DIM for spec in specs)
    return device.type == "cpu" and dtype in DTYPES and fits


def padded(spec: LayerSpec, dtype: torch.dtype) -> LayerSpec:
    """The layer's sizes in this layout: keys padded to whole pairs, values to whole panels."""
    pair = 4 // dtype.itemsize
    return LayerSpec(
        spec.num_kv_heads,
        -(-spec.key_dim // pair) * pair,
        -(-spec.value_dim // PANEL) * PANEL,
        spec.sliding_window,
    )
