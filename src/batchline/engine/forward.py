"""Calls a `transformers` model for one packed step, and captures the input of its language-model head."""

from __future__ import annotations

from typing import Any

import torch

from batchline.engine.attention import StepLayout


class Forward:
    """One model's forward pass. It hooks the model's head only during calls, so the model stays unchanged."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, layout: StepLayout, rows: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits, hidden), a row for each of `rows`, or of the whole step for None. tokens, positions: (num_tokens,)
        int64. Neither output is a copy."""
        given: list[torch.Tensor] = []
        hook = self._model.get_output_embeddings().register_forward_pre_hook(
            lambda _head, inputs: given.append(inputs[0])
        )
        try:
            output = self._model(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=0 if rows is None else rows,
                step_layout=layout,
            )
        finally:
            hook.remove()
        (hidden,) = given  # every causal model calls its head, once
        return output.logits[0], hidden[0]
