"""Tells Llama 4's layers at which position of its own sequence each row of a packed step is.

Its layers without rotary embeddings scale queries by their position ("temperature tuning"), and count positions from
the start of the row that they are given and the length of the cache: in a packed step, over all sequences. So they get
a stand-in for the cache, whose "length" is each row's distance from that count.
"""

from __future__ import annotations

from typing import Any

import torch


class RowPositions:
    """A cache that holds nothing. positions: (num_rows,) of the step that runs."""

    def __init__(self) -> None:
        self.positions: torch.Tensor | None = None

    def note(self, _layer: Any, _args: Any, settings: dict[str, Any]) -> None:
        """Before a layer runs: keep the positions that it is given. They are (1, num_rows)."""
        self.positions = settings["position_ids"][0]

    def stand_in(self, _attention: Any, args: Any, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Before its attention runs: be its cache."""
        return args, {**settings, "past_key_values": self}

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """(num_rows,): what added to 0, 1, 2... gives the positions."""
        assert self.positions is not None  # the layer noted them just now
        return self.positions - torch.arange(len(self.positions), device=self.positions.device)

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The step's own keys and values: attention writes them to the engine's cache."""
        return keys, values


def give_row_positions(model: torch.nn.Module) -> None:
    """Set up the layers of a model that scale queries by position; other models have none."""
    rows = RowPositions()
    for layer in model.modules():
        attention: Any = getattr(layer, "self_attn", None)
        if getattr(attention, "attn_temperature_tuning", False) and not attention.use_rope:
            layer.register_forward_pre_hook(rows.note, with_kwargs=True)
            attention.register_forward_pre_hook(rows.stand_in, with_kwargs=True)
