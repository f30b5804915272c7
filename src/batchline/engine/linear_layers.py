"""Linear layers inside fused layers: weights packed in one number format, bound to the kernels that multiply them.

The fused layers only know `LinearFormat` and `LinearLayer`. Whether numbers are floats or bytes is decided once, when a
model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from batchline.native.library import NativeKernels
from batchline.native.packing import PackedLinear, pack, pack_gated


class PackedWeight(Protocol):
    """A weight in some kernels' order. num_outputs: columns of the result."""

    @property
    def num_outputs(self) -> int: ...


Weight = TypeVar("Weight", bound=PackedWeight)
_Weight_contra = TypeVar("_Weight_contra", bound=PackedWeight, contravariant=True)


class LinearKernels(Protocol[_Weight_contra]):
    """Kernels for one kind of packed weight."""

    def linear(self, x: torch.Tensor, weight: _Weight_contra, out: torch.Tensor) -> None:
        """out = x @ weight^T + bias, or silu(gate) * up. x: (rows, inputs); out: (rows, num_outputs)."""


@dataclass(frozen=True, slots=True)
class LinearLayer(Generic[Weight]):
    """A packed weight and its kernels."""

    kernels: LinearKernels[Weight]
    weight: Weight

    @property
    def num_outputs(self) -> int:
        """Columns of the result; for a gated pair, those of one of the two."""
        return self.weight.num_outputs

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x: (rows, inputs); out: (rows, num_outputs), overwritten."""
        self.kernels.linear(x, self.weight, out)


class LinearFormat(Protocol):
    """Packs a model's linear modules. They are of one kind, and either all or none of them have a bias."""

    def join(self, *linears: Any) -> LinearLayer[Any]:
        """One layer with the concatenated outputs of all."""

    def gate(self, gate: Any, up: Any) -> LinearLayer[Any]:
        """One layer with the outputs silu(gate) * up."""


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """Weights in the model's own dtype; the modules are `nn.Linear`."""

    kernels: NativeKernels

    def join(self, *linears: nn.Linear) -> LinearLayer[PackedLinear]:
        """See `LinearFormat`."""
        weights: list[torch.Tensor] = [linear.weight for linear in linears]
        biases: list[torch.Tensor] = [linear.bias for linear in linears if linear.bias is not None]
        return LinearLayer(self.kernels, pack(torch.cat(weights), torch.cat(biases) if biases else None))

    def gate(self, gate: nn.Linear, up: nn.Linear) -> LinearLayer[PackedLinear]:
        """See `LinearFormat`."""
        return LinearLayer(self.kernels, pack_gated(*(pack(linear.weight, linear.bias) for linear in (gate, up))))
