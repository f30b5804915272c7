"""Which fused models run without the Python of `transformers` around their layers.

That they give the right tokens is the oracle's business (`test_oracle.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import FUSED, make_model

from batchline.config import CacheConfig, EngineConfig, ModelConfig
from batchline.engine.core import Engine
from batchline.engine.direct_forward import DirectForward
from batchline.native.library import open_kernels

pytestmark = pytest.mark.skipif(
    open_kernels("auto") is None, reason="the native kernels were not built: no C++ compiler"
)

DOING_MORE = {"granite", "gemma2", "gemma3_text", "olmo3"}
"""Granite multiplies its embeddings, and Gemma 2 squashes its logits. The others have a rotary embedding for each type
of layer."""


def make_engine(folder: Path) -> Engine:
    model = ModelConfig(model=str(folder), dtype="float32", device="cpu", max_model_len=64)
    return Engine(EngineConfig(model=model, cache=CacheConfig(num_bytes=4 << 20)))


@pytest.mark.parametrize("family", sorted(FUSED))
def test_models_that_only_embed_and_normalise_around_their_layers_run_directly(family: str, tmp_path: Path) -> None:
    runner: Any = make_engine(make_model(family, tmp_path))._runner
    assert (runner._direct is None) == (family in DOING_MORE)


def test_a_model_whose_own_pass_gives_other_bits_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    direct = DirectForward.__call__

    def off_by_a_little(self: DirectForward, inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits, hidden = direct(self, inputs)
        return logits * (1 + 1e-6), hidden

    monkeypatch.setattr(DirectForward, "__call__", off_by_a_little)
    runner: Any = make_engine(make_model("llama", tmp_path))._runner
    assert runner._direct is None


def test_a_new_cache_is_zero_after_the_model_was_compared(tmp_path: Path) -> None:
    runner: Any = make_engine(make_model("llama", tmp_path))._runner
    assert not runner._cache._memory.any()
