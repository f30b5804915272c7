"""What the machine can do, measured: matrix products of a model's shapes, reading memory, and the limit from both.

The limit of a workload is the time of the work that no engine can avoid: linear layers of the tokens that must be
computed (a shared prefix once) and prefill attention at the measured matrix rate, and the decodes' reads of keys and
values at the measured memory rate.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

ROWS = 1024
"""Rows of the measured products: a large step's."""

READ_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Ceiling:
    """matrix_flops: floating-point operations a second. read_bytes: bytes a second."""

    matrix_flops: float
    read_bytes: float

    def or_better(self, other: Ceiling) -> Ceiling:
        """The higher of both measurements: whatever else runs on the machine can only lower them."""
        return Ceiling(max(self.matrix_flops, other.matrix_flops), max(self.read_bytes, other.read_bytes))


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """Tokens of one request."""

    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the limit needs to know of a model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """From the settings of a `transformers` config."""
        heads = int(config["num_attention_heads"])
        return cls(
            hidden=int(config["hidden_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config["num_key_value_heads"]),
            head_dim=int(config.get("head_dim", config["hidden_size"] // heads)),
            intermediate=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
        )

    @property
    def products(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of a layer's products: query-key-value, attention output, gate-up, down."""
        attended = self.heads * self.head_dim
        qkv = attended + 2 * self.kv_heads * self.head_dim
        return [
            (self.hidden, qkv),
            (attended, self.hidden),
            (self.hidden, 2 * self.intermediate),
            (self.intermediate, self.hidden),
        ]

    @property
    def layer_flops(self) -> int:
        """Linear work of one token in all layers."""
        return 2 * self.layers * sum(inputs * outputs for inputs, outputs in self.products)

    @property
    def head_flops(self) -> int:
        """Linear work of one sampled token in the language-model head."""
        return 2 * self.hidden * self.vocab


def measure(shape: ModelShape, dtype: torch.dtype, repeats: int = 15) -> Ceiling:
    """Both rates on this machine, now, with torch's threads."""
    return Ceiling(matrix_flops(shape.products, dtype, repeats), _read_bytes(repeats))


def limit_seconds(
    shape: ModelShape, requests: Sequence[RequestLengths], shared: int, itemsize: int, ceiling: Ceiling
) -> float:
    """The least time for these requests, whose prompts all begin with the same `shared` tokens."""
    kv_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * itemsize
    attention_flops = 4 * shape.layers * shape.heads * shape.head_dim  # for one query and one key
    linear = shared * shape.layer_flops
    attention = attention_flops * shared * (shared + 1) / 2
    read = 0
    for request in requests:
        decodes = request.output - 1  # the first output token comes out of the prefill
        linear += (request.prompt - shared + decodes) * shape.layer_flops + request.output * shape.head_flops
        attention += attention_flops * (_triangle(request.prompt) - _triangle(shared))
        read += kv_bytes * (_triangle(request.prompt + decodes) - _triangle(request.prompt))
    return (linear + attention) / ceiling.matrix_flops + read / ceiling.read_bytes


def _triangle(length: int) -> float:
    """Keys seen by all positions of a context together."""
    return length * (length + 1) / 2


def matrix_flops(shapes: Sequence[tuple[int, int]], dtype: torch.dtype, repeats: int = 15) -> float:
    """Floating-point operations a second in products of ROWS rows with weights of these (inputs, outputs)."""
    products = []
    for inputs, outputs in shapes:
        x = torch.randn(ROWS, inputs).to(dtype)
        products.append((x, torch.randn(outputs, inputs).to(dtype)))

    def run() -> None:
        for x, weight in products:
            torch.nn.functional.linear(x, weight)

    return 2 * ROWS * sum(inputs * outputs for inputs, outputs in shapes) / _median_seconds(run, repeats)


def _read_bytes(repeats: int) -> float:
    memory = torch.ones(READ_BYTES // 4)
    return READ_BYTES / _median_seconds(memory.sum, repeats)


def _median_seconds(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
