"""Calls a `transformers` model for one packed step and keeps what its language-model head was given."""

from __future__ import annotations

from typing import Any

import torch

from batchline.engine.attention import StepLayout


class Forward:
    """One model's forward pass. Hooks the model's head, so there is one for each model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._hidden: torch.Tensor | None = None
        model.get_output_embeddings().register_forward_pre_hook(self._keep_hidden)

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, layout: StepLayout, rows: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits, hidden), a row for each of `rows`, or of the whole step for None. tokens, positions: (num_tokens,)
        int64. Neither output is a copy."""
        output = self._model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=0 if rows is None else rows,
            step_layout=layout,
        )
        hidden, self._hidden = self._hidden, None
        assert hidden is not None  # the hook has run: every causal model calls its head
        return output.logits[0], hidden[0]

    def _keep_hidden(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self._hidden = inputs[0]
