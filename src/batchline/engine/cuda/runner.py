"""Runs the steps of one model on CUDA: decodes by graphs if there are any, everything else launch by launch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from batchline.engine.cuda.graphs import DecodeGraphs
from batchline.engine.cuda.layout import send, send_step
from batchline.engine.cuda.packed_step import PackedStep, pack
from batchline.engine.cuda.paged_attention import queries_per_tile
from batchline.engine.forward import Forward
from batchline.engine.kv_cache import KVCache
from batchline.engine.model_loader import LoadedModel
from batchline.engine.model_runner import StepResult
from batchline.engine.scheduler import Step


class CudaRunner:
    """Runs steps over a cache in torch's layout. Results of decode steps are overwritten by the next one."""

    def __init__(
        self,
        loaded: LoadedModel,
        forward: Forward,
        cache: KVCache,
        *,
        use_flash: bool,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """use_flash: whether prompts that start in a step use FlashAttention, if layers allow it. graphs: for the same
        model and cache."""
        self._device = loaded.device
        self._forward = forward
        self._cache = cache
        self._use_flash = use_flash
        self._graphs = graphs
        self._max_queries = queries_per_tile(max(group.num_heads // group.num_kv_heads for group in loaded.groups))

    @torch.inference_mode()
    def run(self, step: Step) -> StepResult:
        """See `StepRunner.run`."""
        packed = pack(step, self._cache.block_size, self._max_queries)
        if self._graphs is not None and packed.is_decode and len(packed.tokens) <= self._graphs.max_num_seqs:
            return self._selected(packed, *self._graphs.run(packed))
        sent = send_step(packed, self._cache, self._device, self._max_queries, use_flash=self._use_flash)
        logits, hidden = self._forward(sent.tokens, sent.positions, sent.layout, sent.rows)
        return StepResult(logits.float(), hidden)

    def clear(self, blocks: Sequence[int]) -> None:
        """See `StepRunner.clear`."""
        self._cache.clear(blocks)

    def _selected(self, packed: PackedStep, logits: torch.Tensor, hidden: torch.Tensor) -> StepResult:
        """Select the wanted rows; in a step of decodes that is nearly always all of them."""
        if np.array_equal(packed.rows, np.arange(len(logits))):
            return StepResult(logits, hidden)
        rows = send(packed.rows, self._device)
        return StepResult(logits[rows], hidden[rows])
