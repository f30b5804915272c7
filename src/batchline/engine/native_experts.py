"""Experts of mixtures on the native kernels.

`transformers` stacks the weights of a layer's experts into two tensors, in one form for most families. Here each
expert becomes two packed linear layers, which multiply all tokens of the expert in two native calls. The model's own
code still decides which experts a token goes to, and with which weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations import moe

from batchline.engine.layer_families import ACTIVATIONS
from batchline.engine.linear_layers import LinearFormat, linear_of
from batchline.native.packing import Gate

PART_ROWS = 1024
"""Rows that are computed together. Each of them has a result for each of its experts until these are added."""


class NativeExperts(nn.Module):
    """All experts of a layer."""

    def __init__(self, experts: Any, linear_format: LinearFormat) -> None:
        """experts: of the form that `is_stacked` accepts."""
        super().__init__()
        activation = _activation(experts)
        assert activation is not None, "the caller asks `is_stacked`"
        self.num_experts = len(experts.down_proj)
        self._layers = []
        for gate_up, down in zip(experts.gate_up_proj, experts.down_proj, strict=True):
            gate, up = map(linear_of, gate_up.chunk(2))
            self._layers.append((linear_format.gate(gate, up, activation), linear_format.join(linear_of(down))))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum of what each row's experts make of it. hidden_states: (rows, hidden), returned as such;
        top_k_index, top_k_weights: (rows, experts of a row)."""
        rows = (slice(first, first + PART_ROWS) for first in range(0, len(hidden_states), PART_ROWS))
        return torch.cat([self._sums(hidden_states[own], top_k_index[own], top_k_weights[own]) for own in rows])

    def _sums(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        num_rows, num_each = experts.shape
        chosen = experts.flatten()
        order = chosen.argsort(stable=True)
        sorted_x = x[order // num_each]
        activated = x.new_empty(len(order), self._layers[0][0].num_outputs)
        results = torch.empty_like(sorted_x)
        first = 0
        for expert, count in enumerate(torch.bincount(chosen, minlength=self.num_experts).tolist()):
            if count == 0:
                continue
            gate_up, down = self._layers[expert]
            own = slice(first, first + count)
            gate_up(sorted_x[own], activated[own])
            down(activated[own], results[own])
            first += count
        weighted = results * weights.flatten()[order, None]
        by_row = torch.empty_like(weighted)
        by_row[order] = weighted
        return by_row.view(num_rows, num_each, -1).sum(1).to(x.dtype)


def is_stacked(module: Any) -> bool:
    """Whether a module is a layer's stacked experts, in the form that most families have: gate and up one after the
    other, no biases, no norms, and an activation that the kernels compute."""
    gated = getattr(moe, "_default_apply_gate", None)
    if gated is None or getattr(type(module), "_apply_gate", None) is not gated:
        return False
    has_usual_form = (
        module.has_gate
        and module.is_concatenated
        and not (module.is_transposed or module.has_bias or module.has_post_expert_norm)
    )
    sizes = module.down_proj.shape[1:]
    return has_usual_form and not any(size % 2 for size in sizes) and _activation(module) is not None


def _activation(experts: Any) -> Gate | None:
    return next((gate for name, gate in ACTIVATIONS.items() if type(ACT2FN[name]) is type(experts.act_fn)), None)


def has_native_experts(model: nn.Module) -> bool:
    """Whether `use_native_experts` has changed the model."""
    return any(isinstance(module, NativeExperts) for module in model.modules())


def use_native_experts(model: nn.Module, linear_format: LinearFormat) -> None:
    """Run all stacked experts on the kernels, in place. Their weights are packed, not stored twice."""
    for path in _paths(model):
        model.set_submodule(path, NativeExperts(model.get_submodule(path), linear_format))


@contextmanager
def native_experts(model: nn.Module, linear_format: LinearFormat) -> Iterator[None]:
    """The same inside the block; their weights are then stored twice."""
    own = {path: model.get_submodule(path) for path in _paths(model)}
    use_native_experts(model, linear_format)
    try:
        yield
    finally:
        for path, experts in own.items():
            model.set_submodule(path, experts)


def _paths(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if is_stacked(module)]
