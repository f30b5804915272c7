"""Asks a loaded model how it attends, and refuses one that the packed path would get wrong.

Two short made-up sequences run packed through the model with a recording attention, and each alone through the
model's own eager attention. The recording gives every layer's shapes and sliding window; the logits must agree. So a
model that mixes positions in any way the engine does not know (recurrent layers, position biases, attention sinks,
keys shared between layers) is named at load time and never gives wrong tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from batchline.engine.attention import PAGED_ATTENTION, prefill_attention
from batchline.engine.kv_cache import LayerSpec
from batchline.engine.native_cache import NativeKVCache
from batchline.engine.native_layout import NativeLayout
from batchline.errors import UnsupportedModel
from batchline.native.library import NativeKernels
from batchline.native.packing import PANEL

PROBE_ATTENTION = "batchline_probe"
PROBE_LENGTHS = (5, 9)
KNOWN_TENSORS = frozenset({"position_ids", "cache_position"})
KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
OWN_ATTENTION = "has attention code of its own, which the engine cannot replace by its packed one"

RELATIVE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


@dataclass(slots=True)
class Recording:
    """What the attention calls of one forward pass looked like. layers: by layer index."""

    layers: dict[int, LayerSpec] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def probe_attention_layers(name: str, model: Any, hf_config: Any) -> list[LayerSpec]:
    """The model's attention layers in order. Raises: UnsupportedModel, naming the architecture and the reason."""
    architecture = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModel(name, f"{architecture} {OWN_ATTENTION}")
    recording = Recording()
    try:
        packed = _run_packed(model, hf_config, recording)
        alone = logits_alone(model, hf_config)
    except Exception as exc:  # the model's code is foreign: on what it was not made for it may fail in any way
        raise UnsupportedModel(name, f"{architecture} cannot be run on packed sequences ({exc})") from exc
    if alone.isnan().any():
        raise UnsupportedModel(
            name, f"its logits are not numbers (NaN): its weights are damaged, or too large for {alone.dtype}"
        )
    layers = _checked_layers(name, architecture, hf_config, recording)
    difference = relative_difference(packed, alone)
    if not difference <= RELATIVE_TOLERANCE[packed.dtype]:
        raise UnsupportedModel(
            name,
            f"{architecture} does not give the same logits when sequences are packed (relative difference "
            f"{difference:.2g}); it is not among the architectures that the engine can run",
        )
    return layers


def recording_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    recording: Recording | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Plain causal attention within each of the probe's sequences, noting the layer. Shapes as `paged_attention`."""
    if recording is None:
        raise TypeError("its layers do not hand keyword arguments on to their attention")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if layer in recording.layers:
        recording.problems.append(f"layer {layer} attends more than once")
    if attention_mask is not None:
        recording.problems.append(f"layer {layer} makes an attention mask of its own")
    unknown = [name for name, given in others.items() if torch.is_tensor(given) and name not in KNOWN_TENSORS]
    if unknown:
        recording.problems.append(f"its attention takes {', '.join(sorted(unknown))}")
    recording.layers[layer] = LayerSpec(
        key.shape[1], key.shape[3], value.shape[3], sliding_window, query.shape[1] // key.shape[1]
    )
    queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    parts = []
    start = 0
    for length in PROBE_LENGTHS:
        rows = slice(start, start + length)
        parts.append(prefill_attention(queries[rows], keys[rows], values[rows], scale, sliding_window, softcap))
        start += length
    return torch.cat(parts).unsqueeze(0), None


def _checked_layers(name: str, architecture: str, hf_config: Any, recording: Recording) -> list[LayerSpec]:
    problems = list(recording.problems)
    expected = int(hf_config.num_hidden_layers)
    if sorted(recording.layers) != list(range(expected)):
        problems.append(f"{len(recording.layers)} of its {expected} layers attend to a key-value cache")
    for index, kind in enumerate(getattr(hf_config, "layer_types", None) or ()):
        spec = recording.layers.get(index)
        if kind not in KNOWN_LAYER_TYPES:
            problems.append(f"layer {index} is of type {kind}")
        elif kind == "sliding_attention" and spec is not None and spec.sliding_window is None:
            problems.append(f"layer {index} slides over a window that its attention call does not name")
    if _slides_by_mask_alone(hf_config, recording):
        problems.append(f"it slides over a window of {hf_config.sliding_window} that its attention calls do not name")
    if problems:
        raise UnsupportedModel(name, f"{architecture}: {problems[0]}, which the engine does not know how to run")
    return [recording.layers[index] for index in range(expected)]


def _slides_by_mask_alone(hf_config: Any, recording: Recording) -> bool:
    """Whether a config without layer types names a window that bites and no attention call does."""
    window = getattr(hf_config, "sliding_window", None)
    return (
        window is not None
        and getattr(hf_config, "use_sliding_window", True)
        and getattr(hf_config, "layer_types", None) is None
        and window < getattr(hf_config, "max_position_embeddings", math.inf)
        and all(spec.sliding_window is None for spec in recording.layers.values())
    )


@torch.inference_mode()
def agrees_in_native_layout(
    model: Any,
    hf_config: Any,
    layers: list[LayerSpec],
    kernels: NativeKernels,
    expected: torch.Tensor,
    tolerance: float | None = None,
) -> bool:
    """Whether the model, perhaps fused, gives the logits that `logits_alone` gave, with the native kernels.
    tolerance: the largest relative difference; None takes the dtype's."""
    sequences = _probe_sequences(model, hf_config)
    cache = NativeKVCache(kernels, layers, len(sequences), PANEL, expected.dtype)
    positions = [torch.arange(len(tokens)) for tokens in sequences]
    segments = [
        [row, len(tokens), len(tokens), block]
        for block, (row, tokens) in enumerate(zip((0, len(sequences[0])), sequences, strict=True))
    ]
    layout = NativeLayout(
        cache=cache,
        slots=torch.cat([block * PANEL + offsets for block, offsets in enumerate(positions)]),
        segments=torch.tensor(segments),
        tables=torch.arange(len(sequences)),
    )
    output = model(
        input_ids=torch.cat(sequences)[None],
        position_ids=torch.cat(positions)[None],
        use_cache=False,
        step_layout=layout,
    )
    limit = RELATIVE_TOLERANCE[expected.dtype] if tolerance is None else tolerance
    return relative_difference(output.logits[0], expected) <= limit


@torch.inference_mode()
def _run_packed(model: Any, hf_config: Any, recording: Recording) -> torch.Tensor:
    sequences = _probe_sequences(model, hf_config)
    positions = torch.cat([torch.arange(len(tokens), device=tokens.device) for tokens in sequences])
    _set_attention(model, PROBE_ATTENTION)
    try:
        output = model(
            input_ids=torch.cat(sequences)[None], position_ids=positions[None], use_cache=False, recording=recording
        )
    finally:
        _set_attention(model, PAGED_ATTENTION)
    logits: torch.Tensor = output.logits[0]
    return logits


@torch.inference_mode()
def logits_alone(model: Any, hf_config: Any) -> torch.Tensor:
    """(num_tokens, vocab): logits of the probe's sequences, each run alone through the model's own attention."""
    _set_attention(model, "eager")
    try:
        logits = [
            model(input_ids=tokens[None], use_cache=False).logits[0] for tokens in _probe_sequences(model, hf_config)
        ]
    finally:
        _set_attention(model, PAGED_ATTENTION)
    return torch.cat(logits)


def _probe_sequences(model: Any, hf_config: Any) -> list[torch.Tensor]:
    """Token ids spread over the vocabulary, the same at each call."""
    device = next(model.parameters()).device
    vocab = int(hf_config.vocab_size)
    stride = max(1, math.isqrt(vocab))
    tokens = (torch.arange(sum(PROBE_LENGTHS), device=device) * stride + 3) % vocab
    return [tokens[: PROBE_LENGTHS[0]], tokens[PROBE_LENGTHS[0] :]]


def relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, as a share of the largest expected number; NaN where anything is NaN."""
    wide = expected.float()
    return float((actual.float() - wide).abs().max() / wide.abs().max().clamp_min(1e-6))


def _set_attention(model: Any, implementation: str) -> None:
    model.set_attn_implementation(implementation)


AttentionInterface.register(PROBE_ATTENTION, recording_attention)
