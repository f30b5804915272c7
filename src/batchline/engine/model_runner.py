"""Runs one packed forward pass: from a step's chunks to the logits of the positions that need them.

Builds the step's input rows and their layout (in numpy, then one transfer each), calls the `transformers` model, and
returns logits only for the requested rows. Holds the KV cache; knows nothing about sampling or scheduling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from batchline.engine.attention import DecodeGroup, PrefillChunk, StepLayout, TorchLayout
from batchline.engine.forward import Forward
from batchline.engine.kv_cache import KVCache
from batchline.engine.model_loader import LoadedModel
from batchline.engine.native_cache import NativeKVCache
from batchline.engine.native_layout import NativeLayout
from batchline.engine.scheduler import Chunk, Step

MAX_PADDING = 1.25
"""Decodes form a group if its longest context is at most this many times its shortest."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """logits: (num_rows, vocab) float32 of the selected rows; hidden: (num_rows, hidden_size), the inputs of the
    language-model head for them."""

    logits: torch.Tensor
    hidden: torch.Tensor


class StepRunner(Protocol):
    """Computes steps of one model over one cache."""

    def run(self, step: Step) -> StepResult:
        """Compute the step. The result has rows for each chunk in order: its last position if it `is_last`, or every
        position if prompt log-probabilities are wanted (see `selected_rows`). The next step may overwrite the result,
        and the caller may modify it."""

    def clear(self, blocks: Sequence[int]) -> None:
        """Set blocks of the cache to 0."""


class ModelRunner:
    """Runs steps over a cache in torch's layout or in the native kernels' layout."""

    def __init__(self, loaded: LoadedModel, cache: KVCache | NativeKVCache, forward: Forward | None = None) -> None:
        """forward: the model's, if it already exists."""
        self._forward = forward or Forward(loaded.model)
        self._device = loaded.device
        self._cache = cache

    @torch.inference_mode()
    def run(self, step: Step) -> StepResult:
        """See `StepRunner.run`."""
        chunks = step.chunks
        tokens = np.concatenate([chunk.sequence.tokens_between(chunk.start, chunk.end) for chunk in chunks])
        positions = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks])
        rows = np.concatenate([rows for _, rows in selected_rows(step)])
        logits, hidden = self._forward(
            self._send(tokens), self._send(positions), self._layout(chunks, positions), self._send(rows)
        )
        return StepResult(logits.float(), hidden)

    def clear(self, blocks: Sequence[int]) -> None:
        """See `StepRunner.clear`."""
        self._cache.clear(blocks)

    def _layout(self, chunks: Sequence[Chunk], positions: np.ndarray) -> StepLayout:
        size = self._cache.block_size
        tables = [np.array(chunk.sequence.block_table[: -(-chunk.end // size)], dtype=np.int64) for chunk in chunks]
        lengths = np.array([chunk.num_tokens for chunk in chunks])
        owners = np.repeat(np.arange(len(chunks)), lengths)
        flat_tables = np.concatenate(tables)
        starts = np.cumsum([0] + [len(table) for table in tables[:-1]])
        slots = self._send(flat_tables[starts[owners] + positions // size] * size + positions % size)
        first_rows = np.cumsum(lengths) - lengths
        if isinstance(self._cache, NativeKVCache):
            segments = np.stack([first_rows, lengths, [chunk.end for chunk in chunks], starts], axis=1)
            return NativeLayout(self._cache, slots, self._send(segments), self._send(flat_tables))
        return self._torch_layout(self._cache, slots, chunks, tables, first_rows)

    def _torch_layout(
        self,
        cache: KVCache,
        slots: torch.Tensor,
        chunks: Sequence[Chunk],
        tables: list[np.ndarray],
        first_rows: np.ndarray,
    ) -> TorchLayout:
        decodes = [index for index, chunk in enumerate(chunks) if chunk.num_tokens == 1]
        prefills = tuple(
            PrefillChunk(
                row=int(first_rows[index]),
                num_queries=chunk.num_tokens,
                context=chunk.end,
                blocks=self._send(tables[index]) if chunk.start > 0 else None,
            )
            for index, chunk in enumerate(chunks)
            if chunk.num_tokens > 1
        )
        groups = tuple(self._decode_groups(chunks, decodes, tables, first_rows))
        return TorchLayout(cache, slots, groups, prefills)

    def _decode_groups(
        self, chunks: Sequence[Chunk], decodes: list[int], tables: list[np.ndarray], first_rows: np.ndarray
    ) -> list[DecodeGroup]:
        """Group decodes by context length, so that a group needs little padding."""
        groups: list[list[int]] = []
        for index in sorted(decodes, key=lambda i: chunks[i].end):
            if groups and len(tables[index]) <= MAX_PADDING * len(tables[groups[-1][0]]):
                groups[-1].append(index)
            else:
                groups.append([index])
        return [
            DecodeGroup(
                rows=self._send(first_rows[group]),
                blocks=self._send(_padded([tables[index] for index in group])),
                lengths=self._send(np.array([chunks[index].end for index in group])),
            )
            for group in groups
        ]

    def _send(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def selected_rows(step: Step) -> list[tuple[Chunk, np.ndarray]]:
    """The packed rows whose logits are needed, by chunk; chunks that need none have an empty array."""
    selected = []
    first = 0
    for chunk in step.chunks:
        end = first + chunk.num_tokens
        if chunk.sequence.wants_prompt_logprobs and chunk.start < chunk.sequence.num_prompt_tokens:
            rows = np.arange(first, end)
        elif chunk.is_last:
            rows = np.arange(end - 1, end)
        else:
            rows = np.arange(0)
        selected.append((chunk, rows))
        first = end
    return selected


def _padded(tables: list[np.ndarray]) -> np.ndarray:
    """(n, longest) int64. Padding is masked, but NaN would survive that, so it repeats one of the row's own blocks."""
    padded = np.empty((len(tables), max(len(table) for table in tables)), dtype=np.int64)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
        padded[row, len(table) :] = table[-1]
    return padded
