"""The activations of gated layers, in torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from batchline.native.packing import Gate

ACTIVATIONS: dict[Gate, Callable[[torch.Tensor], torch.Tensor]] = {
    Gate.SILU: functional.silu,
    Gate.GELU_TANH: partial(functional.gelu, approximate="tanh"),
}
