"""Weights of linear layers in the order in which the native kernels read them.

A panel is 16 outputs: for each pair of inputs (one input in float32) its 16 columns lie together. The last panel is
padded with zeros. Gate and up projections are packed together, a panel of one after a panel of the other, so that the
kernel has both at hand and writes their activated product only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PANEL = 16


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """panels: (num_panels, pairs, PANEL, pair); bias: (num_panels * PANEL,) or None; num_outputs: columns of the
    result, for a gated pair those of one of the two."""

    panels: torch.Tensor
    bias: torch.Tensor | None
    num_outputs: int
    is_gated: bool = False


def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    """weight: (outputs, inputs); bias: (outputs,) or None."""
    panels = _panels(weight)
    return PackedLinear(panels, None if bias is None else _padded(bias, len(panels)), len(weight))


def pack_gated(gate: PackedLinear, up: PackedLinear) -> PackedLinear:
    """Both projections as one; they have the same shape, and both or none of them a bias."""
    panels = torch.stack((gate.panels, up.panels), 1).flatten(0, 1)
    bias = None
    if gate.bias is not None and up.bias is not None:
        bias = torch.stack((gate.bias.view(-1, PANEL), up.bias.view(-1, PANEL)), 1).flatten()
    return PackedLinear(panels, bias, gate.num_outputs, is_gated=True)


def _panels(weight: torch.Tensor) -> torch.Tensor:
    outputs, inputs = weight.shape
    pair = 4 // weight.dtype.itemsize
    num_panels, num_pairs = -(-outputs // PANEL), -(-inputs // pair)
    padded = weight.new_zeros(num_panels * PANEL, num_pairs * pair)
    padded[:outputs, :inputs] = weight
    return padded.view(num_panels, PANEL, num_pairs, pair).transpose(1, 2).contiguous()


def _padded(bias: torch.Tensor, num_panels: int) -> torch.Tensor:
    padded = bias.new_zeros(num_panels * PANEL)
    padded[: len(bias)] = bias
    return padded
