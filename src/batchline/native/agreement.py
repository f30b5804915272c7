"""Tells rounding from wrong arithmetic: is what the kernels compute as near to exact numbers as what torch computes?

An absolute limit cannot tell: thirty random layers in bfloat16 differ by more than a wrong attention in two trained
ones. So both ways of computing are compared with a reference in float32: one that only rounds errs about as much as the
other. Where both compute in float32, hardly anything is rounded at all.

Rows (a token each) are judged one by one, by the length of their error relative to their own. A few rows may err
more than the rest: one may be nearly zero and hence all rounding, or rounding may send a token to another expert; none
may be plainly wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

SAME_NOISE, MOST_ROUNDED = 2.0, 0.75
"""How many times as much as torch's own rounding an error may be, and for which share of the rows."""

MORE_NOISE, PLAINLY_WRONG = 6.0, 0.5
"""An error that is more than so many times torch's own, and more than so much, no row may have."""

EXACT, MOST_EXACT, NEARLY_EXACT = 1e-4, 0.9, 1e-2
"""The error in float32 with another order of additions, for which share of the rows, and for every row."""

UNMEASURED = {torch.float32: 1e-4, torch.bfloat16: 4e-3, torch.float16: 5e-4}
"""What a format's rounding may do without torch's own showing it: about one unit in the last place of a result."""


def agree(actual: Tensor, own: Tensor, reference: Tensor) -> bool:
    """Whether what was computed in another way than torch's differs by rounding alone. own: of torch, in the same
    format; reference: in float32, perhaps `own` itself. All of them (rows, dim)."""
    errors = row_errors(actual, reference)
    return is_exact(errors) if reference is own else only_rounds(errors, row_errors(own, reference), own.dtype)


def row_errors(actual: Tensor, reference: Tensor) -> Tensor:
    """(..., dim) twice. Returns the length of each row's difference, relative to the reference row's; a row that is
    hardly more than zero is taken relative to the typical one. Float64; NaN or infinite where a row is not finite."""
    wide = reference.double()
    lengths = wide.norm(dim=-1).flatten()
    floor = 1e-3 * lengths.median() + torch.finfo(torch.float64).tiny
    errors: Tensor = (actual.double() - wide).norm(dim=-1).flatten() / lengths.maximum(floor)
    return errors


def only_rounds(errors: Tensor, own: Tensor, dtype: torch.dtype) -> bool:
    """Whether errors are those of rounding to the dtype. errors: of what is checked; own: of torch in the same format,
    for the same rows."""
    typical = own.median()
    noise = own.maximum(typical) + UNMEASURED[dtype]
    is_typical = bool(errors.median() <= SAME_NOISE * typical + UNMEASURED[dtype])
    share = float((errors <= SAME_NOISE * noise).double().mean())
    none_is_wrong = bool((errors <= (MORE_NOISE * noise).clamp_min(PLAINLY_WRONG)).all())
    return is_typical and share >= MOST_ROUNDED and none_is_wrong


def is_exact(errors: Tensor) -> bool:
    """Whether errors are those of another order of additions in float32."""
    return float((errors <= EXACT).double().mean()) >= MOST_EXACT and bool((errors <= NEARLY_EXACT).all())


@contextmanager
def widened(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, the model computes in a wider dtype: a module's weights are widened while it runs, and no longer, so
    that no second copy of the model is ever in memory."""
    handles = []
    for module in model.modules():
        narrow = {name: p for name, p in module._parameters.items() if p is not None and _is_narrower(p, dtype)}
        if isinstance(module, nn.Embedding):  # a few rows of a large table
            handles.append(module.register_forward_hook(lambda _module, _inputs, rows: rows.to(dtype)))
        elif narrow:
            handles.extend(_widen_while_running(module, narrow, dtype))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_narrower(parameter: Tensor, dtype: torch.dtype) -> bool:
    return parameter.is_floating_point() and parameter.dtype.itemsize < dtype.itemsize


def _widen_while_running(module: nn.Module, narrow: dict[str, Any], dtype: torch.dtype) -> list[Any]:
    def widen(module: nn.Module, _inputs: Any) -> None:
        for name, parameter in narrow.items():
            module._parameters[name] = parameter.to(dtype)

    def narrow_again(module: nn.Module, _inputs: Any, _output: Any) -> None:
        module._parameters.update(narrow)

    return [
        module.register_forward_pre_hook(widen),
        module.register_forward_hook(narrow_again, always_call=True),
    ]


@contextmanager
def with_first_layers(model: nn.Module, num_layers: int, count: int) -> Iterator[None]:
    """Inside, a model of num_layers has its first `count` alone, where it keeps them in one list."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == num_layers
    ]
    if len(found) != 1:
        yield
        return
    parent, name, layers = found[0]
    setattr(parent, name, nn.ModuleList(list(layers)[:count]))
    try:
        yield
    finally:
        setattr(parent, name, layers)
