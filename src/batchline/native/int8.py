"""Int8 linear layers: quantizes numbers, reorders weights for the kernels, and calls the kernels.

Each output of a weight has a scale (so that its largest magnitude is 127), and each row of activations gets one at run
time. Products are sums of integers and so exact: a row's result depends neither on the other rows nor on the
instruction set. This module mirrors a structure of `int8_kernels.h`.
"""

from __future__ import annotations

import ctypes
import enum
import functools
from dataclasses import dataclass

import torch

from batchline.config import CpuKernels
from batchline.native.library import DTYPES, Kernel, check, load_library, opened, record, run_parallel
from batchline.native.packing import Gate, alternating, in_panels, padded

LARGEST = 127
"""-128 is not used, because it has no positive counterpart."""

SMALLEST_RANGE = 1e-30
"""Rows with only smaller numbers count as zero, because their factor would not be finite."""


class Int8Isa(enum.IntEnum):
    """Instruction sets that the int8 kernels are compiled for; a larger one is better."""

    PORTABLE = 0
    AVX2 = 1
    AVX_VNNI = 2
    AVX512_VNNI = 3
    AMX = 4


BEST_ISA = {
    "portable": Int8Isa.PORTABLE,
    "avx2": Int8Isa.AVX_VNNI,
    "avx512": Int8Isa.AVX512_VNNI,
    "avx512_bf16": Int8Isa.AVX512_VNNI,
    "amx": Int8Isa.AMX,
    "auto": Int8Isa.AMX,
}
"""The best int8 instruction set that a choice of kernels allows, by the width of its registers."""


class Int8LinearArgs(ctypes.Structure):
    """Mirrors the structure of the same name in `int8_kernels.h`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "panels", "scales", "sums", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "inputs", "outputs", "x_stride", "out_stride", "gate")),
    ]


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x: (rows, columns). Returns int8 of the same shape and float32 scales, (rows, 1): x is about their product.

    Equal to the kernels' results to the last bit. A row that is not finite becomes zeros with NaN as its scale.
    """
    x = x.float()
    largest = x.abs().amax(1, keepdim=True)
    is_finite = largest.isfinite()
    largest = largest.clamp_min(SMALLEST_RANGE)
    factor = largest.new_tensor(LARGEST) / largest  # dividing a number by a tensor would round twice
    values = torch.where(is_finite, x * factor, 0.0).round().to(torch.int8)
    return values, torch.where(is_finite, largest / LARGEST, torch.nan)


@dataclass(frozen=True, slots=True)
class PackedInt8Linear:
    """panels: int8, (num_panels, fours, PANEL, 4). For each of their columns: scales (float32), sums of the weights
    (int32), bias (float32) or None. num_outputs: columns of the result; for a gated pair, those of one of the two."""

    panels: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor
    bias: torch.Tensor | None
    num_outputs: int
    gate: Gate = Gate.NONE


def pack_int8(values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> PackedInt8Linear:
    """values: (outputs, inputs) int8; scales: (outputs,) float32; bias: (outputs,) or None."""
    panels = in_panels(values)
    return PackedInt8Linear(
        panels=panels,
        scales=padded(scales, len(panels)),
        sums=padded(values.sum(1, dtype=torch.int32), len(panels)),
        bias=None if bias is None else padded(bias.float(), len(panels)),
        num_outputs=len(values),
    )


def pack_int8_gated(gate: PackedInt8Linear, up: PackedInt8Linear, activation: Gate = Gate.SILU) -> PackedInt8Linear:
    """Both projections as one. They have the same shape, and both or neither have a bias."""
    bias = None
    if gate.bias is not None and up.bias is not None:
        bias = alternating(gate.bias, up.bias)
    return PackedInt8Linear(
        panels=torch.stack((gate.panels, up.panels), 1).flatten(0, 1),
        scales=alternating(gate.scales, up.scales),
        sums=alternating(gate.sums, up.sums),
        bias=bias,
        num_outputs=gate.num_outputs,
        gate=activation,
    )


class Int8Kernels:
    """The kernels of one instruction set. Tensors are on the CPU, their last dimension is contiguous."""

    def __init__(self, library: ctypes.CDLL, isa: Int8Isa) -> None:
        self.isa = isa
        self._library = library
        self._runtime = opened(library.batchline_int8_open(int(isa), run_parallel()), isa)

    def linear(self, x: torch.Tensor, weight: PackedInt8Linear, out: torch.Tensor) -> None:
        """out = x @ weight^T + bias, or the activated gate * up. x: (rows, inputs); out: (rows, outputs), of x's dtype,
        which is float32 or bfloat16."""
        args = Int8LinearArgs(
            x.data_ptr(),
            weight.panels.data_ptr(),
            weight.scales.data_ptr(),
            weight.sums.data_ptr(),
            None if weight.bias is None else weight.bias.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            x.shape[1],
            out.shape[1],
            x.stride(0),
            out.stride(0),
            weight.gate,
        )
        dtype = DTYPES[x.dtype]
        record(Kernel.INT8_LINEAR, self._runtime, dtype, args)
        check(self._library.batchline_int8_linear(self._runtime, dtype, ctypes.byref(args)))


def open_int8_kernels(wanted: CpuKernels) -> Int8Kernels | None:
    """The best int8 kernels that this processor supports and `wanted` allows; None if the library was not built."""
    library = _library()
    if wanted == "off" or library is None:
        return None
    return Int8Kernels(library, max(isa for isa in supported_isas() if isa <= BEST_ISA[wanted]))


def supported_isas() -> list[Int8Isa]:
    """The instruction sets that this build and processor support."""
    library = _library()
    return [] if library is None else [isa for isa in Int8Isa if library.batchline_int8_is_supported(int(isa))]


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load_library()
    if library is not None:
        library.batchline_int8_open.restype = ctypes.c_void_p
        library.batchline_int8_open.argtypes = [ctypes.c_int, ctypes.c_void_p]
        library.batchline_int8_linear.restype = ctypes.c_int
    return library
