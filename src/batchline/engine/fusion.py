"""Fused decoder layers for known models: fewer and larger products, with native steps between them.

Replaces the decoder layers of a loaded `transformers` model with one module that computes the same. It fuses

    query, key and value projections    into one product
    gate and up projections             into one product, together with the activation
    residual sums                       into the normalisation
    rotation                            into the cache write

Weights are repacked, never stored twice. A model is only changed if its code is known exactly. The caller compares the
fused model with the original before it uses it (`native_probe`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.mistral.modeling_mistral import MistralModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

from batchline.engine.attention import AttentionParams
from batchline.engine.kv_cache import CacheGroup, by_layer
from batchline.engine.linear_layers import AnyLinear, LinearFormat
from batchline.engine.native_cache import NativeLayout
from batchline.engine.replay import MAX_ROWS, DecodeReplay, Rotary
from batchline.native.library import NativeKernels

FUSIBLE = (LlamaModel, MistralModel, Qwen2Model, Qwen2VLTextModel, Qwen2_5_VLTextModel, Qwen3Model, Qwen3VLTextModel)
"""Decoders of pre-normalised layers of rotary attention and a SiLU-gated MLP, attention perhaps with norms per head."""

MLP_ROWS = 1024
"""Rows that go through the MLP together: enough for full speed, few enough to stay in the processor's caches."""


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One decoder layer's weights. head_norms: weights of the query and key norms, and their eps, if it has them."""

    group: CacheGroup
    params: AttentionParams
    eps: float
    input_norm: torch.Tensor
    attention_norm: torch.Tensor
    head_norms: tuple[torch.Tensor, torch.Tensor, float] | None
    qkv: AnyLinear
    attention_out: AnyLinear
    gate_up: AnyLinear
    down: AnyLinear


class Workspace:
    """Buffers for the intermediate results of steps of at most `max_rows` rows. All layers share them.

    They are reused from step to step, because the system would zero fresh memory page by page each time.
    """

    def __init__(self, layer: FusedLayer, like: torch.Tensor, max_rows: int) -> None:
        self.max_rows = max_rows
        hidden = layer.input_norm.shape[0]
        self._normed = like.new_empty(max_rows, hidden)
        self._delta = like.new_empty(max_rows, hidden)
        self._qkv = like.new_empty(max_rows, layer.qkv.num_outputs)
        self._attended = like.new_empty(max_rows, layer.group.num_heads * layer.group.value_dim)
        self._activated = like.new_empty(min(max_rows, MLP_ROWS), layer.gate_up.num_outputs)

    def rows(self, layer: FusedLayer, count: int) -> StepBuffers:
        """Views of the first rows, for one step."""
        group = layer.group
        qkv = self._qkv[:count]
        keys_from = group.num_heads * group.key_dim
        values_from = keys_from + group.num_kv_heads * group.key_dim
        return StepBuffers(
            normed=self._normed[:count],
            delta=self._delta[:count],
            qkv=qkv,
            queries=qkv[:, :keys_from].view(count, group.num_heads, group.key_dim),
            keys=qkv[:, keys_from:values_from].view(count, group.num_kv_heads, group.key_dim),
            values=qkv[:, values_from:].view(count, group.num_kv_heads, group.value_dim),
            attended=self._attended[:count].view(count, group.num_heads, group.value_dim),
            activated=self._activated[:count],
        )


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """The buffers for one step, with a row per token. queries, keys and values are views of qkv; activated holds at
    most MLP_ROWS rows at a time."""

    normed: torch.Tensor
    delta: torch.Tensor
    qkv: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    attended: torch.Tensor
    activated: torch.Tensor


class FusedStack(nn.Module):
    """All decoder layers of a model, as the one entry of its list of layers."""

    def __init__(self, kernels: NativeKernels, layers: Sequence[FusedLayer]) -> None:
        super().__init__()
        self._kernels = kernels
        self._layers = layers
        self._workspace: Workspace | None = None
        self._decode_workspace: Workspace | None = None
        self._decodes = DecodeReplay()

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        step_layout: NativeLayout,
        added: tuple[torch.Tensor, Sequence[torch.Tensor]] | None = None,
        **_ignored: Any,
    ) -> torch.Tensor:
        """hidden_states: (1, num_tokens, hidden), packed; position_embeddings: cosines and sines, (1, num_tokens, d).
        added: rows, and what is added to them after the first layer, the second and so on, (num_rows, hidden) each.
        Other keyword arguments served the original layers and are not needed here."""
        rotary = (position_embeddings[0][0], position_embeddings[1][0])
        if added is None and self._decodes.takes(step_layout):
            if self._decode_workspace is None:
                self._decode_workspace = Workspace(self._layers[0], hidden_states, MAX_ROWS)
            layers = partial(self._run, self._decode_workspace)
            return self._decodes(layers, hidden_states[0], rotary, step_layout).unsqueeze(0)
        x = hidden_states[0].clone()  # updated in place from layer to layer
        if self._workspace is None or self._workspace.max_rows < len(x):
            self._workspace = None  # free the old one before the new one is allocated
            self._workspace = Workspace(self._layers[0], x, len(x))
        delta = self._run(self._workspace, x, rotary, step_layout, added)
        return x.add_(delta).unsqueeze(0)

    def _run(
        self,
        workspace: Workspace,
        x: torch.Tensor,
        rotary: Rotary,
        layout: NativeLayout,
        added: tuple[torch.Tensor, Sequence[torch.Tensor]] | None = None,
    ) -> torch.Tensor:
        """All layers. x: (num_tokens, hidden), changed in place. Returns what is to be added to x: one of the
        workspace's buffers."""
        buffers = workspace.rows(self._layers[0], len(x))
        delta = None
        for index, layer in enumerate(self._layers):
            self._kernels.rms_norm(x, layer.input_norm, layer.eps, buffers.normed, delta)
            self._attend(index, layer, buffers, rotary, layout)
            delta = buffers.delta
            self._kernels.rms_norm(x, layer.attention_norm, layer.eps, buffers.normed, delta)
            self._gated_mlp(layer, buffers)
            if added is not None and index < len(added[1]):
                x.index_add_(0, added[0], added[1][index])
        return buffers.delta

    def _attend(
        self,
        index: int,
        layer: FusedLayer,
        buffers: StepBuffers,
        rotary: Rotary,
        layout: NativeLayout,
    ) -> None:
        """delta = the attention block's output for normed."""
        layer.qkv(buffers.normed, buffers.qkv)
        self._kernels.rotary_and_write(
            buffers.queries,
            buffers.keys,
            buffers.values,
            layout.slots,
            layout.cache.layers[index],
            rotary,
            layer.head_norms,
        )
        layout.read(index, buffers.queries, layer.params, buffers.attended)
        layer.attention_out(buffers.attended.flatten(1), buffers.delta)

    def _gated_mlp(self, layer: FusedLayer, buffers: StepBuffers) -> None:
        """delta = the MLP's output for normed, some rows at a time."""
        for first in range(0, len(buffers.normed), MLP_ROWS):
            normed, delta = (x[first : first + MLP_ROWS] for x in (buffers.normed, buffers.delta))
            activated = buffers.activated[: len(normed)]
            layer.gate_up(normed, activated)
            layer.down(activated, delta)


class NativeRMSNorm(nn.Module):
    """The model's final normalisation."""

    def __init__(self, kernels: NativeKernels, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self._kernels = kernels
        self._weight = weight
        self._eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: (1, rows, hidden), contiguous."""
        out = torch.empty_like(hidden_states)
        self._kernels.rms_norm(hidden_states[0], self._weight, self._eps, out[0])
        return out


def can_fuse(model: nn.Module, groups: Sequence[CacheGroup]) -> bool:
    """Whether `fuse` knows the model's layers, and all have the same shape."""
    return type(getattr(model, "model", None)) in FUSIBLE and why_not_fused(model, groups) is None


def why_not_fused(model: Any, groups: Sequence[CacheGroup]) -> str | None:
    """What keeps a model of a known architecture from being fused, as text for the user; None if nothing does, or if
    its architecture is not known."""
    if type(getattr(model, "model", None)) not in FUSIBLE:
        return None
    if model.config.hidden_act != "silu":
        return f"its activation is {model.config.hidden_act}"
    if model.config.hidden_size % 2 or model.config.intermediate_size % 2:
        return "its sizes are odd"  # bfloat16 rows are read in pairs
    shapes = {(group.num_heads, group.num_kv_heads, group.key_dim, group.value_dim) for group in groups}
    return None if len(shapes) == 1 else "its layers have different shapes"


def fuse(model: Any, groups: Sequence[CacheGroup], kernels: NativeKernels, linear_format: LinearFormat) -> None:
    """Replace the model's decoder layers, in place. Afterwards it can only run packed steps in native layouts."""
    decoder = model.model
    fused = []
    for index, group in enumerate(by_layer(groups)):
        fused.append(fused_layer(decoder.layers[index], group, linear_format))
        decoder.layers[index] = nn.Identity()  # frees the weights that were copied
    decoder.layers = nn.ModuleList([FusedStack(kernels, fused)])
    decoder.norm = NativeRMSNorm(kernels, decoder.norm.weight, decoder.norm.variance_epsilon)


def fused_layer(layer: Any, group: CacheGroup, linear_format: LinearFormat) -> FusedLayer:
    """One of the model's layers in the form that `FusedStack` needs."""
    attention, mlp = layer.self_attn, layer.mlp
    head_norms = None
    if hasattr(attention, "q_norm"):
        head_norms = (attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.variance_epsilon)
    return FusedLayer(
        group=group,
        params=AttentionParams(attention.scaling, group.sliding_window),
        eps=layer.input_layernorm.variance_epsilon,
        input_norm=layer.input_layernorm.weight,
        attention_norm=layer.post_attention_layernorm.weight,
        head_norms=head_norms,
        qkv=linear_format.join(attention.q_proj, attention.k_proj, attention.v_proj),
        attention_out=linear_format.join(attention.o_proj),
        gate_up=linear_format.gate(mlp.gate_proj, mlp.up_proj),
        down=linear_format.join(mlp.down_proj),
    )
