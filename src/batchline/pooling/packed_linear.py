"""Linear layers for CPUs with their weights in oneDNN's own blocked layout.

`torch.nn.Linear` hands float32 to MKL, which on processors of other makers than its own leaves more than half of the
machine idle; oneDNN uses it all, and a weight packed once spares the repacking at every call (see
docs/decisions.md for figures). Values differ by float rounding alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

TYPICAL_ROWS = 512
"""Rows per call that the packed layout is chosen for; other numbers work too."""

PACKABLE_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Module):
    """A linear layer whose weight is only readable by oneDNN. For inference."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), TYPICAL_ROWS)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features). Returns (..., out_features)."""
        packed: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return packed


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build and device have packed layers for the dtype."""
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    has_operators = has_onednn and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    has_fast_type = dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return device.type == "cpu" and dtype in PACKABLE_DTYPES and has_operators and bool(has_fast_type)


Replaced = list[tuple[nn.Module, str, nn.Module]]
"""What was replaced: (parent, name, the module before)."""


def pack_linears(module: nn.Module) -> Replaced:
    """Replace, in place, every plain linear layer below `module`. Subclasses of nn.Linear are left alone."""
    replaced: Replaced = []
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))
                replaced.append((parent, name, child))
    return replaced


def restore(replaced: Replaced) -> None:
    """Put what was replaced back."""
    for parent, name, before in replaced:
        setattr(parent, name, before)
