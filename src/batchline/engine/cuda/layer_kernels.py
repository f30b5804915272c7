"""Triton kernels for what lies between the matrix products of a layer: norms, rotation, activation.

They compute in float32 and round where the model code of `transformers` rounds, except within a rotation. All outputs
are fresh tensors: if one were also an input, a thread could read what another one has already written. The shapes of
launches depend only on those of the tensors, so a launch can be recorded in a CUDA graph. For the names and missing
annotations of kernel arguments, see `kernels.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from batchline.engine.kv_cache import CacheGroup, LayerCache

ACTIVATION_LANES = 1024
"""Numbers that one program of `silu_product` computes."""

LANES_PER_WARP = 512
"""Numbers of a row that a warp of `add_rms_norm` adds up, 16 for each thread."""

MAX_WARPS = 16

HeadNorms = tuple[torch.Tensor, torch.Tensor, float]
"""Weights of a layer's query and key norms, and their eps."""


@triton.jit
def norm_kernel(
    x, delta, weight, sums, out, x_stride, delta_stride, eps,
    WIDTH: tl.constexpr, LANES: tl.constexpr, HAS_DELTA: tl.constexpr,
):  # fmt: skip
    """One program normalises one row."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    inside = lane < WIDTH
    dtype = out.dtype.element_ty
    numbers = tl.load(x + row * x_stride + lane, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        numbers += tl.load(delta + row * delta_stride + lane, mask=inside, other=0.0).to(tl.float32)
        rounded = numbers.to(dtype)
        tl.store(sums + row * WIDTH + lane, rounded, mask=inside)
        numbers = rounded.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(numbers * numbers, 0) / WIDTH + eps)
    normed = (numbers * factor).to(dtype).to(tl.float32)
    weights = tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + lane, (normed * weights).to(dtype), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def rotate_kernel(
    qkv, cos, sin, query_norm, key_norm, slots, queries, keys, cached_keys, cached_values, qkv_stride, eps,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, GROUP_LANES: tl.constexpr,
    HALF_LANES: tl.constexpr, VALUE_LANES: tl.constexpr, HAS_NORMS: tl.constexpr,
):  # fmt: skip
    """One program: a KV head of one token, with the queries of its group."""
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    row = qkv + token * qkv_stride
    slot = tl.load(slots + token)

    member = tl.arange(0, GROUP_LANES)
    head = (kv_head * GROUP + member)[:, None]
    low, high = _rotated(
        row + head * DIM, (member < GROUP)[:, None], cos + token * DIM, sin + token * DIM, query_norm, eps,
        DIM, HALF_LANES, HAS_NORMS,
    )  # fmt: skip
    half = tl.arange(0, HALF_LANES)[None, :]
    inside = (member < GROUP)[:, None] & (half < DIM // 2)
    target = queries + (token * KV_HEADS * GROUP + head) * DIM + half
    tl.store(target, low.to(queries.dtype.element_ty), mask=inside)
    tl.store(target + DIM // 2, high.to(queries.dtype.element_ty), mask=inside)

    one = tl.arange(0, 1)[:, None]
    low, high = _rotated(
        row + (KV_HEADS * GROUP + kv_head + one) * DIM, one == 0, cos + token * DIM, sin + token * DIM, key_norm, eps,
        DIM, HALF_LANES, HAS_NORMS,
    )  # fmt: skip
    inside = (one == 0) & (half < DIM // 2)
    target = keys + (token * KV_HEADS + kv_head) * DIM + half
    tl.store(target, low.to(keys.dtype.element_ty), mask=inside)
    tl.store(target + DIM // 2, high.to(keys.dtype.element_ty), mask=inside)
    target = cached_keys + (slot * KV_HEADS + kv_head) * DIM + half
    tl.store(target, low.to(cached_keys.dtype.element_ty), mask=inside)
    tl.store(target + DIM // 2, high.to(cached_keys.dtype.element_ty), mask=inside)

    lane = tl.arange(0, VALUE_LANES)
    values = tl.load(row + KV_HEADS * (GROUP + 1) * DIM + kv_head * VALUE_DIM + lane, mask=lane < VALUE_DIM)
    tl.store(cached_values + (slot * KV_HEADS + kv_head) * VALUE_DIM + lane, values, mask=lane < VALUE_DIM)


@triton.jit
def _rotated(
    heads, is_head, cos, sin, norm, eps, DIM: tl.constexpr, HALF_LANES: tl.constexpr, HAS_NORMS: tl.constexpr
):  # fmt: skip
    """The halves of some heads, normed if the layer norms them, and rotated. heads: pointers, (n, 1)."""
    dtype = heads.dtype.element_ty
    half = tl.arange(0, HALF_LANES)[None, :]
    inside = half < DIM // 2
    low = tl.load(heads + half, mask=is_head & inside, other=0.0).to(tl.float32)
    high = tl.load(heads + DIM // 2 + half, mask=is_head & inside, other=0.0).to(tl.float32)
    if HAS_NORMS:
        squares = tl.sum(low * low + high * high, 1)
        factor = (1.0 / tl.sqrt(squares / DIM + eps))[:, None]
        low_weights = tl.load(norm + half, mask=inside, other=0.0).to(tl.float32)
        high_weights = tl.load(norm + DIM // 2 + half, mask=inside, other=0.0).to(tl.float32)
        low = ((low * factor).to(dtype).to(tl.float32) * low_weights).to(dtype).to(tl.float32)
        high = ((high * factor).to(dtype).to(tl.float32) * high_weights).to(dtype).to(tl.float32)
    low_cos = tl.load(cos + half, mask=inside, other=0.0).to(tl.float32)
    high_cos = tl.load(cos + DIM // 2 + half, mask=inside, other=0.0).to(tl.float32)
    low_sin = tl.load(sin + half, mask=inside, other=0.0).to(tl.float32)
    high_sin = tl.load(sin + DIM // 2 + half, mask=inside, other=0.0).to(tl.float32)
    return low * low_cos - high * low_sin, high * high_cos + low * high_sin


@triton.jit
def silu_kernel(gate_up, out, gate_up_stride, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """One program: some columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = lane < WIDTH
    dtype = out.dtype.element_ty
    gate = tl.load(gate_up + row * gate_up_stride + lane, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_stride + WIDTH + lane, mask=inside, other=0.0).to(tl.float32)
    activated = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    tl.store(out + row * WIDTH + lane, (activated * up).to(dtype), mask=inside)


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + delta, that normalised and times the weight). x, delta: (rows, width), their last dimension contiguous.
    Without a delta, the first result is x itself."""
    rows, width = x.shape
    lanes = triton.next_power_of_2(width)
    out = x.new_empty(rows, width)
    sums = x if delta is None else x.new_empty(rows, width)
    norm_kernel[(rows,)](
        x,
        delta,
        weight,
        sums,
        out,
        x.stride(0),
        0 if delta is None else delta.stride(0),
        eps,
        WIDTH=width,
        LANES=lanes,
        HAS_DELTA=delta is not None,
        num_warps=max(1, min(MAX_WARPS, lanes // LANES_PER_WARP)),
    )
    return sums, out


def rotate_and_write(
    qkv: torch.Tensor,
    group: CacheGroup,
    rotary: tuple[torch.Tensor, torch.Tensor],
    head_norms: HeadNorms | None,
    slots: torch.Tensor,
    cache: LayerCache,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm the heads of queries and keys, if the layer does so, rotate them, and write keys and values to the cache.

    qkv: (num_tokens, outputs of the three projections), last dimension contiguous. rotary: cosines and sines,
    (num_tokens, key_dim), contiguous. slots: (num_tokens,) int64. Returns the rotated queries and keys,
    (num_tokens, heads, key_dim).
    """
    num_tokens = len(qkv)
    cos, sin = rotary
    if cos.shape != (num_tokens, group.key_dim):
        raise ValueError(f"heads of {group.key_dim} numbers have rotations of {tuple(cos.shape)}")
    query_norm, key_norm, eps = head_norms or (None, None, 0.0)
    queries = qkv.new_empty(num_tokens, group.num_heads, group.key_dim)
    keys = qkv.new_empty(num_tokens, group.num_kv_heads, group.key_dim)
    heads = group.num_heads // group.num_kv_heads
    rotate_kernel[(num_tokens, group.num_kv_heads)](
        qkv,
        cos,
        sin,
        query_norm,
        key_norm,
        slots,
        queries,
        keys,
        cache.keys,
        cache.values,
        qkv.stride(0),
        eps,
        KV_HEADS=group.num_kv_heads,
        GROUP=heads,
        DIM=group.key_dim,
        VALUE_DIM=group.value_dim,
        GROUP_LANES=triton.next_power_of_2(heads),
        HALF_LANES=triton.next_power_of_2(group.key_dim // 2),
        VALUE_LANES=triton.next_power_of_2(group.value_dim),
        HAS_NORMS=head_norms is not None,
        num_warps=2,
    )
    return queries, keys


def silu_product(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """out = silu(gate) * up. gate_up: (rows, 2 * width), last dimension contiguous, the gates first; out: (rows,
    width), contiguous."""
    rows, width = out.shape
    silu_kernel[(rows, triton.cdiv(width, ACTIVATION_LANES))](
        gate_up, out, gate_up.stride(0), WIDTH=width, LANES=ACTIVATION_LANES
    )
