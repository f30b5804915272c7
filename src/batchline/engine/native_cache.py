"""The KV cache in the native kernels' layout.

A block's keys lie transposed, pairs of their numbers innermost, so that 16 positions are multiplied at once without a
horizontal sum; values lie in rows, pairs of positions innermost (`arguments.h`). Only the kernels read and write it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from batchline.engine.kv_cache import LayerSpec
from batchline.native.library import DTYPES, CacheArgs, NativeKernels

PANEL = 16
"""Block sizes and value dimensions come in multiples of this."""

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
    ) -> None:
        self.kernels = kernels
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._memory = [_Storage(spec, num_blocks, block_size, dtype) for spec in specs]
        self.layers = [
            CacheArgs(
                storage.keys.ctypes.data,
                storage.values.ctypes.data,
                block_size,
                spec.num_kv_heads,
                spec.key_dim,
                spec.value_dim,
            )
            for storage, spec in zip(self._memory, specs, strict=True)
        ]


def can_hold(specs: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels can work on such a cache."""
    fits = all(spec.key_dim <= MAX_KEY_DIM for spec in specs)
    return device.type == "cpu" and dtype in DTYPES and fits


def padded(spec: LayerSpec, dtype: torch.dtype) -> LayerSpec:
    """What the layer takes in this layout: keys of whole pairs, values of whole panels."""
    pair = 4 // dtype.itemsize
    return LayerSpec(
        spec.num_kv_heads,
        -(-spec.key_dim // pair) * pair,
        -(-spec.value_dim // PANEL) * PANEL,
        spec.sliding_window,
    )


class _Storage:
    """One layer's memory, as bytes. From numpy, whose zeros cost nothing until a page is written; they must be zeros
    because unwritten positions are read and weighed with 0, which a NaN would survive."""

    def __init__(self, spec: LayerSpec, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        size = padded(spec, dtype)
        per_number = num_blocks * block_size * spec.num_kv_heads * dtype.itemsize
        self.keys = np.zeros(per_number * size.key_dim, dtype=np.uint8)
        self.values = np.zeros(per_number * size.value_dim, dtype=np.uint8)
