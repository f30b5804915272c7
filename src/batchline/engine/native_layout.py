"""A packed step in the form for the native kernels: where each row's keys go, and what each sequence may read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from batchline.engine.native_cache import NativeKVCache


@dataclass(frozen=True, slots=True)
class NativeLayout:
    """slots: (num_tokens,) int64. segments: (num_sequences, 4) int64, see `NativeKernels.attention`.
    tables: int64, the sequences' block numbers one after another."""

    cache: NativeKVCache
    slots: torch.Tensor
    segments: torch.Tensor
    tables: torch.Tensor

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Write the step's keys and values, then attend. Shapes as `attention.TorchLayout.attend`."""
        queries, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (queries, keys, values))
        self.cache.kernels.rotary_and_write(queries, keys, values, self.slots, self.cache.layers[layer])
        out = queries.new_empty(queries.shape[0], queries.shape[1], values.shape[-1])
        self.read(layer, queries, out, scale, sliding_window, softcap)
        return out

    def read(
        self,
        layer: int,
        queries: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        sliding_window: int | None,
        softcap: float | None = None,
    ) -> None:
        """Attend to the cache. queries: (num_tokens, heads, key_dim); out: (num_tokens, heads, value_dim)."""
        self.cache.kernels.attention(
            queries,
            out,
            self.segments,
            self.tables,
            self.cache.layers[layer],
            scale=scale,
            window=sliding_window,
            softcap=softcap,
        )
