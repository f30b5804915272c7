"""The forward pass of a fused model without the Python of `transformers` around its layers.

A decode step of few rows takes some milliseconds. Wrappers, hooks, and masks that the kernels do not need take one or
two of them. Here a step is only the embedding, the rotary embedding, the fused layers, the last norm and the head.

A model may do more than that (multiply its embeddings or its logits, for example). So this pass is used only if it
gives the same bits as the model's own one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from batchline.engine.model_runner import Forward, ModelInputs, StepResult
from batchline.engine.native_cache import NativeKVCache, NativeLayout
from batchline.engine.native_head import NativeHead
from batchline.engine.row_ops import argmax

logger = logging.getLogger(__name__)

NUM_CHECKED = 6
"""Positions of the prompt that a model is checked with."""


class DirectForward:
    """Runs the parts of a fused model one after another. Takes steps of plain positions without media."""

    def __init__(self, model: Any, num_token_ids: int) -> None:
        """model: fused, with one kind of rotary embedding. num_token_ids: tokens from this one on are never chosen."""
        decoder = model.model
        self._embed = decoder.embed_tokens
        self._rotary = decoder.rotary_emb
        (self._stack,) = decoder.layers
        self._norm = decoder.norm
        self._head = model.get_output_embeddings()
        self.num_token_ids = num_token_ids

    def run(self, inputs: ModelInputs, *, wants_logits: bool) -> StepResult:
        """The logits of the wanted rows, or only their most likely tokens if the head can find them."""
        hidden = self._hidden(inputs)
        if not wants_logits and isinstance(self._head, NativeHead):
            return StepResult(None, hidden, self._head.most_likely(hidden, self.num_token_ids))
        return StepResult(self._head(hidden).float(), hidden)

    def _hidden(self, inputs: ModelInputs) -> torch.Tensor:
        """What the head gets, (num_rows, hidden)."""
        embedded = self._embed(inputs.tokens)
        cos, sin = self._rotary(embedded[None], inputs.positions[None])
        x, delta = self._stack.run(embedded, [(cos[0], sin[0])], inputs.layout)
        if inputs.rows is not None and len(inputs.rows) < len(x):
            x, delta = x[inputs.rows], None if delta is None else delta[inputs.rows]
        normed: torch.Tensor = self._norm.of_sum(x, delta, self._stack.residual_scale)
        return normed


@torch.inference_mode()
def direct_forward(model: Any, own: Forward, cache: NativeKVCache, num_token_ids: int) -> DirectForward | None:
    """The direct pass of a fused model; None if its results differ from those of the model's own pass.

    cache: empty; its first block is used and cleared again.
    """
    (stack,) = model.model.layers
    if stack.has_rotary_by_type:
        return None
    direct = DirectForward(model, num_token_ids)
    try:
        is_equal = all(_are_equal(direct, own, inputs) for inputs in _some_steps(cache, num_token_ids))
    except Exception:  # the model's parts may take other arguments
        logger.debug("the direct forward pass failed", exc_info=True)
        is_equal = False
    cache.clear(np.array([0]))
    logger.debug("steps run %s", "directly" if is_equal else "through the model's own forward pass")
    return direct if is_equal else None


def _are_equal(direct: DirectForward, own: Forward, inputs: ModelInputs) -> bool:
    """Whether logits, inputs of the head and chosen tokens are those of the model's own pass."""
    logits, hidden = (result.clone() for result in own(inputs))  # the next step overwrites them
    chosen = direct.run(inputs, wants_logits=False)
    result = direct.run(inputs, wants_logits=True)
    if chosen.tokens is not None and not torch.equal(chosen.tokens, argmax(logits[:, : direct.num_token_ids])):
        return False
    assert result.logits is not None
    return torch.equal(result.logits, logits.float()) and torch.equal(result.hidden, hidden)


def _some_steps(cache: NativeKVCache, num_token_ids: int) -> Iterator[ModelInputs]:
    """A prompt of which all rows are wanted, and one of which only the last is."""
    positions = torch.arange(NUM_CHECKED)
    segments = torch.tensor([[0, NUM_CHECKED, NUM_CHECKED, 0]])
    layout = NativeLayout(cache, slots=positions, segments=segments, tables=torch.zeros(1, dtype=torch.int64))
    tokens = (positions * math.isqrt(num_token_ids) + 3) % num_token_ids
    for rows in (positions, positions[-1:]):
        yield ModelInputs(tokens, positions, rows, layout)
