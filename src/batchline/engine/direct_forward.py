"""The forward pass of a fused model without the Python of `transformers` around its layers.

A decode step of few rows takes some milliseconds. Wrappers, hooks, and masks that the kernels do not need take one or
two of them. Here a step is only the embedding, the rotary embedding, the fused layers, the last norm and the head.

A model may do more than that (multiply its embeddings or its logits, for example). So this pass is used only if it
gives the same bits as the model's own one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from batchline.engine.model_runner import Forward, ModelInputs
from batchline.engine.native_cache import NativeKVCache, NativeLayout

NUM_CHECKED = 6
"""Positions of the prompt that a model is checked with."""


class DirectForward:
    """Runs the parts of a fused model one after another. Takes steps of plain positions without media."""

    def __init__(self, model: Any) -> None:
        """model: fused, with one kind of rotary embedding."""
        decoder = model.model
        self._embed = decoder.embed_tokens
        self._rotary = decoder.rotary_emb
        (self._stack,) = decoder.layers
        self._norm = decoder.norm
        self._head = model.get_output_embeddings()

    def __call__(self, inputs: ModelInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits, hidden), a row for each wanted row."""
        embedded = self._embed(inputs.tokens)
        cos, sin = self._rotary(embedded[None], inputs.positions[None])
        x, delta = self._stack.run(embedded, [(cos[0], sin[0])], inputs.layout)
        if inputs.rows is not None and len(inputs.rows) < len(x):
            x, delta = x[inputs.rows], None if delta is None else delta[inputs.rows]
        hidden = self._norm.of_sum(x, delta, self._stack.residual_scale)
        return self._head(hidden), hidden


@torch.inference_mode()
def direct_forward(model: Any, own: Forward, cache: NativeKVCache, num_token_ids: int) -> DirectForward | None:
    """The direct pass of a fused model; None if the model does more.

    own: the model's own pass. cache: empty; its first block is used and cleared again.
    """
    (stack,) = model.model.layers
    if stack.has_rotary_by_type:
        return None
    direct = DirectForward(model)
    is_equal = all(_are_equal(direct, own, inputs) for inputs in _some_steps(cache, num_token_ids))
    cache.clear(np.array([0]))
    return direct if is_equal else None


def _are_equal(direct: DirectForward, own: Forward, inputs: ModelInputs) -> bool:
    expected = [result.clone() for result in own(inputs)]  # the next step overwrites them
    return all(map(torch.equal, direct(inputs), expected))


def _some_steps(cache: NativeKVCache, num_token_ids: int) -> Iterator[ModelInputs]:
    """A prompt of which all rows are wanted, and one of which only the last is."""
    count = min(NUM_CHECKED, cache.block_size)
    positions = torch.arange(count)
    segments = torch.tensor([[0, count, count, 0]])
    layout = NativeLayout(cache, slots=positions, segments=segments, tables=torch.zeros(1, dtype=torch.int64))
    tokens = (positions * math.isqrt(num_token_ids) + 3) % num_token_ids
    for rows in (positions, positions[-1:]):
        yield ModelInputs(tokens, positions, rows, layout)
