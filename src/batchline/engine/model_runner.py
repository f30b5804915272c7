"""Runs one packed forward pass: from a packed step to the logits of the rows that need them.

Makes the step's layout of attention (in numpy, then one transfer each), calls the `transformers` model, and returns
logits only for the wanted rows. Holds the KV cache; knows nothing about sequences, sampling or scheduling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol

import numpy as np
import torch

from batchline.engine.attention import DecodeGroup, PrefillChunk, StepLayout, TorchLayout
from batchline.engine.kv_cache import KVCache
from batchline.engine.native_cache import NativeKVCache, NativeLayout
from batchline.engine.step import PackedStep

MAX_PADDING = 1.25
"""Decodes form a group if its longest context is at most this many times its shortest."""


Decode = tuple[int, int, np.ndarray]
"""A decode's row, the length of its context, and its blocks."""


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """A packed step on the model's device. tokens, positions: (num_tokens,) int64. rows: whose logits are wanted; None
    for all."""

    tokens: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor | None
    layout: StepLayout


@dataclass(frozen=True, slots=True)
class StepResult:
    """logits: (num_rows, vocab) float32 of the wanted rows; hidden: (num_rows, hidden_size), the inputs of the
    language-model head for them."""

    logits: torch.Tensor
    hidden: torch.Tensor


class StepRunner(Protocol):
    """Computes steps of one model over one cache."""

    def run(self, step: PackedStep) -> StepResult:
        """Compute the step. The result has a row for each of `step.rows`. The next step may overwrite the result, and
        the caller may modify it."""


class Forward:
    """One model's forward pass. It hooks the model's head only during calls, so the model stays unchanged."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, inputs: ModelInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits, hidden), a row for each wanted row. Neither is a copy."""
        given: list[torch.Tensor] = []
        hook = self._model.get_output_embeddings().register_forward_pre_hook(
            lambda _head, arguments: given.append(arguments[0])
        )
        try:
            output = self._model(
                input_ids=inputs.tokens[None],
                position_ids=inputs.positions[None],
                use_cache=False,
                logits_to_keep=0 if inputs.rows is None else inputs.rows,
                step_layout=inputs.layout,
            )
        finally:
            hook.remove()
        (hidden,) = given  # every causal model calls its head, once
        return output.logits[0], hidden[0]


class ModelRunner:
    """Runs steps over a cache in torch's layout or in the native kernels' layout."""

    def __init__(self, forward: Forward, cache: KVCache | NativeKVCache) -> None:
        self._forward = forward
        self._cache = cache

    @torch.inference_mode()
    def run(self, step: PackedStep) -> StepResult:
        """See `StepRunner.run`."""
        if len(step.blocks_to_clear):
            self._cache.clear(step.blocks_to_clear)
        inputs = ModelInputs(
            self._send(step.tokens), self._send(step.positions), self._send(step.rows), self._layout(step)
        )
        logits, hidden = self._forward(inputs)
        return StepResult(logits.float(), hidden)

    def _layout(self, step: PackedStep) -> StepLayout:
        cache, slots = self._cache, self._send(step.slots)
        if isinstance(cache, NativeKVCache):
            return NativeLayout(cache, slots, self._send(step.chunks), self._send(step.tables))
        decodes: list[Decode] = []
        prefills: list[PrefillChunk] = []
        for row, length, end, first in step.chunks.tolist():
            table = step.tables[first : first - (-end // cache.block_size)]
            if length == 1:
                decodes.append((row, end, table))
            else:
                prefills.append(PrefillChunk(row, length, end, self._send(table) if end > length else None))
        groups = tuple(self._decode_group(group) for group in _by_length(decodes))
        return TorchLayout(cache, slots, groups, tuple(prefills))

    def _decode_group(self, decodes: list[Decode]) -> DecodeGroup:
        rows, lengths, tables = zip(*decodes, strict=True)
        return DecodeGroup(self._send(np.array(rows)), self._send(_padded(tables)), self._send(np.array(lengths)))

    def _send(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._cache.device, non_blocking=True)


def _by_length(decodes: list[Decode]) -> list[list[Decode]]:
    """Group decodes by context length, so that a group needs little padding."""
    groups: list[list[Decode]] = []
    for decode in sorted(decodes, key=itemgetter(1)):
        if groups and len(decode[2]) <= MAX_PADDING * len(groups[-1][0][2]):
            groups[-1].append(decode)
        else:
            groups.append([decode])
    return groups


def _padded(tables: Sequence[np.ndarray]) -> np.ndarray:
    """(n, longest) int64. Padding is masked, but NaN would survive that, so it repeats one of the row's own blocks."""
    padded = np.empty((len(tables), max(len(table) for table in tables)), dtype=np.int64)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
        padded[row, len(table) :] = table[-1]
    return padded
